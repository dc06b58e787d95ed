"""Imports for the ranks: `dist` forks them from a server process that has imported this module."""

from __future__ import annotations

import gc

from megatron.core import dist_checkpointing  # noqa: F401

from megatron.bcd.arguments.flags import generate_flags
from support import worlds  # noqa: F401

generate_flags()  # fills a cache
gc.collect()
gc.freeze()  # exempts the imported modules from the ranks' garbage collection
