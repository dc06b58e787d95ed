"""A script for torchrun: a run in which rank 1 fails to copy a frozen layer, as on a faulty device.

    torchrun ... failing_copy.py NUMBER [flags of pretrain_gpt_bcd.py]

The copy with this number fails, counted from 0 over the run.
"""

from __future__ import annotations

import os
import sys
from typing import Any

from megatron.bcd.arguments import parse_run_config
from megatron.bcd.model.builder import build_model
from megatron.bcd.runtime import device
from megatron.bcd.training.pretrain import pretrain


def main() -> None:
    config = parse_run_config(sys.argv[2:], prog="failing_copy.py")
    copy, count = device.CopyStream.copy, 0

    def failing(*args: Any, **kwargs: Any) -> device.Copied:
        nonlocal count
        count += 1
        if count > int(sys.argv[1]):
            raise RuntimeError("CUDA error: uncorrectable ECC error encountered")
        return copy(*args, **kwargs)

    if os.environ["RANK"] == "1":
        device.CopyStream.copy = failing  # type: ignore[method-assign]
    pretrain(config, build_model, prog="failing_copy.py")


if __name__ == "__main__":
    main()
