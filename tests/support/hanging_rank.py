"""A script for torchrun: a run in which one rank stops forever during an iteration, as on a faulty machine.

    torchrun ... hanging_rank.py RANK MICROBATCH TIMEOUT [flags of pretrain_gpt_bcd.py]

The last block is active. RANK stops itself (SIGSTOP) before its forward pass number MICROBATCH, counted over the run.
Messages between stages time out after TIMEOUT seconds.
"""

from __future__ import annotations

import datetime
import functools
import os
import signal
import sys
from typing import Any

import torch

from megatron.bcd import trainer
from megatron.bcd.arguments import parse_run_config
from megatron.bcd.blocks.schedule import PhaseState
from megatron.bcd.model.builder import build_model
from megatron.bcd.runtime import distributed
from megatron.bcd.training.pretrain import pretrain
from megatron.bcd.training.state import TrainState


def main() -> None:
    rank, microbatch, seconds = int(sys.argv[1]), int(sys.argv[2]), float(sys.argv[3])
    config = parse_run_config(sys.argv[4:], prog="hanging_rank.py")
    # importing and building the data may take long; only later steps have the short timeout
    torch.distributed.init_process_group("gloo", timeout=datetime.timedelta(minutes=2))
    initialize = distributed.initialize
    distributed.initialize = lambda **values: initialize(**values | {"timeout_minutes": seconds / 60})
    first = PhaseState(phase=config.pipeline_size - 1)
    trainer.TrainState = functools.partial(TrainState, phase_state=first)  # type: ignore[assignment,misc]
    if torch.distributed.get_rank() == rank:
        stop_before(microbatch)
    pretrain(config, build_model, prog="hanging_rank.py")


def stop_before(microbatch: int) -> None:
    original, count = trainer.Trainer.forward_step, 0

    def forward_step(*args: Any) -> Any:
        nonlocal count
        if count == microbatch:
            os.kill(os.getpid(), signal.SIGSTOP)
        count += 1
        return original(*args)

    trainer.Trainer.forward_step = forward_step  # type: ignore[method-assign]


if __name__ == "__main__":
    main()
