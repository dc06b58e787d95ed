"""These tests run on emulated GPUs only: bash tests/emulated_gpu.sh."""

from __future__ import annotations

import os

collect_ignore_glob = [] if "BCD_EMULATED_GPU" in os.environ else ["test_*.py"]
