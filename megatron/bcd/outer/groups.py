"""One replica group's exchanges with the others: who takes part, what is sent, and what counts.

An exchange that fails is tried again, by those that are left, with the same changes: no step is lost. All exchanges
that a group took part in are in one number, its lineage. Groups of different lineages have different weights, even at
the same step (a connection may break when one group has the mean already and another has not): all but one lineage take
the state of that one.

With --outer-delay the mean is made in a thread while the next steps compute. If that fails, its change is part of that
of the next exchange, which then follows at once and is waited for.
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

_MOST_FAILURES = 10
"""Of one exchange, in a row."""
_PAUSE_SECONDS = 1.0


class ExchangeFailed(RuntimeError):
    """There is no way to the other groups."""


@dataclass(frozen=True, kw_only=True)
class RunParts:
    """What a group sends and takes beside tensors."""

    counters: Callable[[], dict[str, Any]]
    iteration: Callable[[], int]
    should_stop: Callable[[], bool]
    """Whether a signal asks any rank to stop. A collective."""
    take: Callable[[Mapping[str, Any], Callable[[Callable[[], None]], None]], None]
    """Of counters and a function that loads a rank's tensors, given what builds the block: continue where they say."""


class ReplicaGroups:
    """Every method is a collective over the ranks of this group."""

    def __init__(self, config: RunConfig, *, active: ActiveBlock, train: Any, parts: RunParts, reporter: Reporter):
        """Raises ValueError as `Membership`."""
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
        self._under_way: Callable[[], bool] | None = None
        self._told_bytes, self._waited_seconds = 0, 0.0
        self.due: int | None = None
        """The iteration after which the result of an exchange is applied that is under way, or has failed so far."""
        self.rank, self.size = 0, 1
        """Of this group among those of the last exchange, and their number."""

    def join(self) -> bool:
        """Meet the other groups before the first step; as `exchange`. Raises ValueError if this group is of another
        run."""
        weights = collectives.gather_objects(fingerprint(self._active.model.parameters()))
        self._lineage = _number([self._identity, self._parts.iteration(), weights])
        return self._exchange(has_trained=False)

    def begin_phase(self) -> None:
        """Changes count from here on."""
        self._outer.begin()

    def exchange(self, *, waits: bool) -> bool:
        """Set all that the phase trains to what the groups together have reached. Unless it `waits`, the result is
        applied --outer-delay steps later: by this too, which is called again then or where it must wait.

        Returns:
            Whether a step has just been done: False for a group that has met others before their first step.

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
        """Wait for the exchange that is under way; whether it counts. Raises ExchangeFailed."""
        under_way, self._under_way, self.due = self._under_way, None, None
        try:
            return under_way is not None and under_way()
        except ConnectionError as error:
            self._note_failure(error)
            return False

    def take_sent_bytes(self) -> int:
        """Sent by this rank to other groups, since the last call; without the state of a group that joins."""
        sent = self._membership.sent_bytes - self._told_bytes  # which a thread may be adding to
        self._told_bytes += sent
        return sent

    def take_waited_ms(self) -> int:
        """For exchanges, since the last call."""
        waited, self._waited_seconds = self._waited_seconds, 0.0
        return round(1e3 * waited)

    def host_bytes(self) -> int:
        """Of the outer step, on this rank."""
        return self._outer.num_bytes()

    def leave(self) -> None:
        self._membership.leave()

    def _exchange(self, *, has_trained: bool) -> bool:
        self._is_in_step = has_trained
        self._change = self._outer.change() if has_trained else None
        failures = 0
        while failures < _MOST_FAILURES:
            try:
                if self._attempt():
                    return self._is_in_step
                failures = 0
                if self._parts.should_stop():  # without the exchange: there may never be one
                    return self._is_in_step
            except ConnectionError as error:
                failures += 1
                self._note_failure(error)
                if self.due is not None:  # repeated then, by all that were in it
                    return self._is_in_step
            except TimeoutError as error:
                raise ExchangeFailed(f"no replica groups met in time ({error})") from error
        raise ExchangeFailed(f"{failures} exchanges with the other replica groups failed one after another")

    def _attempt(self) -> bool:
        """One exchange; whether it counts."""
        meeting = self._membership
        received = meeting.meet(0 if self._is_stray else self._parts.iteration() + 1)
        if received is not None:
            self._take(received)
        if meeting.size < self._least:
            self._agree(is_good=False)
            time.sleep(_PAUSE_SECONDS)
            return False
        has_trained = self._change is not None
        # with what they have counted: groups may have seen different numbers of groups since a delayed exchange failed
        state = _number([self._lineage, self._place()["consumed_samples"]])
        groups = meeting.gather(state, self._nonce, int(has_trained))
        states, _, trained = zip(*groups, strict=True)
        if len(set(states)) > 1:
            self._is_stray = state != Counter(states).most_common(1)[0][0]
            self._agree(is_good=False)
            return False
        num_trained, before = sum(trained), self._place()
        mean = errors = None
        if num_trained:
            mean = self._change if self._change is not None else torch.zeros_like(self._outer.anchor)
            if meeting.size > 1:
                wait = meeting.begin_mean(*self._outer.add_errors(mean), num_trained=num_trained)
                if self.due is not None:
                    self._under_way = lambda: self._conclude(*wait(), groups, before, keeps_steps=True)
                    self._change = None
                    self._tell_of_membership()
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
        if not self._agree(is_good=True):
            return False
        if mean is not None:
            self._outer.apply(mean, errors, is_alone=len(groups) == 1, keeps_steps=keeps_steps)
        self._change, self._is_stray, self.due = None, False, None
        self._lineage = _number([self._lineage, *groups])
        self._tell_of_exchange(place)
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

    def _tell_of_membership(self) -> None:
        now = self._membership.rank, self._membership.size
        if now != (self.rank, self.size):
            self._reporter.note(
                f"iteration {self._parts.iteration()}: {now[1]} replica group{'s' * (now[1] > 1)}, this is number "
                f"{now[0]}"
            )
        self.rank, self.size = now

    def _tell_of_exchange(self, place: dict[str, int]) -> None:
        self._tell_of_membership()
        values = collectives.gather_objects(fingerprint([self._outer.anchor]))
        self._reporter.exchange(
            ExchangeMetrics(
                **place,
                group=self.rank,
                groups=self.size,
                lineage=self._lineage,
                values=_number(values),
            )
        )

    def _state(self) -> dict[str, Any]:
        """What another group needs of this rank; called in torchft's thread while this one waits."""
        return {
            "identity": self._identity,
            "counters": self._parts.counters(),
            "lineage": self._lineage,
            "is_in_step": self._is_in_step,
            "anchor": self._outer.anchor.clone(),
            "tensors": joining.rank_state(self._active),
        }

    def _take(self, received: Mapping[str, Any]) -> None:
        """Continue where another group is. Raises ValueError if that is of another run."""
        problem = joining.difference(self._identity, received["identity"])
        if problem is not None:
            self.leave()
            raise ValueError(f"--lighthouse: this replica group is of another run: {problem}; give the same")
        self._parts.take(
            received["counters"], lambda build: joining.load_rank_state(self._active, received["tensors"], build)
        )
        self._outer.anchor = received["anchor"]
        self._outer.errors.clear()
        self._lineage, self._is_in_step = received["lineage"], received["is_in_step"]
        self._is_stray, self._change, self.due = False, None, None
        self._reporter.note(f"the state of another replica group was taken, after iteration {self._parts.iteration()}")


def _number(values: Any) -> int:
    """62 bits."""
    return int.from_bytes(hashlib.sha256(json.dumps(values).encode()).digest()[:8]) >> 2
