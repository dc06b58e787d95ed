"""Which replica groups train together: torchft's lighthouse and manager decide, and all must be of the same run."""

from __future__ import annotations

import datetime
import hashlib
import importlib
import logging
import os
import socket
from collections.abc import Callable
from importlib.metadata import version
from pathlib import Path
from typing import Any

import psutil
import torch

import megatron.bcd
from megatron.bcd.checkpoint import loader
from megatron.bcd.config import GroupsConfig, RunConfig, run_config_to_dict
from megatron.bcd.runtime import collectives

_CONNECT_SECONDS = 10
_RETRIES = 120
"""Attempts to get a quorum, evenly spread over its time-out. The lighthouse may be down for a while."""
_MAX_FAILURES = 10
"""Consecutive failures of an exchange; one more ends the run."""
_NODE_FLAGS = ("lighthouse", "replica_id", "data_path", "train_data_path", "valid_data_path", "test_data_path",
               "data_args_path", "per_split_data_args_path", "data_cache_path", "num_workers", "tokenizer_model",
               "vocab_file", "merge_file")  # fmt: skip
"""Flags that may differ: places on a node's disk. The contents of these places are compared instead."""
_EXCHANGE_FLAGS = ("save_interval", "save_hf_interval", "exit_interval")
"""The only flags compared in the sections `checkpoint` and `report`: they decide when groups exchange."""


def check_lighthouse(address: str) -> tuple[str, int]:
    """Return the host and port of HOST:PORT. Raises ValueError if torchft is missing or no lighthouse listens there."""
    os.environ.setdefault("RUST_LOG", "error")  # torchft reads it at the import, and would log every heartbeat
    host, _, port = address.rpartition(":")
    try:
        importlib.import_module("torchft")
        socket.create_connection((host, int(port)), timeout=_CONNECT_SECONDS).close()
    except (ImportError, OSError, OverflowError, ValueError) as error:
        raise ValueError(
            f'--lighthouse {address}: {error}. Install torchft (pip install -e ".[elastic]"), start torchft_lighthouse '
            "--min_replicas 1, and give its HOST:PORT."
        ) from None
    return host, int(port)


def connect(config: GroupsConfig, *, quorum_minutes: int, state: Callable[[], Any], load: Callable[[Any], None]) -> Any:
    """Return torchft's manager of this rank, which talks to the same rank of the other groups. A collective.

    If this group is behind, `load` takes what `state` returns in another group.
    """
    assert config.lighthouse is not None
    host, port = check_lighthouse(config.lighthouse)
    from torchft import Manager, ProcessGroupGloo
    from torchft.checkpointing.pg_transport import PGTransport

    logging.getLogger("torchft.manager").setLevel(logging.CRITICAL)  # the trainer reports its errors
    timeout = datetime.timedelta(seconds=config.outer_timeout_seconds)
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect((host, port))
        # the address that other groups reach: names of rented nodes mean nothing elsewhere
        address = str(probe.getsockname()[0])
    for interface, addresses in psutil.net_if_addrs().items():
        if address in (each.address for each in addresses):  # the node's name may resolve to its loopback
            os.environ.setdefault("GLOO_SOCKET_IFNAME", interface)
    # torchrun's store may be visible only on its node
    store = None
    if torch.distributed.get_rank() == 0:
        store = torch.distributed.TCPStore(address, 0, is_master=True, wait_for_workers=False)
    store_address, store_port = collectives.on_rank_0(lambda: (address, store.port))  # type: ignore[union-attr]
    processes = ProcessGroupGloo(timeout=timeout)
    manager = Manager(
        pg=processes,
        load_state_dict=load,
        state_dict=state,
        min_replica_size=1,
        use_async_quorum=False,
        timeout=timeout,
        quorum_timeout=datetime.timedelta(minutes=quorum_minutes),
        connect_timeout=datetime.timedelta(seconds=_CONNECT_SECONDS),
        quorum_retries=_RETRIES,
        max_retries=_MAX_FAILURES,
        rank=torch.distributed.get_rank(),
        world_size=torch.distributed.get_world_size(),
        store_addr=store_address,
        store_port=store_port,
        lighthouse_addr=f"http://{host}:{port}",
        hostname=address,
        replica_id=config.replica_id or socket.gethostname(),
        checkpoint_transport=PGTransport(processes, timeout, torch.device("cpu")),
        init_sync=False,
    )
    manager.bcd_store = store  # must live as long
    return manager


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
    root = Path(os.path.dirname(megatron.bcd.__file__))
    code = collectives.on_rank_0(lambda: _digest(*(path.read_bytes() for path in sorted(root.rglob("*.py")))))
    return identity | {
        "the layout": str(loader.current_layout()),
        "the training data": " ".join(sorted(set(collectives.gather_objects(_digest(first.encode()))))),
        "torch": version("torch"),
        "megatron-core": version("megatron-core"),
        "the code": f"{megatron.bcd.__version__} {code}",
    }


def _digest(*contents: bytes) -> str:
    return hashlib.sha256(b"".join(contents)).hexdigest()[:12]
