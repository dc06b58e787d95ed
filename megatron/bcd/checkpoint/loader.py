"""Load checkpoints: find the newest valid one, check that it fits the run, and load its parts."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, TypeVar

import torch
from megatron.core import dist_checkpointing, parallel_state
from megatron.core.dist_checkpointing import ShardedTensor
from torch.distributed.checkpoint.api import CheckpointException

from megatron.bcd.checkpoint import layout, optimizer_state, run_state
from megatron.bcd.checkpoint.run_state import RunState
from megatron.bcd.checkpoint.safe_loading import only_data, unreadable
from megatron.bcd.config import RunConfig
from megatron.bcd.model.builder import unwrap_model
from megatron.bcd.optim.active_block import ActiveBlock
from megatron.bcd.runtime import collectives, device, rng
from megatron.bcd.runtime.compat.megatron_core import load_sharded

T = TypeVar("T")
_EXTRA_STATE = "_extra_state"
"""Suffix of the names of extra state that a module of Megatron Core or Transformer Engine has beside parameters."""


@dataclass(frozen=True, kw_only=True)
class Source:
    """A checkpoint whose files are intact."""

    root: str
    path: str
    state: RunState | None = None
    """None if only the weights are loaded: with --finetune or --skip-train, or from another program's checkpoint."""
    messages: tuple[str, ...] = ()
    """Warnings for the user, for example about newer checkpoints that are damaged."""
    iteration: int
    """Number of steps after which it was written, from the name of its folder."""
    consumed_samples: int = 0
    """Training samples until then; 0 if another program wrote it."""

    @property
    def name(self) -> str:
        """Flag and folder, for messages."""
        return f"--load {self.root}: {self.path}"


def current_layout() -> dict[str, Any]:
    """Return the parallel sizes and the device type. Random generators can only be restored in the same layout."""
    expert_size = parallel_state.get_expert_model_parallel_world_size()
    return {
        "tensor_size": parallel_state.get_tensor_model_parallel_world_size(),
        "pipeline_size": parallel_state.get_pipeline_model_parallel_world_size(),
        "data_size": parallel_state.get_data_parallel_world_size(),
        "device": device.current().type,
        "context_size": parallel_state.get_context_parallel_world_size(),
        **({"expert_size": expert_size} if expert_size > 1 else {}),
    }


# --- find


def find(config: RunConfig) -> Source | None:
    """Return the newest valid checkpoint below --load; None if there is none. A collective: all ranks check files.

    Raises:
        ValueError: there is no checkpoint, and the run needs one or the folder has other contents; no checkpoint is
            valid; the newest valid one has another format version or another network; or another program wrote it and
            neither --finetune nor --skip-train is given.
    """
    root, step = config.checkpoint.load, config.checkpoint.ckpt_step
    if root is None:
        return None
    iterations, problem = _on_rank_0(lambda: _candidates(root, step))
    messages = [problem] if problem else []
    rank, num_ranks = torch.distributed.get_rank(), torch.distributed.get_world_size()
    for iteration in iterations:
        path = layout.iteration_folder(root, iteration)
        source = Source(root=root, path=path, messages=tuple(messages), iteration=iteration)
        if _on_rank_0(lambda path=path: layout.is_foreign(path)):  # type: ignore[misc]
            if config.checkpoint.finetune or config.training.skip_train:
                return source
            raise ValueError(
                f"{source.name} was not written by this program (it has no {layout.CHECKSUMS}), so a run can't resume "
                "from it; add --finetune to start at iteration 0 with its weights"
            )
        damage = collectives.first_error(layout.damage(path, part=rank, num_parts=num_ranks))
        if damage is None:
            return _checked(config, source)
        messages.append(f"skipped a damaged checkpoint: {damage}")
    if messages:
        raise ValueError(f"--load {root}: it has no valid checkpoint; {'; '.join(messages)}")
    _on_rank_0(lambda: _check_may_start_anew(config, root))
    return None


def _candidates(root: str, step: int | None) -> tuple[list[int], str | None]:
    """Return the iterations to try, best first, and what is wrong with the tracker, or None. `step` is --ckpt-step.

    Raises:
        ValueError: there is a tracker but no checkpoint, or no checkpoint of `step`.
    """
    iterations, named = layout.candidates(root), layout.read_tracker(root)
    if step is not None:
        if not os.path.isdir(layout.iteration_folder(root, step)):
            numbers = ", ".join(map(str, sorted(iterations))) or "none"
            raise ValueError(
                f"--ckpt-step {step}: --load {root} has checkpoints of iterations {numbers}; give one of them"
            )
        return [step], None
    problem = None
    if named is None and os.path.lexists(os.path.join(root, layout.TRACKER)):
        problem = f"--load {root}: {layout.TRACKER} holds no iteration number"
    elif named is not None and named not in iterations:
        problem = f"--load {root}: {layout.TRACKER} names {layout.iteration_folder(root, named)}, which is missing"
    if problem and not iterations:
        raise ValueError(f"{problem}, and there is no other checkpoint; give a folder that has one")
    return iterations, problem


def _check_may_start_anew(config: RunConfig, root: str) -> None:
    """Raise ValueError if a run whose --load has no checkpoint must not begin with new weights."""
    checkpoint, problem = config.checkpoint, f"--load {root}: holds no checkpoint"
    remedy = "give the folder of --save of a run, or a model in Hugging Face's format as --load-hf"
    for flag, is_given in (
        ("--finetune", checkpoint.finetune),
        ("--skip-train", config.training.skip_train),
        ("--exit-on-missing-checkpoint", checkpoint.exit_on_missing_checkpoint),
    ):
        if is_given:
            raise ValueError(f"{problem}, and {flag} needs one; {remedy}")
    is_saved_here = checkpoint.save is not None and os.path.realpath(checkpoint.save) == os.path.realpath(root)
    # a job that was killed before its first checkpoint may have left logs
    if not is_saved_here and layout.has_other_files(root):
        raise ValueError(f"{problem}, but other files; {remedy}, or an empty folder to start anew")


def _checked(config: RunConfig, source: Source) -> Source:
    """Return `source` with its run state. Raises ValueError if it does not fit this run."""
    file = os.path.join(source.path, layout.RUN_STATE)

    def read() -> str | None:
        if not os.path.lexists(file):
            return None
        with open(file, encoding="utf-8") as opened:
            return opened.read()

    text = _on_rank_0(read)
    if config.checkpoint.finetune or config.training.skip_train:
        if text is not None:
            run_state.check_same_weights(text, config, source=source.name)
        return replace(source, consumed_samples=run_state.consumed_samples(text or ""))
    if text is None:
        raise ValueError(
            f"{source.name} holds the weights of a converted model, and no run to resume; add --finetune to start at "
            "iteration 0 with them"
        )
    state = run_state.from_json(text, path=f"--load {source.root}: {file}")
    run_state.check_same_network(state.flags, config, source=source.name)
    run_state.check_has_loaded_parts(state.flags, config, source=source.name)
    return replace(source, state=state, consumed_samples=state.consumed_samples)


# --- load


def load_weights(source: Source, model: torch.nn.Module) -> None:
    """Collective. Load the weights into `model`.

    Raises:
        ValueError: the checkpoint belongs to another model, can't be read, or contains more than data.
    """
    gpt = unwrap_model(model)
    sharded = gpt.sharded_state_dict()
    # Transformer Engine's modules have extra state for fp8 that other implementations lack, so it is not loaded
    wanted = {name: value for name, value in sharded.items() if not name.endswith(_EXTRA_STATE)}
    with only_data():  # around both, so that the index is unpickled once
        _check_same_model(sharded, source)
        loaded = _load({"model": wanted}, source)
    missing, unexpected = gpt.load_state_dict(loaded["model"], strict=False)
    assert not unexpected and all(name.endswith(_EXTRA_STATE) for name in missing), (missing, unexpected)


def load_optimizer(source: Source, active: ActiveBlock, *, next_block: int) -> None:
    """Load the state of all optimizers. Call it before `ActiveBlock.build` of `next_block`, which restores it.

    A collective. Raises ValueError like `load_weights`.
    """
    assert source.state is not None
    for portion in optimizer_state.portions(active, source.state.optimizer_state, next_block=next_block):
        loaded = _load({"optimizer": optimizer_state.requested_state(active, portion)}, source).get("optimizer", {})
        for state, summary in portion:
            tensors = {name: loaded[f"{name}.{state.name}"] for name in state.shapes_of(summary["names"])}
            state.set(tensors, summary["num_steps"])


def load_random_states(source: Source) -> str | None:
    """Restore this rank's random generators. If the layout differs, return a message instead, the same on all ranks."""
    assert source.state is not None
    saved = source.state.layout
    if saved != current_layout():
        return f"random generators are seeded anew: the checkpoint was written with another parallel layout ({saved})"
    rank = torch.distributed.get_rank()
    rng.restore_all_states(os.path.join(source.path, layout.RANDOM_STATES.format(rank)))
    return None


def _load(sharded: dict[str, Any], source: Source) -> dict[str, Any]:
    try:
        with only_data():
            return load_sharded(sharded, source.path)
    except (Exception, CheckpointException) as error:  # the readers raise many types
        raise unreadable(source.name, error) from error


def _check_same_model(sharded: dict[str, Any], source: Source) -> None:
    """Compare names and global shapes of this rank's weights with the checkpoint's index. Raises ValueError."""
    try:
        with only_data():
            saved = dist_checkpointing.load_tensors_metadata(source.path)
    except (Exception, CheckpointException) as error:
        raise unreadable(source.name, error) from error
    for tensor in sharded.values():
        if not isinstance(tensor, ShardedTensor):
            continue
        there, here = saved.get(tensor.key), list(tensor.global_shape)
        # the padded vocabulary may differ
        if there is None or (list(there.global_shape) != here and not tensor.allow_shape_mismatch):
            saved_shape = "is not in it" if there is None else f"is {list(there.global_shape)} in it"
            raise ValueError(
                f"{source.name} is of another model: {tensor.key} {saved_shape} and {here} in this run; give the flags "
                "of the run that saved it"
            )


def _on_rank_0(read: Callable[[], T]) -> T:
    """Run `read` on rank 0 and return its result on every rank. Raises ValueError instead of OSError."""
    try:
        return collectives.on_rank_0(read)
    except OSError as error:
        raise ValueError(str(error)) from None
