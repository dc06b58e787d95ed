"""Select the training samples of each phase, and count how much of the data a run has used."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from megatron.bcd import data
from megatron.bcd.blocks.subsets import PhaseSubset
from megatron.bcd.config import RunConfig


class TrainingSamples:
    """Batches of the training split: consecutive samples, or with --bcd-sample-ratio a subset for each phase."""

    def __init__(self, config: RunConfig, *, dataset: Any, epoch_samples: int) -> None:
        """
        Args:
            dataset: None on a stage that needs no data.
            epoch_samples: number of sequences in an epoch.
        """
        ratio = config.bcd.bcd_sample_ratio
        self.subset = (
            None
            if ratio is None or config.training.skip_train
            else PhaseSubset(num_samples=epoch_samples, ratio=ratio, seed=config.training.seed)
        )
        self.epoch_samples = epoch_samples
        self._config = config
        self.dataset = dataset
        self._batches: Iterator[data.Batch] | None = None
        self.share = data.GroupShare()

    def batches(self, *, phase: int, consumed_samples: int, position: int) -> Iterator[data.Batch]:
        """Return this rank's remaining microbatches of the run, or with subsets of the phase.

        `position` is the number of samples that the phase has trained on.
        """
        if self._batches is None:
            self._batches = self._open(phase, consumed_samples, position)
        return self._batches

    def set_share(self, share: data.GroupShare, *, is_moved: bool = False) -> None:
        """Read this replica group's samples from the next batch on. With `is_moved`, reopen at another position."""
        if is_moved or share != self.share:
            self._batches = None
        self.share = share

    def end_phase(self) -> None:
        """Start the next phase's subset with the next batch."""
        if self.subset is not None:
            self._batches = None

    def num_distinct(self, num_in_phase: int) -> int:
        """Return the number of different samples among the first `num_in_phase` of a phase."""
        return num_in_phase if self.subset is None else min(num_in_phase, self.subset.size)

    def share_seen(self, *, in_phase: int, seen_before: int) -> float:
        """Return the fraction of an epoch that the run has trained on, at most 1.

        It is exact until a phase repeats samples of an earlier one.
        """
        return min(1.0, (seen_before + self.num_distinct(in_phase)) / max(1, self.epoch_samples))

    def _open(self, phase: int, consumed_samples: int, position: int) -> Iterator[data.Batch]:
        if self.dataset is None:
            return data.empty_batches()
        if self.subset is None:
            return data.batches(self.dataset, self._config, consumed_samples=consumed_samples, share=self.share)
        return data.subset_batches(
            self.dataset, self._config, subset=self.subset, phase=phase, position=position, share=self.share
        )
