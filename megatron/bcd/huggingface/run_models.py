"""Read and write a run's models in Hugging Face's format: --load-hf and --save-hf."""

from __future__ import annotations

import functools
import os
import shutil
import time

import torch
from megatron.core.dist_checkpointing import ShardedTensor
from megatron.core.dist_checkpointing.dict_utils import nested_values
from megatron.core.dist_checkpointing.mapping import apply_factories

from megatron.bcd.checkpoint.shard_writer import ShardWrite
from megatron.bcd.config import RunConfig
from megatron.bcd.huggingface import convert, run_network, tokenizer_export
from megatron.bcd.huggingface.architecture import TRANSFORMERS
from megatron.bcd.huggingface.core_format import CoreCheckpoint
from megatron.bcd.huggingface.folder import RUN, ModelFolder, locate
from megatron.bcd.metrics.reporter import Reporter
from megatron.bcd.model.builder import get_host_layers, unwrap_model
from megatron.bcd.model.skeleton import has_weights
from megatron.bcd.runtime import atomic_io, collectives, device

_WEIGHTS = ".bcd-export"
"""Suffix of the temporary checkpoint beside the model folder."""


@torch.no_grad()
def load_published(config: RunConfig, model: torch.nn.Module) -> None:
    """Copy the weights of --load-hf, if it has some, into `model`, in its precision. Padding rows become zero.

    Read only the tensors of this pipeline stage, and only this tensor-parallel rank's rows of embedding and head.
    No collectives.

    Raises:
        ValueError: as `ModelFolder`; or a file can't be read.
    """
    name, implementation = str(config.checkpoint.load_hf), config.model.transformer_impl
    if implementation == TRANSFORMERS and not has_weights(name):
        return
    source = ModelFolder(locate(name, flag="--load-hf"), transformer_impl=implementation)
    sharded = unwrap_model(model).sharded_state_dict()
    apply_factories(sharded)
    rows = {(row.key, row.layer): row for row in source.rows}
    read = functools.lru_cache(maxsize=1)(source.read)  # gate and up are parts of one tensor
    for part in nested_values(sharded):
        if not isinstance(part, ShardedTensor):
            continue
        row = rows[part.key, part.global_offset[0] if (part.key, 0) in rows else None]
        offsets = part.global_offset[part.prepend_axis_num :]
        if row.is_vocabulary:
            values = source.read_rows(row, offsets[0], offsets[0] + part.local_shape[0])
        else:
            values = read(row)
            for axis in range(1, part.prepend_axis_num):  # the expert
                values = values[part.global_offset[axis]]
            for dim, (start, length) in enumerate(zip(offsets, part.local_shape, strict=True)):
                values = values.narrow(dim, start, length)
        assert part.data is not None
        part.data.copy_(values)


class Exporter:
    """Writes model folders below --save-hf. Every method is a collective.

    All ranks write their weights as a checkpoint beside the folder, and rank 0 converts and deletes it. Thus no rank
    needs memory for more than its weights and one safetensors file.
    """

    def __init__(self, config: RunConfig, reporter: Reporter, *, run: str, is_continued: bool) -> None:
        """Check before training whatever can be checked.

        Args:
            run: name of the run, see `run_state.run_name`.
            is_continued: whether the folder may contain this run's models.

        Raises:
            ValueError: --save-hf is not empty, or transformers lacks the architecture.
        """
        checkpoint = config.checkpoint
        assert checkpoint.save_hf is not None
        self.root: str = os.path.realpath(checkpoint.save_hf)  # the checkpoint beside it must be on the same disk
        self._reporter, self._run = reporter, run
        self._is_first = torch.distributed.get_rank() == 0

        def describe() -> None:
            _check_folder(str(checkpoint.save_hf), run=run if is_continued else None)
            self._description = run_network.describe_run(config, is_on_gpu=device.has_cuda())  # set on rank 0 only

        collectives.on_rank_0(describe)

    def export(self, model: torch.nn.Module, *, iteration: int | None = None) -> bool:
        """Write `model` to --save-hf, or to ``iter_0000007`` in it. Warn and return False if that fails."""
        started = time.monotonic()
        target = self.root if iteration is None else os.path.join(self.root, f"iter_{iteration:07d}")
        weights = target + _WEIGHTS
        error = collectives.on_rank_0(lambda: atomic_io.capture_error(lambda: self._create_folder(weights)))
        if error is None:
            get_host_layers(model).leave_buffers()
            parts = {f"model.{name}": part for name, part in unwrap_model(model).sharded_state_dict().items()}
            write = ShardWrite(parts, weights, in_background=False)
            write.start()
            error = write.finish()
        difference = None
        if error is None:
            error, difference = collectives.long_on_rank_0(lambda: self._convert(weights, target))
        if self._is_first:
            shutil.rmtree(weights, ignore_errors=True)
        if error is not None:
            self._reporter.warning(f"--save-hf {target}: the model was not written ({error}).")
            return False
        self._reporter.note(f"model written to {target} ({time.monotonic() - started:,.1f} s)")
        if difference is not None:
            self._reporter.warning(f"--save-hf {target}: {difference}")
        return True

    def _create_folder(self, weights: str) -> None:
        if os.path.dirname(weights) == self.root and _read_run(self.root) != self._run:  # claim the folder first
            os.makedirs(self.root, exist_ok=True)
            atomic_io.replace(os.path.join(self.root, RUN), f"{self._run}\n".encode())
        shutil.rmtree(weights, ignore_errors=True)
        os.makedirs(weights)

    def _convert(self, weights: str, target: str) -> tuple[str | None, str | None]:
        """Convert the checkpoint. Return the error, and how the exported tokenizer differs from the run's."""
        run, description = self._run if target == self.root else None, self._description
        error = atomic_io.capture_error(
            lambda: convert.to_hugging_face(CoreCheckpoint(weights), target, description, run=run)
        )
        if error is not None or description.tokenizer is None:
            return error, None
        return None, tokenizer_export.find_difference(description.tokenizer, target)


def _read_run(folder: str) -> str | None:
    """Return the name of the run that writes models to a folder, if it is recorded."""
    try:
        with open(os.path.join(folder, RUN), encoding="utf-8") as file:
            return file.read(100).strip()
    except (OSError, ValueError):
        return None


def _check_folder(path: str, *, run: str | None) -> None:
    """Check that models may be written to `path`. Models of other runs and other programs are not replaced.

    Args:
        path: --save-hf.
        run: the run to continue, whose models may be in the folder.

    Raises:
        ValueError: the folder holds other files.
    """
    root = os.path.realpath(path)
    if run is None or not os.path.isdir(root) or not os.listdir(root):
        convert.check_output(path, flag="--save-hf")
    elif _read_run(root) != run:
        raise ValueError(
            f"--save-hf {path}: holds files that this run did not write. Give this run's folder, or an empty or new "
            "one."
        )
