"""The membership of replica groups, from torchft's manager, and the transport of values between groups.

Each rank talks to the same rank of the other groups, over gloo. torchft 0.2 decides which groups are members
(`Manager.start_quorum`), sends the state of another group to a group that is behind (HTTPTransport), and lets the ranks
of a group vote on whether an exchange counts (`should_commit`).
"""

from __future__ import annotations

import datetime
import importlib
import logging
import os
import socket
import warnings
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import psutil
import torch
from torch.distributed.distributed_c10d import AllgatherOptions, AllToAllOptions

from megatron.bcd.config import GroupsConfig
from megatron.bcd.outer.compression import COMPRESSIONS
from megatron.bcd.runtime import collectives

_PIECE = 1 << 24
"""Elements that are exchanged at once. The time-out applies to each piece."""
_CONNECT_SECONDS = 10
_RETRIES = 120
"""Attempts to get a quorum, evenly spread over its time-out. The lighthouse may be down for a while."""
_PORT = 29510


def check_lighthouse(address: str) -> tuple[str, int]:
    """Return the host and port of HOST:PORT, HOST or http://HOST:PORT.

    Raises:
        ValueError: torchft is not installed, or no lighthouse listens at the address.
    """
    host, _, port = address.removeprefix("http://").rstrip("/").partition(":")
    if not host or not (port or str(_PORT)).isdigit():
        raise ValueError(f"--lighthouse {address}: must be HOST:PORT, as torchft_lighthouse --bind has it")
    os.environ.setdefault("RUST_LOG", "error")  # torchft reads it at the import, and would log every heartbeat
    try:
        importlib.import_module("torchft")
    except ImportError as error:
        raise ValueError(f'--lighthouse needs torchft ({error}): pip install -e ".[elastic]"') from None
    target = host, int(port or _PORT)
    try:
        socket.create_connection(target, timeout=_CONNECT_SECONDS).close()
    except (OSError, OverflowError) as error:
        raise ValueError(
            f"--lighthouse {address} can't be reached ({error}); start torchft_lighthouse --min_replicas 1 there, or "
            "give its HOST:PORT"
        ) from None
    return target


class Membership:
    """The membership of this group. Every method is a collective over the ranks of this group.

    `state` returns what a group that is behind needs of this rank.
    """

    def __init__(self, config: GroupsConfig, *, quorum_minutes: int, state: Callable[[], Any]) -> None:
        """Connect to the lighthouse. Raises ValueError like `check_lighthouse`."""
        assert config.lighthouse is not None
        host, port = check_lighthouse(config.lighthouse)
        from torchft import Manager, ProcessGroupGloo

        for name in ("torchft.manager", "torchft.checkpointing.http_transport"):
            logging.getLogger(name).setLevel(logging.CRITICAL)  # the trainer reports its errors
        warnings.filterwarnings("ignore", message="The given buffer is not writable")  # by torchft
        timeout = datetime.timedelta(seconds=config.outer_timeout_seconds)
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
            probe.connect((host, port))
            # the address that other groups reach: names of rented nodes mean nothing elsewhere
            address = str(probe.getsockname()[0])
        for interface, addresses in psutil.net_if_addrs().items():
            if address in (each.address for each in addresses):  # the node's name may resolve to its loopback
                os.environ.setdefault("GLOO_SOCKET_IFNAME", interface)
        self._code = COMPRESSIONS[config.outer_compression]
        self._received: Any = None
        self._store = _store(address)
        self._groups = ProcessGroupGloo(timeout=timeout)
        self._transport = _transport(address, timeout)
        self._manager = Manager(
            pg=self._groups,
            load_state_dict=self._keep_received,
            state_dict=state,
            min_replica_size=1,
            use_async_quorum=False,
            timeout=timeout,
            quorum_timeout=datetime.timedelta(minutes=quorum_minutes),
            connect_timeout=datetime.timedelta(seconds=_CONNECT_SECONDS),
            quorum_retries=_RETRIES,
            rank=torch.distributed.get_rank(),
            world_size=torch.distributed.get_world_size(),
            store_addr=self._store.host,
            store_port=self._store.port,
            lighthouse_addr=f"http://{host}:{port}",
            hostname=address,
            replica_id=config.replica_id or socket.gethostname(),
            checkpoint_transport=self._transport,
            init_sync=False,
        )
        self._thread = ThreadPoolExecutor(1, "exchange")
        self.sent_bytes = 0
        """Bytes of changes and means that this rank has sent."""
        self.rank, self.size = 0, 1
        """Rank of this group in the last quorum, and number of groups."""

    def _keep_received(self, state: Any) -> None:
        self._received = state

    def meet(self, step: int) -> Any:
        """Wait for the other groups. `step` is the last step on which this group knows that all have agreed.

        Returns:
            The state of another group that is ahead, or None.

        Raises:
            ConnectionError: a rank of this group did not receive the state, or cannot reach the other groups.
            TimeoutError: there was no quorum.
        """
        self._manager.load_state_dict({"step": step, "batches_committed": 0})
        try:
            self._manager.start_quorum()
        except Exception as error:  # its client raises several types
            raise TimeoutError(" ".join(str(error).split())) from error
        problem = self._manager.errored()
        first = collectives.first_error(None if problem is None else str(problem.original_exception))
        if first is not None:
            raise ConnectionError(first)
        self.rank, self.size = self._manager.participating_rank() or 0, self._manager.num_participants()
        received, self._received = self._received, None
        return received

    def gather(self, *values: int) -> list[tuple[int, ...]]:
        """Return the `values` (64 bits) of all groups, by rank. Raises ConnectionError on all ranks of this group."""
        mine = torch.tensor(values, dtype=torch.int64)

        def gather_values() -> list[tuple[int, ...]]:
            by_group = [torch.empty_like(mine) for _ in range(self.size)]
            self._groups.allgather([by_group], [mine], AllgatherOptions()).wait()
            self._transport.disallow_checkpoint()  # all members have received the state: free it before the next steps
            return [tuple(each.tolist()) for each in by_group]

        return self._attempt(gather_values)

    def begin_mean(
        self, change: torch.Tensor, sizes: Sequence[int], *, num_trained: int
    ) -> Callable[[], tuple[torch.Tensor, torch.Tensor | None]]:
        """Start to compute the mean change of the groups in a thread. Return a function that waits for it.

        The function returns the sum of the groups' `change` [E] over `num_trained`, with the same bits for all groups,
        and if the compression keeps errors, what the groups did not receive of this group's change, [E]. It is a
        collective, and raises ConnectionError on all ranks of this group.

        Each group sums one share of each parameter (of `sizes`), in the groups' order. So the bits do not depend on the
        position of a parameter: a tied weight is in two places.
        """
        future = self._thread.submit(self._mean, change, sizes, num_trained)
        return lambda: self._attempt(future.result)

    def _mean(
        self, change: torch.Tensor, sizes: Sequence[int], num_trained: int
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        granularity = self.size * self._code.row

        def chunks(values: torch.Tensor) -> list[torch.Tensor]:
            longest = _PIECE // granularity * granularity
            return [chunk for parameter in values.split(list(sizes)) for chunk in parameter.split(longest)]

        results = [torch.empty_like(change) for _ in range(1 + self._code.keeps_errors)]
        piece: list[tuple[torch.Tensor, ...]] = []
        for chunk in zip(*map(chunks, (change, *results)), strict=True):
            if piece and sum(part.numel() for part, *_ in [*piece, chunk]) > _PIECE:
                self._exchange_piece(piece, num_trained)
                piece = []
            piece.append(chunk)
        if piece:
            self._exchange_piece(piece, num_trained)
        return results[0], results[1] if self._code.keeps_errors else None

    def _exchange_piece(self, piece: Sequence[tuple[torch.Tensor, ...]], num_trained: int) -> None:
        """Exchange chunks of parameters together. Each chunk is a change, and the buffers of its mean and its error.

        Every group receives one share of all changes (all-to-all), sums it, and sends the mean to all (all-gather).
        """
        code, columns = self._code, list(zip(*piece, strict=True))
        shares = [code.rows(chunk, self.size) for chunk in columns[0]]
        changes = torch.cat(shares, dim=1)
        sent = code.encode(changes)
        received = torch.empty_like(sent)
        # as bytes: gloo does not know every type
        self._groups.alltoall_base(received.view(-1), sent.view(-1), [], [], AllToAllOptions()).wait()
        total = code.decode(received[0])
        for other in received[1:]:
            total += code.decode(other)
        self.sent_bytes += 2 * (self.size - 1) * received[0].nbytes
        mean = total / num_trained
        encoded = code.encode(mean)
        by_group = [torch.empty_like(encoded) for _ in range(self.size)]
        self._groups.allgather([by_group], [encoded], AllgatherOptions()).wait()
        results = [code.decode(torch.stack(by_group))]
        if code.keeps_errors:
            results.append(changes - code.decode(sent))
            # this group alone knows the rounding error of its share of the mean, and sends it with its next change
            results[1][self.rank] += num_trained * (mean - code.decode(encoded))
        lengths = [share.shape[1] for share in shares]
        for result, chunks in zip(results, columns[1:], strict=True):
            for rows, chunk in zip(result.split(lengths, dim=1), chunks, strict=True):
                chunk.copy_(rows.reshape(-1)[: chunk.numel()])

    def agree(self, *, is_good: bool) -> bool:
        """Return whether the exchange counts for this group: only if all of its ranks say so."""
        if not is_good:
            self._manager.report_error(RuntimeError("this exchange does not count"))
        try:
            return bool(self._manager.should_commit())
        except Exception as error:  # a rank of this group does not answer, or no group has fetched a state
            raise TimeoutError(" ".join(str(error).split())) from error

    def leave(self) -> None:
        """Leave, so that the other groups do not wait for this group any more. Not a collective."""
        self._manager.shutdown(wait=False)

    @staticmethod
    def _attempt(function: Callable[[], Any]) -> Any:
        """Return the result of `function`. Raises ConnectionError if a rank of this group has lost the connection."""
        result, error = None, None
        try:
            result = function()
        except RuntimeError as failure:
            error = str(failure)
        if (first := collectives.first_error(error)) is not None:
            raise ConnectionError(" ".join(first.split()))
        return result


def _store(address: str) -> Any:
    """Return the store through which the ranks of the groups connect. torchrun's may be visible only on its node."""
    from torch.distributed import TCPStore

    is_first = torch.distributed.get_rank() == 0
    store = TCPStore(address, 0, is_master=True, wait_for_workers=False) if is_first else None
    host, port = collectives.on_rank_0(lambda: (address, store.port))  # type: ignore[union-attr]
    return store or TCPStore(host, port, is_master=False)


def _transport(address: str, timeout: datetime.timedelta) -> Any:
    from torchft.checkpointing import HTTPTransport

    class Transport(HTTPTransport):  # type: ignore[misc,type-arg]
        """torchft's transport with this node's address instead of its name."""

        def metadata(self) -> str:
            return str(super().metadata()).replace(socket.gethostname(), address, 1)

        def disallow_checkpoint(self) -> None:
            super().disallow_checkpoint()
            self._state_dict = self._chunks = None  # otherwise the sent state stays in host memory

    return Transport(timeout=timeout, num_chunks=0)
