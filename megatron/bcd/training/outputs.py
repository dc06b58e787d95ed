"""Stop the run, and write checkpoints and Hugging Face models when they are due."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from megatron.bcd.checkpoint.run_state import RunState
from megatron.bcd.checkpoint.saver import Saver
from megatron.bcd.config import CheckpointConfig
from megatron.bcd.huggingface.run_models import Exporter
from megatron.bcd.metrics.reporter import Reporter
from megatron.bcd.optim.active_block import ActiveBlock
from megatron.bcd.pipeline.schedule import PipelineSchedule
from megatron.bcd.training.replica_groups import ReplicaGroups
from megatron.bcd.training.state import TrainingFailed
from megatron.bcd.training.stop import StopRequests


@dataclass(frozen=True, kw_only=True)
class RunOutputs:
    """Writes the checkpoints and models of a run. Methods are collectives, except `is_due` and `where_to_resume`."""

    config: CheckpointConfig
    active: ActiveBlock
    saver: Saver | None
    """None without --save."""
    exporter: Exporter | None
    """None without --save-hf."""
    stop: StopRequests
    pipeline: PipelineSchedule
    groups: ReplicaGroups | None
    reporter: Reporter
    collect_run_state: Callable[[], RunState]

    @property
    def is_writing(self) -> bool:
        """Whether this rank is writing a checkpoint in the background."""
        return self.saver is not None and self.saver.is_writing

    @property
    def is_writer(self) -> bool:
        """Whether this replica group writes. Only the first one does."""
        return self.groups is None or self.groups.rank == 0

    def is_due(self, iteration: int, *, is_last: bool) -> bool:
        """Return whether a checkpoint or a model is written after `iteration`."""
        return self._is_save_due(iteration, is_last=is_last) or self._is_export_due(iteration, is_last=is_last)

    def after_step(self, iteration: int, *, is_last: bool, requests: Sequence[int] | None = None) -> bool:
        """Agree with the other ranks on stopping, save if due, and complete background writes.

        Args:
            is_last: training is over after `iteration`.
            requests: what the step has exchanged, if nothing that takes long followed it.

        Returns:
            Whether the run stops here before its end.

        Raises:
            TrainingFailed: the run ends here and could not be saved.
        """
        saver, stop = self.saver, self.stop
        if requests is None:
            is_any_rank_writing = stop.agree(iteration, is_writing=self.is_writing)
        else:
            is_any_rank_writing = stop.decide(iteration, requests)
        if saver is not None and not is_any_rank_writing:
            saver.finish()
        if self.pipeline.is_ahead:  # forward-only stages have started the next iteration, which must be completed
            return False
        is_stopped = stop.reason is not None and not is_last
        is_end = is_last or is_stopped
        is_saved = True
        if saver is not None and self.is_writer and (is_end or self._is_save_due(iteration, is_last=is_last)):
            is_saved = self.save()
            if not is_end:  # a signal during the write stops the run: a second save would write the same again
                stop.agree(iteration, is_writing=False)
                is_stopped = is_end = stop.reason is not None
        if is_end and saver is not None:
            is_saved = saver.finish() and is_saved
        if self._is_export_due(iteration, is_last=is_last):
            self.export(iteration, is_last=is_last)
        if is_stopped:
            self.reporter.note(f"stopping after iteration {iteration}: {stop.reason}")
        if is_end and not is_saved:
            raise TrainingFailed(f"iteration {iteration} could not be saved; {self.where_to_resume()}")
        return is_stopped

    def save(self) -> bool:
        """Write a checkpoint. Return False if that failed."""
        assert self.saver is not None
        with self.active.whole_parameters():
            return self.saver.save(self.collect_run_state(), self.active)

    def export(self, iteration: int, *, is_last: bool) -> None:
        """Write the model to --save-hf, if this group writes. Raises TrainingFailed if the last one can't be
        written."""
        if self.exporter is None or not self.is_writer:
            return
        with self.active.whole_parameters():
            if _is_multiple(iteration, self.config.save_hf_interval):
                self.exporter.export(self.active.model, iteration=iteration)
            if is_last and not self.exporter.export(self.active.model):
                raise TrainingFailed(
                    f"the model of iteration {iteration} could not be written to --save-hf {self.exporter.root}; "
                    f"{self.where_to_resume()}"
                )

    def where_to_resume(self) -> str:
        """Name the newest checkpoint, for error messages."""
        newest = self.saver.newest() if self.saver is not None else None
        return "there is no checkpoint to resume from" if newest is None else f"the last good checkpoint is {newest}"

    def _is_save_due(self, iteration: int, *, is_last: bool) -> bool:
        return self.saver is not None and (is_last or _is_multiple(iteration, self.config.save_interval))

    def _is_export_due(self, iteration: int, *, is_last: bool) -> bool:
        is_asked = is_last or _is_multiple(iteration, self.config.save_hf_interval)
        return self.exporter is not None and self.is_writer and is_asked


def _is_multiple(iteration: int, interval: int | None) -> bool:
    return bool(interval) and iteration % (interval or 1) == 0
