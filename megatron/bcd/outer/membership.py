"""Which replica groups take part: torchft's manager, and what goes over the wire between groups.

Each rank talks to the same rank of the other groups, over gloo. torchft 0.2 decides who is in (`Manager.start_quorum`),
lets a group that is behind take the state of one that is not (HTTPTransport), and takes the vote of a group's ranks on
whether an exchange counts (`should_commit`).
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
"""Elements that are exchanged at once: the time-out holds for each piece."""
_CONNECT_SECONDS = 10
_RETRIES = 120
"""Of a quorum, evenly over its time-out: the lighthouse may be away for a while."""
_PORT = 29510


def check_lighthouse(address: str) -> tuple[str, int]:
    """Host and port of HOST:PORT, HOST or http://HOST:PORT.

    Raises:
        ValueError: torchft is not there, or nobody listens there.
    """
    host, _, port = address.removeprefix("http://").rstrip("/").partition(":")
    if not host or not (port or str(_PORT)).isdigit():
        raise ValueError(f"--lighthouse {address}: must be HOST:PORT, as torchft_lighthouse --bind has it")
    os.environ.setdefault("RUST_LOG", "error")  # read at the import: else it logs every heartbeat
    try:
        importlib.import_module("torchft")
    except ImportError as error:
        raise ValueError(f'--lighthouse needs torchft ({error}): pip install -e ".[elastic]"') from None
    where = host, int(port or _PORT)
    try:
        socket.create_connection(where, timeout=_CONNECT_SECONDS).close()
    except (OSError, OverflowError) as error:
        raise ValueError(
            f"--lighthouse {address} can't be reached ({error}); start torchft_lighthouse --min_replicas 1 there, or "
            "give its HOST:PORT"
        ) from None
    return where


class Membership:
    """This group among the others. Every method is a collective over the ranks of this group.

    `state` makes what a group that is behind needs of this rank.
    """

    def __init__(self, config: GroupsConfig, *, quorum_minutes: int, state: Callable[[], Any]) -> None:
        """Raises ValueError as `check_lighthouse`."""
        assert config.lighthouse is not None
        host, port = check_lighthouse(config.lighthouse)
        from torchft import Manager, ProcessGroupGloo

        for name in ("torchft.manager", "torchft.checkpointing.http_transport"):
            logging.getLogger(name).setLevel(logging.CRITICAL)  # the trainer tells of its errors
        warnings.filterwarnings("ignore", message="The given buffer is not writable")  # of what it received
        timeout = datetime.timedelta(seconds=config.outer_timeout_seconds)
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
            probe.connect((host, port))
            # by which the others reach this node: names of rented nodes mean nothing elsewhere
            address = str(probe.getsockname()[0])
        for interface, found in psutil.net_if_addrs().items():
            if address in (one.address for one in found):  # a node's own name may be that of its loopback
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
        """Of changes and means, by this rank."""
        self.rank, self.size = 0, 1
        """In the last quorum: of this group, and number of groups."""

    def _keep_received(self, state: Any) -> None:
        self._received = state

    def meet(self, step: int) -> Any:
        """Wait for the other groups, with the number of the step up to which this one knows what all have agreed on.

        Returns:
            The state of another group if that is further, else None.

        Raises:
            ConnectionError: some rank of this group did not get the state, or does not reach the other groups.
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
        """Every group's `values` (64 bits), by its rank. Raises ConnectionError on all ranks of this group."""
        mine = torch.tensor(values, dtype=torch.int64)

        def gathered() -> list[tuple[int, ...]]:
            everyone = [torch.empty_like(mine) for _ in range(self.size)]
            self._groups.allgather([everyone], [mine], AllgatherOptions()).wait()
            self._transport.disallow_checkpoint()  # who takes part has received it: free it before the next steps
            return [tuple(one.tolist()) for one in everyone]

        return self._attempted(gathered)

    def begin_mean(
        self, change: torch.Tensor, sizes: Sequence[int], *, num_trained: int
    ) -> Callable[[], tuple[torch.Tensor, torch.Tensor | None]]:
        """Start, in a thread, what the function that is returned waits for: the sum of the groups' `change` [E] over
        `num_trained`, [E], the same bits for all groups; and what they have missed of this group's change, [E], if the
        compression keeps errors.

        Of each parameter (of `sizes`) each group sums one share, in the groups' order, so that the bits do not depend
        on a parameter's place: a tied weight lies in two. Waiting is a collective, and raises ConnectionError on all
        ranks of this group.
        """
        future = self._thread.submit(self._mean, change, sizes, num_trained)
        return lambda: self._attempted(future.result)

    def _mean(
        self, change: torch.Tensor, sizes: Sequence[int], num_trained: int
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        whole = self.size * self._code.row

        def chunks(values: torch.Tensor) -> list[torch.Tensor]:
            return [chunk for one in values.split(list(sizes)) for chunk in one.split(_PIECE // whole * whole)]

        found = [torch.empty_like(change) for _ in range(1 + self._code.keeps_errors)]
        piece: list[tuple[torch.Tensor, ...]] = []
        for chunk in zip(*map(chunks, (change, *found)), strict=True):
            if piece and sum(one.numel() for one, *_ in [*piece, chunk]) > _PIECE:
                self._fill(piece, num_trained)
                piece = []
            piece.append(chunk)
        if piece:
            self._fill(piece, num_trained)
        return found[0], found[1] if self._code.keeps_errors else None

    def _fill(self, piece: Sequence[tuple[torch.Tensor, ...]], num_trained: int) -> None:
        """As `_mean`, of chunks of parameters sent together: each a change, its mean and its error to be."""
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
        own = code.encode(mean)
        everyone = [torch.empty_like(own) for _ in range(self.size)]
        self._groups.allgather([everyone], [own], AllgatherOptions()).wait()
        found = [code.decode(torch.stack(everyone))]
        if code.keeps_errors:
            found.append(changes - code.decode(sent))
            found[1][self.rank] += num_trained * (mean - code.decode(own))
        lengths = [share.shape[1] for share in shares]
        for whole, chunks in zip(found, columns[1:], strict=True):
            for rows, chunk in zip(whole.split(lengths, dim=1), chunks, strict=True):
                chunk.copy_(rows.reshape(-1)[: chunk.numel()])

    def agree(self, *, is_good: bool) -> bool:
        """Whether the exchange counts for this group: all of its ranks say so."""
        if not is_good:
            self._manager.report_error(RuntimeError("this exchange does not count"))
        try:
            return bool(self._manager.should_commit())
        except Exception as error:  # a rank of this group that does not answer, a state that nobody has fetched
            raise TimeoutError(" ".join(str(error).split())) from error

    def leave(self) -> None:
        """The other groups need not wait for this one any more. Not a collective."""
        self._manager.shutdown(wait=False)

    @staticmethod
    def _attempted(function: Callable[[], Any]) -> Any:
        """The result, if no rank of this group has lost the connection. Raises ConnectionError."""
        result, error = None, None
        try:
            result = function()
        except RuntimeError as failure:
            error = str(failure)
        if (first := collectives.first_error(error)) is not None:
            raise ConnectionError(" ".join(first.split()))
        return result


def _store(address: str) -> Any:
    """The store in which the ranks of the groups find each other; torchrun's may be visible on its node only."""
    from torch.distributed import TCPStore

    is_first = torch.distributed.get_rank() == 0
    store = TCPStore(address, 0, is_master=True, wait_for_workers=False) if is_first else None
    host, port = collectives.on_rank_0(lambda: (address, store.port))  # type: ignore[union-attr]
    return store or TCPStore(host, port, is_master=False)


def _transport(address: str, timeout: datetime.timedelta) -> Any:
    from torchft.checkpointing import HTTPTransport

    class Transport(HTTPTransport):  # type: ignore[misc,type-arg]
        """torchft's, by this node's address."""

        def metadata(self) -> str:
            return str(super().metadata()).replace(socket.gethostname(), address, 1)

        def disallow_checkpoint(self) -> None:
            super().disallow_checkpoint()
            self._state_dict = self._chunks = None  # else what was sent stays in host memory

    return Transport(timeout=timeout, num_chunks=0)
