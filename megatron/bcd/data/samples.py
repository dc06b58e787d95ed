"""Which samples the loop trains on, phase by phase, and how much of the data it has seen."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from megatron.core import parallel_state

from megatron.bcd import data
from megatron.bcd.blocks.subsets import PhaseSubset
from megatron.bcd.config import RunConfig


class TrainingSamples:
    """Batches of the training split: consecutive ones, or with --bcd-sample-ratio those of each phase's own subset."""

    def __init__(self, config: RunConfig, *, dataset: Any, epoch_samples: int) -> None:
        """`dataset` is None on a stage that needs no data; `epoch_samples`: sequences of one epoch."""
        ratio = config.bcd.bcd_sample_ratio
        self.subset = (
            None
            if ratio is None or config.training.skip_train
            else PhaseSubset(num_samples=epoch_samples, ratio=ratio, seed=config.training.seed)
        )
        self.epoch_samples = epoch_samples
        self.in_phase = 0
        """Samples that the present phase has trained on, repetitions included."""
        self.seen_before = 0
        """Different samples that earlier phases trained on, those of different phases added up."""
        self._config = config
        self._dataset = dataset
        self._batches: Iterator[data.Batch] | None = None

    def restore_after_build(self, *, in_phase: int, seen_before: int) -> None:
        """Go on where a checkpoint was taken; before the first batch."""
        self.in_phase, self.seen_before = in_phase, seen_before

    def batches(self, *, phase: int, consumed_samples: int) -> Iterator[data.Batch]:
        """This rank's micro-batches from here on; with subsets to the end of the phase, else of the run."""
        if self._batches is None:
            self._batches = self._opened(self._config, phase=phase, consumed_samples=consumed_samples)
        return self._batches

    def look_ahead(self, *, phase: int, consumed_samples: int) -> Iterator[data.Batch]:
        """The micro-batches that `batches` will give, without taking them from it; at the end of the data the last."""
        config = self._config.replace_section("data", num_workers=0)
        if self._dataset is not None and self.subset is None:
            one = config.training.micro_batch_size * parallel_state.get_data_parallel_world_size()
            consumed_samples = min(consumed_samples, max(0, len(self._dataset) - one))
        return self._opened(config, phase=phase, consumed_samples=consumed_samples)

    def _opened(self, config: RunConfig, *, phase: int, consumed_samples: int) -> Iterator[data.Batch]:
        if self._dataset is None:
            return data.no_batches()
        if self.subset is None:
            return data.batches(self._dataset, config, consumed_samples=consumed_samples)
        return data.subset_batches(self._dataset, config, subset=self.subset, phase=phase, position=self.in_phase)

    def after_step(self, num_samples: int) -> None:
        self.in_phase += num_samples

    def end_phase(self) -> None:
        """The next batch is the next phase's first."""
        self.seen_before += self._seen_in_phase()
        self.in_phase = 0
        if self.subset is not None:
            self._batches = None

    def share_seen(self) -> float:
        """Share of the epoch that the run has trained on: exact until phases draw what earlier ones had, 1 at most."""
        return min(1.0, (self.seen_before + self._seen_in_phase()) / max(1, self.epoch_samples))

    def _seen_in_phase(self) -> int:
        return self.in_phase if self.subset is None else min(self.in_phase, self.subset.size)
