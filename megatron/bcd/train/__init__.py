"""The run: set up, train block after block, evaluate, save, tell."""

from megatron.bcd.train.launch import pretrain
from megatron.bcd.train.steps import StepResult, TrainingFailed
from megatron.bcd.train.trainer import Trainer

__all__ = ["StepResult", "Trainer", "TrainingFailed", "pretrain"]
