"""Block coordinate descent (arXiv 2506.12037) on Megatron Core."""

import logging
import warnings
from typing import Any

__version__ = "0.1.0"

# What Megatron Core and PyTorch say at every start and no user can act on; here it is in time for any import order.
for _message in (
    "Transformer Engine and Apex are not installed",
    "Apex is not installed",
    "full scope is deprecated",
    r"The \.grad attribute of a Tensor that is not a leaf",
    r"`torch\.distributed\.\w+` is deprecated",
    "WARNING: there is no optimizer on RANK",
    "`load_state_dict` is deprecated and will be removed",
    "Please use DTensor instead and we are deprecating ShardedTensor",
):
    warnings.filterwarnings("ignore", message=f".*{_message}")

logging.getLogger("megatron.core.rerun_state_machine").setLevel(logging.ERROR)
logging.getLogger("megatron.core.datasets.gpt_dataset").addFilter(
    lambda record: "Unable to save MockGPTDataset" not in record.getMessage()
)


def __getattr__(name: str) -> Any:
    # not imported above: planning needs no torch
    if name == "BlockCoordinate":
        from megatron.bcd.torch_loop import BlockCoordinate

        return BlockCoordinate
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
