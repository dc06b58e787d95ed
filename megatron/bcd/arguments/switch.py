"""The action of a flag that is on or off."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from typing import Any


class Switch(argparse.Action):
    """Sets True for a spelling in `const` and False for any other."""

    def __init__(self, option_strings: Sequence[str], dest: str, *, const: tuple[str, ...], **common: Any) -> None:
        super().__init__(option_strings, dest, nargs=0, const=const, **common)

    def __call__(
        self, parser: argparse.ArgumentParser, namespace: argparse.Namespace, values: Any, option: str | None = None
    ) -> None:
        setattr(namespace, self.dest, option in self.const)

    def switched(self, option: str, is_on: bool) -> bool:
        """The field's value where a file says that the flag `option` is on, or off."""
        return (option in self.const) == is_on
