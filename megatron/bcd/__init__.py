"""Block coordinate descent (arXiv 2506.12037) on Megatron Core."""

import importlib
import logging
import warnings
from typing import Any

__version__ = "0.1.0"

# Filter messages that appear at every start and that no user can act on. Here they are filtered for any import order.
for _message in (
    "Transformer Engine and Apex are not installed",
    "Apex is not installed",
    "full scope is deprecated",
    r"The \.grad attribute of a Tensor that is not a leaf",
    r"`torch\.distributed\.\w+` is deprecated",
    "WARNING: there is no optimizer on RANK",
    "`load_state_dict` is deprecated and will be removed",
    "Please use DTensor instead and we are deprecating ShardedTensor",
    "MimoModelConfig is experimental",
    "The argument order of load has been changed",
    r"torch\.distributed is disabled, unavailable or uninitialized",
):
    warnings.filterwarnings("ignore", message=f".*{_message}")

logging.getLogger("megatron.core.rerun_state_machine").setLevel(logging.ERROR)


_LOGGED = ("Unable to save MockGPTDataset", "full_param_layout not provided", "GPTModel IS DEPRECATED")
for _name in ("datasets.gpt_dataset", "distributed.distributed_data_parallel", "models.gpt.gpt_model"):
    logging.getLogger(f"megatron.core.{_name}").addFilter(
        lambda record: not any(text in record.getMessage() for text in _LOGGED)
    )


_PUBLIC = {
    "BlockCoordinate": "megatron.bcd.torch_loop",
    "FAMILY_DEFAULTS": "megatron.bcd.arguments",
    "RunConfig": "megatron.bcd.config",
    "build_model": "megatron.bcd.model.builder",
    "parse_run_config": "megatron.bcd.arguments",
    "pretrain": "megatron.bcd.training.pretrain",
}
"""The public API by module (docs/library.md). Imported on demand, because planning needs no torch."""

__all__ = ["BlockCoordinate", "FAMILY_DEFAULTS", "RunConfig", "build_model", "parse_run_config", "pretrain"]


def __getattr__(name: str) -> Any:
    if name in _PUBLIC:
        return getattr(importlib.import_module(_PUBLIC[name]), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
