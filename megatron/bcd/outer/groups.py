"""The exchanges of this replica group with the others.

The remaining groups repeat an exchange that fails, with the same changes, so no step is lost. The lineage of a group is
a number that identifies all its exchanges. Groups of different lineages have different weights, even at the same step:
a connection may break when one group has received the mean and another has not. Then all groups copy the state of one
lineage.

With --outer-delay a thread computes the mean during the next steps. If that fails, the next exchange includes the
change. It follows at once, and the groups wait for it.
"""

from __future__ import annotations

import hashlib
import json
import secrets
import time
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from megatron.bcd.config import RunConfig
from megatron.bcd.metrics.reporter import Reporter
from megatron.bcd.metrics.schema import ExchangeMetrics
from megatron.bcd.optim.active_block import ActiveBlock
from megatron.bcd.optim.switch_check import fingerprint
from megatron.bcd.outer import joining
from megatron.bcd.outer.membership import Membership
from megatron.bcd.outer.outer_step import OuterRule, OuterStep
from megatron.bcd.runtime import collectives

_MAX_FAILURES = 10
"""Consecutive failures of one exchange that end the run."""
_PAUSE_SECONDS = 1.0


class ExchangeFailed(RuntimeError):
    """The other groups cannot be reached."""


@dataclass(frozen=True, kw_only=True)
class RunParts:
    """The parts of a run that an exchange needs beside tensors."""

    counters: Callable[[], dict[str, Any]]
    iteration: Callable[[], int]
    should_stop: Callable[[], bool]
    """Whether a signal asks any rank to stop. A collective."""
    continue_from_peer: Callable[[Mapping[str, Any], Callable[[Callable[[], None]], None]], None]
    """Continue from a peer: adopt its counters, then call the second argument with a function that builds the block, to
    load the tensors."""


class ReplicaGroups:
    """This group's exchanges with the others. Every method is a collective over the ranks of this group."""

    def __init__(self, config: RunConfig, *, active: ActiveBlock, train: Any, parts: RunParts, reporter: Reporter):
        """Connect to the other groups. Raises ValueError like `Membership`."""
        settings = config.groups
        self._active, self._parts, self._reporter = active, parts, reporter
        self._least, self._delay = settings.min_replica_groups, settings.outer_delay
        self._identity = joining.run_identity(config, train=train)
        self._membership = Membership(
            settings, quorum_minutes=config.training.distributed_timeout_minutes, state=self._state
        )
        rule = OuterRule(lr=settings.outer_lr, momentum=settings.outer_momentum)
        self._outer = OuterStep(rule, active)
        self._nonce = collectives.on_rank_0(lambda: secrets.randbits(62))
        self._lineage = 0
        self._is_stray = False
        self._is_in_step = False
        self._change: torch.Tensor | None = None
        self._conclude_pending: Callable[[], bool] | None = None
        self._reported_bytes, self._waited_seconds = 0, 0.0
        self.due: int | None = None
        """The iteration after which the result of a delayed exchange is applied, or the exchange is repeated."""
        self.rank, self.size = 0, 1
        """Rank of this group in the last exchange, and number of groups."""

    def join(self) -> bool:
        """Meet the other groups before the first step. Returns and raises like `exchange`.

        Raises:
            ValueError: this group belongs to another run.
        """
        weights = collectives.gather_objects(fingerprint(self._active.model.parameters()))
        self._lineage = _hash([self._identity, self._parts.iteration(), weights])
        return self._exchange(has_trained=False)

    def begin_phase(self) -> None:
        """Begin to count the changes of a phase."""
        self._outer.begin()

    def exchange(self, *, waits: bool) -> bool:
        """Set all values that the phase trains to the common result of the groups.

        With --outer-delay this only starts an exchange, unless it `waits`. A later call applies the result:
        --outer-delay steps later, or earlier if that call waits.

        Returns:
            Whether a step has just been completed: False for a group that has met others before their first step.

        Raises:
            ExchangeFailed: there was no quorum in time, or too many attempts failed.
        """
        started = time.monotonic()
        is_in_step, is_pending = True, self.due is not None
        if not (is_pending and self.finish()) or waits:
            is_delayed = self._delay > 0 and not waits and not is_pending
            self.due = self._parts.iteration() + self._delay if is_delayed else None
            is_in_step = self._exchange(has_trained=True)
        self._waited_seconds += time.monotonic() - started
        return is_in_step

    def finish(self) -> bool:
        """Wait for the delayed exchange. Return whether it counts. Raises ExchangeFailed."""
        conclude, self._conclude_pending, self.due = self._conclude_pending, None, None
        try:
            return conclude is not None and conclude()
        except ConnectionError as error:
            self._note_failure(error)
            return False

    def take_sent_bytes(self) -> int:
        """Return the bytes that this rank has sent since the last call, without the state of groups that join."""
        sent = self._membership.sent_bytes - self._reported_bytes  # a thread may add to it meanwhile
        self._reported_bytes += sent
        return sent

    def take_waited_ms(self) -> int:
        """Return the time spent in exchanges since the last call."""
        waited, self._waited_seconds = self._waited_seconds, 0.0
        return round(1e3 * waited)

    def host_bytes(self) -> int:
        """Return the bytes of the outer step in this rank's host memory."""
        return self._outer.num_bytes()

    def leave(self) -> None:
        self._membership.leave()

    def _exchange(self, *, has_trained: bool) -> bool:
        self._is_in_step = has_trained
        self._change = self._outer.change() if has_trained else None
        failures = 0
        while failures < _MAX_FAILURES:
            try:
                if self._attempt():
                    return self._is_in_step
                failures = 0
                if self._parts.should_stop():  # without the exchange: there may never be one
                    return self._is_in_step
            except ConnectionError as error:
                failures += 1
                self._note_failure(error)
                if self.due is not None:  # all of its groups repeat it then
                    return self._is_in_step
            except TimeoutError as error:
                raise ExchangeFailed(f"no replica groups met in time ({error})") from error
        raise ExchangeFailed(f"{failures} exchanges with the other replica groups failed one after another")

    def _attempt(self) -> bool:
        """Try one exchange. Return whether it counts."""
        membership = self._membership
        received = membership.meet(0 if self._is_stray else self._parts.iteration() + 1)
        if received is not None:
            self._continue_from_peer(received)
        if membership.size < self._least:
            self._agree(is_good=False)
            time.sleep(_PAUSE_SECONDS)
            return False
        has_trained = self._change is not None
        # with the samples: groups may have counted different numbers of groups since a delayed exchange failed
        state = _hash([self._lineage, self._place()["consumed_samples"]])
        groups = membership.gather(state, self._nonce, int(has_trained))
        states, _, trained = zip(*groups, strict=True)
        if len(set(states)) > 1:
            self._is_stray = state != Counter(states).most_common(1)[0][0]
            self._agree(is_good=False)
            return False
        num_trained, before = sum(trained), self._place()
        mean = errors = None
        if num_trained:
            mean = self._change if self._change is not None else torch.zeros_like(self._outer.anchor)
            if membership.size > 1:
                wait = membership.begin_mean(*self._outer.add_errors(mean), num_trained=num_trained)
                if self.due is not None:
                    self._conclude_pending = lambda: self._conclude(*wait(), groups, before, keeps_steps=True)
                    self._change = None
                    self._report_membership()
                    return True
                mean, errors = wait()
        return self._conclude(mean, errors, groups, before, keeps_steps=False)

    def _conclude(
        self,
        mean: torch.Tensor | None,
        errors: torch.Tensor | None,
        groups: list[tuple[int, ...]],
        place: dict[str, int],
        *,
        keeps_steps: bool,
    ) -> bool:
        """Apply the result of an exchange if all ranks of this group agree. Return whether it counts."""
        if not self._agree(is_good=True):
            return False
        if mean is not None:
            self._outer.apply(mean, errors, is_alone=len(groups) == 1, keeps_steps=keeps_steps)
        self._change, self._is_stray, self.due = None, False, None
        self._lineage = _hash([self._lineage, *groups])
        self._report_exchange(place)
        return True

    def _agree(self, *, is_good: bool) -> bool:
        try:
            return self._membership.agree(is_good=is_good)
        except TimeoutError as error:
            raise ExchangeFailed(f"the ranks of this group did not agree in time ({error})") from error

    def _note_failure(self, error: Exception) -> None:
        self._reporter.note(f"iteration {self._parts.iteration()}: an exchange failed and is repeated ({error})")
        self._agree(is_good=False)

    def _place(self) -> dict[str, int]:
        samples = self._parts.counters()["counters"]["consumed_samples"]
        return {"iteration": self._parts.iteration(), "consumed_samples": samples}

    def _report_membership(self) -> None:
        now = self._membership.rank, self._membership.size
        if now != (self.rank, self.size):
            self._reporter.note(
                f"iteration {self._parts.iteration()}: {now[1]} replica group{'s' * (now[1] > 1)}, this is number "
                f"{now[0]}"
            )
        self.rank, self.size = now

    def _report_exchange(self, place: dict[str, int]) -> None:
        self._report_membership()
        values = collectives.gather_objects(fingerprint([self._outer.anchor]))
        self._reporter.exchange(
            ExchangeMetrics(
                **place,
                group=self.rank,
                groups=self.size,
                lineage=self._lineage,
                values=_hash(values),
            )
        )

    def _state(self) -> dict[str, Any]:
        """Return the state of this rank for another group. torchft's thread calls it while this thread waits."""
        return {
            "identity": self._identity,
            "counters": self._parts.counters(),
            "lineage": self._lineage,
            "is_in_step": self._is_in_step,
            "anchor": self._outer.anchor.clone(),
            "tensors": joining.rank_state(self._active),
        }

    def _continue_from_peer(self, received: Mapping[str, Any]) -> None:
        """Continue from the state of another group. Raises ValueError if it belongs to another run."""
        problem = joining.difference(self._identity, received["identity"])
        if problem is not None:
            self.leave()
            raise ValueError(f"--lighthouse: this replica group is of another run: {problem}; give the same")
        self._parts.continue_from_peer(
            received["counters"], lambda build: joining.load_rank_state(self._active, received["tensors"], build)
        )
        self._outer.anchor = received["anchor"]
        self._outer.errors.clear()
        self._lineage, self._is_in_step = received["lineage"], received["is_in_step"]
        self._is_stray, self._change, self.due = False, None, None
        self._reporter.note(
            f"continuing from the state of another replica group, after iteration {self._parts.iteration()}"
        )


def _hash(values: Any) -> int:
    """Return a hash of 62 bits."""
    return int.from_bytes(hashlib.sha256(json.dumps(values).encode()).digest()[:8]) >> 2
