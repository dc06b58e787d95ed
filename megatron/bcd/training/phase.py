"""A phase: everything that exists only while one block is active."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from megatron.bcd import data
from megatron.bcd.blocks.phase_state import PhaseState
from megatron.bcd.config import RunConfig
from megatron.bcd.data.samples import TrainingSamples
from megatron.bcd.metrics.reporter import Reporter
from megatron.bcd.prefix_cache.controller import PrefixCache
from megatron.bcd.runtime import memory
from megatron.bcd.training.recompute import Recomputation
from megatron.bcd.training.select_block import gradient_scores
from megatron.bcd.training.state import TrainState
from megatron.bcd.training.train_step import StepResult, TrainStep


class Phase:
    """Starts and ends phases (arXiv 2506.12037, Algorithm 1, lines 3 to 9).

    The only caller of what changes with the active block: gradient buffers and optimizer, pipeline schedule, sample
    subset, prefix cache, the learning rate of the new optimizer, and the check that the switch took effect. All methods
    are collectives.
    """

    def __init__(
        self,
        config: RunConfig,
        *,
        train_step: TrainStep,
        samples: TrainingSamples,
        prefix_cache: PrefixCache,
        recomputation: Recomputation,
        train_iters: int,
        reporter: Reporter,
    ) -> None:
        self._forward_backward = train_step.forward_backward
        self._active = train_step.forward_backward.active
        self._block_schedule = train_step.block_schedule
        self._lr_scheduler = train_step.lr_scheduler
        self._timers = train_step.timers
        self._samples = samples
        self._prefix_cache = prefix_cache
        self.recomputation = recomputation
        self._train_iters = train_iters
        self._global_batch_size = data.global_batch_size(config)
        self._greedy_microbatches = config.bcd.bcd_greedy_microbatches
        self._reporter = reporter
        self._is_unchecked = False

    def enter(self, state: TrainState, *, on_built: Callable[[], None] | None = None) -> None:
        """Make the block of the present phase active. With greedy order the block is selected first.

        `on_built` is called when the optimizer exists, before anything depends on its state: a resumed run restores it
        there.
        """
        if self._block_schedule.needs_scores(state.phase_state):
            state.phase_state = self._block_schedule.choose_block(state.phase_state, self._scores(state))
        block = self._block_schedule.block(state.phase_state)
        self._active.build(block)
        self.recomputation.begin_phase(block)
        self._lr_scheduler.optimizer = self._active.scheduled()
        self._lr_scheduler.step(0)  # sets the present learning rate in the new optimizer's groups
        self._is_unchecked = True
        if on_built is not None:
            on_built()
        self._begin(state)

    def exit(self, *, is_end_of_run: bool = False) -> None:
        """Free gradients, optimizer and reader threads. The weights stay, and unless the run ends what is kept of the
        block's state."""
        self._prefix_cache.close()
        self._lr_scheduler.optimizer = None  # a reference here would keep the old optimizer alive
        self._active.dispose(is_end_of_run=is_end_of_run)
        memory.reset_peak_memory()  # a phase's peak includes the allocation of its own state

    def advance(self, state: TrainState, before: PhaseState) -> None:
        """From the phase `before` to the present one of `state`."""
        if not self._block_schedule.is_switch(before, state.phase_state):
            self._begin(state)  # the same block continues with its optimizer
            return
        timer = self._timers("switch", log_level=0)
        timer.start()
        self.exit()
        self.enter(state)
        timer.stop()
        self._reporter.phase(
            iteration=state.iteration,
            cycle=self._block_schedule.cycle(state.phase_state),
            phase=state.phase_state.phase,
            block=self._block_schedule.block(state.phase_state),
            switch_time_ms=timer.elapsed() * 1e3,
        )

    def batches(self, state: TrainState) -> Iterator[data.Batch]:
        """This rank's microbatches from here on; obtained before each step."""
        batches = self._samples.batches(
            phase=state.phase_state.phase,
            consumed_samples=state.consumed_samples,
            position=state.samples_in_phase,
        )
        return self._prefix_cache.serve(batches, position=state.samples_in_phase)

    def check_switch(self, state: TrainState, result: StepResult) -> None:
        """Once per phase, after the first step with a learning rate and a gradient: did the active block move, and
        nothing else?

        Raises:
            RuntimeError: it did not, or frozen weights changed.
        """
        if not self._is_unchecked or result.skipped or not result.learning_rate or not result.grad_norm:
            return
        self._is_unchecked = False
        with self._active.whole_parameters():
            problem = self._active.check_switch()
        if problem:
            raise RuntimeError(f"iteration {state.iteration}, phase {state.phase_state.phase}: {problem}")

    def _begin(self, state: TrainState) -> None:
        """What each phase starts with, also where the same block continues."""
        block, schedule = self._block_schedule.block(state.phase_state), self._block_schedule
        first_iteration = state.iteration - state.phase_state.step_in_phase
        num_steps = min(schedule.least_steps(state.phase_state.phase), self._train_iters - first_iteration)
        is_served = False
        if self._prefix_cache.root is not None:
            with self._active.whole_parameters():
                is_served = self._prefix_cache.begin_phase(
                    state.phase_state.phase, block, num_samples=num_steps * self._global_batch_size
                )
        self._forward_backward.pipeline.begin_phase(block, is_prefix_served=is_served)

    def _scores(self, state: TrainState) -> dict[int, float]:
        coming = self._samples.look_ahead(
            phase=state.phase_state.phase,
            consumed_samples=state.consumed_samples,
            position=state.samples_in_phase,
        )
        return dict(
            gradient_scores(
                self._forward_backward,
                self._block_schedule.candidates(state.phase_state),
                coming,
                num_microbatches=self._greedy_microbatches,
                on_built=self.recomputation.begin_phase,
            )
        )
