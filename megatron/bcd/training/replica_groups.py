"""The exchanges of this replica group with the others, and the outer step (DiLoCo, arXiv 2311.08105).

An exchange (docs/replica_groups.md) steps the fp32 values that a phase trains. The ranks with the same weights share
the work: each has the same part of a parameter in all phases, so outer momenta need not move. All groups compute the
same bits, because products and sums are separate operations, which no CPU fuses. torchft's own DiLoCo undoes all steps
since the last exchange if one fails; here the remaining groups repeat the exchange.

The lineage of a group is a number that identifies all its exchanges. Groups of different lineages have different
weights, even at the same step: a connection may break when one group has received the sum and another has not. Then all
groups copy the state of one lineage.
"""

from __future__ import annotations

import datetime
import functools
import hashlib
import json
import logging
import os
import secrets
import socket
import statistics
import time
import warnings
from collections.abc import Iterable, Mapping
from importlib.metadata import version
from typing import Any

import psutil
import torch

from megatron.bcd import __version__, data
from megatron.bcd.blocks.schedule import PhaseState
from megatron.bcd.checkpoint import loader
from megatron.bcd.config import RunConfig, run_config_to_dict
from megatron.bcd.optim.switch_check import fingerprint
from megatron.bcd.runtime import atomic_io, collectives, device, replicas
from megatron.bcd.training.state import TrainingFailed

_CHUNK = 1 << 24
"""Elements that are summed at once. The time-out applies to each chunk."""
_CONNECT_SECONDS = 10
_NODE_FLAGS = ("lighthouse", "replica_id", "data_path", "train_data_path", "valid_data_path", "test_data_path",
               "data_cache_path", "num_workers", "tokenizer_model", "vocab_file", "merge_file")  # fmt: skip
"""Flags that may differ: places on a node's disk. The contents of these places are compared instead."""
_EXCHANGE_FLAGS = ("save_interval", "save_hf_interval", "exit_interval")
"""The only flags compared in the sections `checkpoint` and `report`: they decide when groups exchange."""

Parts = dict[str, torch.Tensor]
"""This rank's parts (`replicas.shard_slice`) of what the phase trains, flat, in host memory, by name."""


class ReplicaGroups:
    """This group's exchanges with the others. Every method is a collective over the ranks of this group."""

    def __init__(self, trainer: Any) -> None:
        """Connect the group of a `Trainer` to the others. Raises ValueError like `check_lighthouse`."""
        config = trainer.config
        self._trainer, self._settings, self._active = trainer, config.groups, trainer.active
        self._identity = run_identity(config, train=trainer.splits.train)
        self._received: Any = None
        self._connect(config)
        self._nonce = collectives.on_rank_0(lambda: secrets.randbits(62))
        self._lineage = 0
        self._is_stray = self._is_in_step = False
        self._anchor: Parts = {}
        """Values after the last exchange, fp32."""
        self._values: Parts | None = None
        """Values whose change since then this group adds to the sum; None if it adds nothing."""
        self.rank, self.size = 0, 1
        """Rank of this group in the last exchange, and number of groups."""

    def _connect(self, config: RunConfig) -> None:
        """Build torchft's manager of this rank, which talks to the same rank of the other groups."""
        # the address that other groups reach: names of rented nodes mean nothing elsewhere
        address = check_lighthouse(config.groups.lighthouse or "")
        from torchft import Manager, ProcessGroupGloo
        from torchft.checkpointing.pg_transport import PGTransport

        logging.getLogger("torchft.manager").setLevel(logging.CRITICAL)  # the trainer reports its errors
        warnings.filterwarnings("ignore", module="torchft.checkpointing.pg_transport")
        timeout = datetime.timedelta(seconds=config.groups.outer_timeout_seconds)
        for interface, addresses in psutil.net_if_addrs().items():
            if address in (each.address for each in addresses):  # the node's name may resolve to its loopback
                os.environ.setdefault("GLOO_SOCKET_IFNAME", interface)
        if torch.distributed.get_rank() == 0:  # torchrun's store may be visible only on its node
            self._store = torch.distributed.TCPStore(address, 0, is_master=True, wait_for_workers=False)
        store_address, store_port = collectives.on_rank_0(lambda: (address, self._store.port))
        processes = ProcessGroupGloo(timeout=timeout)
        self._manager = Manager(
            pg=processes,
            load_state_dict=functools.partial(setattr, self, "_received"),
            state_dict=self._state,
            min_replica_size=1,
            use_async_quorum=False,
            timeout=timeout,
            quorum_timeout=datetime.timedelta(minutes=config.training.distributed_timeout_minutes),
            connect_timeout=datetime.timedelta(seconds=_CONNECT_SECONDS),
            quorum_retries=120,  # evenly spread over the time-out: the lighthouse may be down for a while
            max_retries=10,  # consecutive failures of an exchange; one more ends the run
            rank=torch.distributed.get_rank(),
            world_size=torch.distributed.get_world_size(),
            store_addr=store_address,
            store_port=store_port,
            lighthouse_addr=f"http://{config.groups.lighthouse}",
            hostname=address,
            replica_id=config.groups.replica_id or socket.gethostname(),
            checkpoint_transport=PGTransport(processes, timeout, torch.device("cpu")),
            init_sync=False,
        )

    def join(self) -> bool:
        """Meet the other groups before the first step. Returns like `exchange`.

        Raises:
            ValueError: this group belongs to another run, or cannot reach the others.
        """
        weights = collectives.gather_objects(fingerprint(self._active.model.parameters()))
        self._lineage = _hash([self._identity, self._iteration, weights])
        try:
            return self.exchange(has_trained=False)
        except TrainingFailed as error:
            raise ValueError(f"--lighthouse {self._settings.lighthouse}: {error}") from error

    def begin_phase(self) -> None:
        """Begin to count the changes of a phase, when all groups have the same values."""
        self._anchor = self._present()

    def is_due(self, iteration: int, phase_state: PhaseState) -> bool:
        """Return whether there is an exchange after `iteration`, given the phase before that step."""
        trainer, checkpoint = self._trainer, self._trainer.config.checkpoint
        intervals = (checkpoint.save_interval, checkpoint.save_hf_interval)
        interval = self._settings.outer_interval
        return (
            iteration == trainer.train_iters
            or trainer.block_schedule.may_end_with_next_step(phase_state)
            or any(each and iteration % each == 0 for each in intervals)
            or trainer.stop.is_interval_over(iteration)
            or (interval is not None and (phase_state.step_in_phase + 1) % interval == 0)
        )

    def exchange(self, *, has_trained: bool = True) -> bool:
        """Set all values that the phase trains to the common result of the groups.

        Without `has_trained` this group adds nothing to the sum.

        Returns:
            Whether a step has just been completed: False for a group that has met others before their first step.

        Raises:
            TrainingFailed: there was no quorum in time, or too many attempts failed.
        """
        self._is_in_step = has_trained
        self._values = self._present() if has_trained else None
        while True:
            try:
                # a signal ends it without the exchange: there may never be one
                if self._attempt() or self._trainer.stop.is_signalled():
                    return self._is_in_step
            except ConnectionError as error:
                note = f"iteration {self._iteration}: an exchange failed and is repeated ({error})"
                self._trainer.reporter.note(note)
                self._agree(is_good=False)

    def leave(self) -> None:
        """Leave, so that the other groups do not wait for this group any more. Not a collective."""
        self._manager.shutdown(wait=False)

    @property
    def _iteration(self) -> int:
        return int(self._trainer.state.iteration)

    def _attempt(self) -> bool:
        """Try one exchange. Return whether it counts. Raises ConnectionError on all ranks of this group."""
        self._meet()
        rank, size = self._manager.participating_rank() or 0, self._manager.num_participants()
        table = torch.zeros(size, 4, dtype=torch.int64)
        table[rank] = torch.tensor([self._lineage, self._nonce, self._values is not None, self._iteration])
        self._sum([table])
        lineages, _, trained, iterations = table.T.tolist()
        is_enough = size >= self._settings.min_replica_groups
        newest = [each for each, number in zip(lineages, iterations, strict=True) if number == max(iterations)]
        # all groups take the most frequent lineage
        self._is_stray = is_enough and self._lineage != statistics.mode(newest)
        if not is_enough or len(set(lineages)) > 1:
            time.sleep(1.0)
            return False
        change = self._change(size) if any(trained) else {}
        # each alone, because the order of a sum depends on the position: a tied weight is in two places
        self._sum(chunk for part in change.values() for chunk in part.split(_CHUNK))
        if (rank, size) != (self.rank, self.size):
            groups = f"{size} replica group{'s' * (size > 1)}, this is number {rank}"
            self._trainer.reporter.note(f"iteration {self._iteration}: {groups}")
        self.rank, self.size = rank, size
        # from the next batch on
        share = data.GroupShare(group=rank, num_groups=size, batch_size=self._trainer.global_batch_size)
        self._trainer.samples.set_share(share)
        if not self._agree(is_good=True):
            return False
        self._apply(change, num_trained=sum(trained))
        self._values = None
        self._lineage = _hash([self._lineage, table.tolist()])
        self._trainer.reporter.exchange(
            iteration=self._iteration,
            consumed_samples=self._trainer.state.consumed_samples,
            group=self.rank,
            groups=self.size,
            lineage=self._lineage,
            values=_hash(collectives.gather_objects(fingerprint(self._anchor.values()))),
        )
        return True

    def _meet(self) -> None:
        """Wait for the other groups. Continue from the state of another one that is ahead."""
        # torchft compares these steps: a group with a lower one receives the state of a group with the highest
        step = 0 if self._is_stray else self._iteration + 1
        self._manager.load_state_dict({"step": step, "batches_committed": 0})
        try:
            self._manager.start_quorum()
        except Exception as error:  # its client raises several types
            problem = f"no replica groups met in time ({atomic_io.describe(error)})"
            raise TrainingFailed(f"iteration {self._iteration}: {problem}") from error
        self._sum([])
        state, self._received = self._received, None
        # its ranks receive from several groups, which may be of several lineages: then the next meeting decides
        received = collectives.gather_objects(state and _hash([state["lineage"], state["counters"]]))
        if state is not None and len(set(received)) == 1:
            self._continue_from_peer(state)

    def _change(self, size: int) -> Parts:
        """Return what this group adds to the sum, in the precision of messages if there is another group."""
        dtype = device.DTYPES[self._settings.outer_compression if size > 1 else "fp32"]
        values = self._anchor if self._values is None else self._values
        return {name: (value - self._anchor[name]).to(dtype) for name, value in values.items()}

    def _sum(self, tensors: Iterable[torch.Tensor]) -> None:
        """Sum tensors over the groups in place. Raise ConnectionError on all ranks of this group if one has lost the
        connection, also before."""
        for work in [self._manager.allreduce(each, reduce_op=torch.distributed.ReduceOp.SUM) for each in tensors]:
            work.wait()
        problem = self._manager.errored()
        first = collectives.first_error(None if problem is None else str(problem.original_exception))
        if first is not None:
            raise ConnectionError(" ".join(first.split()))

    @torch.no_grad()
    def _apply(self, total_change: Parts, *, num_trained: int) -> None:
        """Step all values by the mean change."""
        momenta, lr, mu = self._active.outer_momenta, self._settings.outer_lr, self._settings.outer_momentum
        values = self._values if self.size == 1 else None  # a group alone rounds nothing
        self._active.leave_buffers()
        for name, total in total_change.items():
            mean = total.float() / num_trained
            reached = self._anchor[name] + mean if values is None else values[name]
            if (lr, mu) != (1, 0):  # else the new values are the mean of the groups'
                momenta[name] = momenta[name] * mu + mean if name in momenta else mean
                reached = reached + ((momenta[name] * mu + mean) * lr - mean)
            self._anchor[name] = reached
            weight = self._active.parameters.active()[name]
            start = replicas.shard_slice(weight.numel()).start
            value = collectives.join_shards(reached, start, like=weight, group=replicas.group(), rank=None)
            self._active.optimizer_of(name).set_main_param(name, value)

    def _present(self) -> Parts:
        """Return copies of the present values, fp32. A collective over ranks with the same weights."""
        active = self._active
        active.leave_buffers()
        return {
            name: active.optimizer_of(name).main_param(name)[replicas.shard_slice(weight.numel())].to("cpu", copy=True)
            for name, weight in active.parameters.active().items()
        }

    def _agree(self, *, is_good: bool) -> bool:
        """Return whether the exchange counts for this group: only if all of its ranks say so."""
        if not is_good:
            self._manager.report_error(RuntimeError("this exchange does not count"))
        try:
            return bool(self._manager.should_commit())
        except Exception as error:  # a rank of this group does not answer, or no group has fetched a state
            problem = f"an exchange could not be completed ({atomic_io.describe(error)})"
            raise TrainingFailed(f"iteration {self._iteration}: {problem}") from error

    def _state(self) -> dict[str, Any]:
        """Return the state of this rank for the same rank of another group, so that its next step is the step of the
        others. torchft's thread calls it while this thread waits."""
        active = self._active
        active.leave_buffers()
        return {
            "weights": {name: each.detach().to("cpu", copy=True) for name, each in active.parameters.all().items()},
            "anchor": {name: value.clone() for name, value in self._anchor.items()},
            "optimizer": active.rank_state(),
            "identity": self._identity,
            "counters": {
                "counters": self._trainer.state.counters(),
                "phase": self._trainer.state.phase_state.to_dict(),
                "scheduler_steps": self._trainer.lr_scheduler.num_steps,
            },
            "lineage": self._lineage,
            "is_in_step": self._is_in_step,
        }

    def _continue_from_peer(self, state: Mapping[str, Any]) -> None:
        """Continue from the state of another group. Raises ValueError if it belongs to another run."""
        mine, theirs = self._identity, state["identity"]
        for name in [*mine, *theirs]:
            if mine.get(name) != theirs.get(name):
                self.leave()
                raise ValueError(
                    f"--lighthouse: this replica group is of another run: {name} is {mine.get(name)} here and "
                    f"{theirs.get(name)} in the groups that train. Give the same."
                )

        def load() -> None:
            for name, parameter in self._active.parameters.all().items():
                parameter.data.copy_(state["weights"][name])
            self._active.load_rank_state(state["optimizer"])

        self._trainer.continue_from(state["counters"], load)
        self._anchor, self._lineage, self._is_in_step = state["anchor"], state["lineage"], state["is_in_step"]
        self._is_stray, self._values = False, None
        self._trainer.reporter.note(
            f"continuing from the state of another replica group, after iteration {self._iteration}"
        )


def check_lighthouse(address: str) -> str:
    """Return this node's IPv4 address in the network of HOST:PORT.

    Raises:
        ValueError: torchft is missing, or no lighthouse listens there.
    """
    os.environ.setdefault("RUST_LOG", "error")  # torchft reads it at the import, and would log every heartbeat
    host, _, port = address.rpartition(":")
    try:
        import torchft  # noqa: F401

        with socket.create_connection((host, int(port)), _CONNECT_SECONDS, source_address=("0.0.0.0", 0)) as connection:
            return str(connection.getsockname()[0])
    except (ImportError, OSError, OverflowError, ValueError) as error:
        raise ValueError(
            f'--lighthouse {address}: {error}. Install torchft (pip install -e ".[elastic]"), start torchft_lighthouse '
            "--min_replicas 1, and give its HOST:PORT."
        ) from None


def run_identity(config: RunConfig, *, train: Any) -> dict[str, str]:
    """Return what groups must have in common to train one model, by flag or part. A collective.

    `train` is this rank's training split, or None.
    """
    identity = {}
    for section, values in run_config_to_dict(config).items():
        for name, value in values.items():
            if name in _EXCHANGE_FLAGS if section in ("checkpoint", "report") else name not in _NODE_FLAGS:
                identity["--" + name.replace("_", "-")] = str(value)
    first = "" if train is None else f"{len(train)} {train[0]['tokens'].tolist()}"
    return identity | {
        "the layout": str(loader.current_layout()),
        "the training data": " ".join(sorted(set(collectives.gather_objects(str(_hash(first)))))),
        "the version": f"{__version__}, torch {version('torch')}, Megatron Core {version('megatron-core')}",
    }


def _hash(values: Any) -> int:
    """Return a hash of 62 bits."""
    return int.from_bytes(hashlib.sha256(json.dumps(values).encode()).digest()[:8]) >> 2
