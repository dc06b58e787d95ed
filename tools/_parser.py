"""The command line of the tools."""

from __future__ import annotations

import argparse
from typing import NoReturn


class Parser(argparse.ArgumentParser):
    """Raises ValueError, where argparse would leave the process."""

    def error(self, message: str) -> NoReturn:
        raise ValueError(message.removeprefix("argument "))
