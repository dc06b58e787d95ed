"""An optimizer for any PyTorch training loop that trains one block of a model at a time (docs/pytorch.md)."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import distributed, nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from megatron.bcd.blocks.schedule import BlockSchedule, PhaseState
from megatron.bcd.config import BcdConfig
from megatron.bcd.config.sections import ALWAYS_ACTIVE
from megatron.bcd.optim import bf16
from megatron.bcd.optim.update_rules import ORTHOGONAL, orthogonalize
from megatron.bcd.runtime import collectives
from megatron.bcd.runtime.compat import pytorch
from megatron.bcd.torch_loop.parameter_blocks import divide_parameters

CHOICES: dict[str, tuple[str, ...]] = {
    "order": ("ascending", "descending", "random"),
    "layout": ("contiguous", "strided"),
    "keep_state": ("reset", "host"),
    "inactive_update": ("none", ORTHOGONAL),
}
Factory = Callable[..., Optimizer]


class BlockCoordinate(Optimizer):
    """Block coordinate descent (arXiv 2506.12037, Algorithm 1) around optimizers of PyTorch.

    ``param_groups`` are those of the wrapped optimizer over all parameters, and remain the same objects in every phase.
    Learning-rate schedulers, ``GradScaler``, Accelerate and transformers' ``Trainer`` therefore see an ordinary
    optimizer. A frozen parameter has ``requires_grad`` False and neither gradient nor state, so optimizers skip it. The
    constructor freezes all of ``model`` except its first active block. A step is one call of ``step``, after any number
    of backward passes. With several processes, wrap the model in ``DistributedDataParallel`` before or after, or apply
    FSDP2's ``fully_shard`` before. See docs/pytorch.md.

    Args:
        model: the model. Parameters that do not require a gradient belong to no block.
        optimizer: a class of ``torch.optim``, called as ``optimizer(parameters, **optimizer_settings)``, or a
            function that takes the list of parameters and may group them. Its step needs no closure.
        num_blocks: number of blocks. With 1, the result equals the wrapped optimizer's bit for bit (on main parameters
            if weights are bf16). With 0, no layer is ever active.
        steps_per_block: number of steps per phase.
        order: "ascending", "descending" or "random" (determined by ``seed``).
        layout: "contiguous" divides the layers into ranges, "strided" assigns every ``num_blocks``-th layer to a block.
        layers: the modules to divide, in order. Default: the longest ``ModuleList`` or ``Sequential``.
        keep_state: what happens to a block's optimizer state at the end of its phase: "reset" frees it, "host" keeps it
            in host memory until the block's next phase.
        always_active: parameters trained in every phase: "norms", "biases", "embedding", "head", module classes, or
            patterns of parameter names. Default: none; with an inactive update all four kinds.
        always_active_optimizer: a separate optimizer for these parameters, built like ``optimizer`` (for example AdamW
            beside Muon, which accepts matrices only).
        inactive_update: "orthogonal" also updates the other blocks' matrices in each step, without state, along their
            orthogonalised gradients. Convolutions count as matrices of outputs x the rest; parameters of fewer than two
            dimensions stay frozen. Weight decay is decoupled, as in AdamW.
        inactive_lr_ratio: learning rate of these updates, relative to the parameter's.
        seed: seed of the random order. If torch.distributed is initialized, rank 0's seed is used.

    Raises:
        ValueError: an argument is invalid. One line that names it.
    """

    _is_reduced = True
    """Whether the phase's gradients are averaged. A class attribute, because a pickled model's hook has no state."""

    def __init__(
        self,
        model: nn.Module,
        optimizer: Factory,
        *,
        num_blocks: int = 3,
        steps_per_block: int = 100,
        order: str = "ascending",
        layout: str = "contiguous",
        layers: Iterable[nn.Module] | None = None,
        keep_state: str = "reset",
        always_active: Sequence[str | type[nn.Module]] | None = None,
        always_active_optimizer: Factory | None = None,
        inactive_update: str = "none",
        inactive_lr_ratio: float = 0.2,
        seed: int = 1234,
        **optimizer_settings: Any,
    ) -> None:
        chosen = {"order": order, "layout": layout, "keep_state": keep_state, "inactive_update": inactive_update}
        for name, value in chosen.items():
            if value not in CHOICES[name]:
                raise ValueError(f"{name} {value!r}: is unknown. Give one of {', '.join(CHOICES[name])}.")
        if not 0 < inactive_lr_ratio < float("inf"):
            raise ValueError(
                f"inactive_lr_ratio {inactive_lr_ratio}: is not a positive finite number. Give one, such as 0.2."
            )
        if always_active is None:
            always_active = () if inactive_update == "none" else ALWAYS_ACTIVE
        self._parameter_blocks = divide_parameters(
            model, num_blocks=num_blocks, layout=layout, layers=layers, always_active=always_active
        )
        named = {name: p for name, p in model.named_parameters() if p.requires_grad}
        if not num_blocks and inactive_update == "none" and not self._parameter_blocks.always_active:
            raise ValueError("num_blocks 0: trains nothing. Give an inactive_update or always_active.")
        self._inactive_update, self._inactive_lr_ratio = inactive_update, inactive_lr_ratio
        self._keeps_state = keep_state == "host"
        self._offloaded: dict[str, dict[str, Any]] = {}
        self._low_bits: dict[str, torch.Tensor] = {}
        self._schedule = BlockSchedule(
            settings=BcdConfig(bcd_steps_per_block=steps_per_block, bcd_order=order),
            num_blocks=max(1, num_blocks),
            seed=seed if _num_ranks() == 1 else collectives.on_rank_0(lambda: seed),
        )
        self._phase_state = PhaseState()
        self.optimizer_state_bytes = 0
        """Bytes of this rank's optimizer state in the last step, before a switch."""
        apart = self._parameter_blocks.always_active if always_active_optimizer else frozenset()
        in_blocks = [p for name, p in named.items() if name not in apart]
        if not in_blocks:
            raise ValueError("always_active: covers all parameters that require a gradient. Leave some for the blocks.")
        self._optimizers = [optimizer(in_blocks, **optimizer_settings)]
        if apart and always_active_optimizer:
            self._optimizers.append(always_active_optimizer([p for name, p in named.items() if name in apart]))
        model.requires_grad_(False)
        names = {id(p): name for name, p in named.items()}
        self._names = [[names.get(id(p)) for p in group["params"]] for group in self._wrapped_groups()]
        super().__init__(self._wrapped_groups(), self._optimizers[0].defaults)
        inner = model.module if isinstance(model, DistributedDataParallel) else model
        inner.register_forward_pre_hook(self._before_forward)
        self._enter_phase()

    @property
    def _parameters(self) -> dict[str, nn.Parameter]:
        """Parameters by name. Read from the groups, because Accelerate replaces parameters there by sharded ones."""
        groups = zip(self._names, self.param_groups, strict=True)
        pairs = (pair for names, group in groups for pair in zip(names, group["params"], strict=True))
        return {name: p for name, p in pairs if name is not None}

    def _wrapped_groups(self) -> list[dict[str, Any]]:
        return [group for wrapped in self._optimizers for group in wrapped.param_groups]

    @property
    def state(self) -> Mapping[torch.Tensor, Any]:  # type: ignore[override]
        """State of the active parameters: a new mapping of the wrapped optimizers' entries."""
        return {p: entry for wrapped in self._optimizers for p, entry in wrapped.state.items()}

    @state.setter
    def state(self, _: Any) -> None:
        """Ignore the empty state that the constructor of Optimizer sets."""

    @property
    def block(self) -> int:
        """Index of the active block."""
        return self._schedule.block(self._phase_state)

    @property
    def phase(self) -> int:
        """Number of completed phases."""
        return self._phase_state.phase

    @property
    def cycle(self) -> int:
        """Number of completed cycles. In a cycle every block has one phase."""
        return self._schedule.cycle(self._phase_state)

    @property
    def active_names(self) -> frozenset[str]:
        """Names of the parameters that the wrapped optimizers step in this phase."""
        return self._parameter_blocks.always_active | self._parameter_blocks.blocks[self.block]

    @property
    def active_parameters(self) -> list[nn.Parameter]:
        """The parameters of ``active_names``, for gradient clipping."""
        active = self.active_names
        return [p for name, p in self._parameters.items() if name in active]

    @property
    def host_state_bytes(self) -> int:
        """Bytes of this rank's offloaded optimizer state and low bits in host memory."""
        state = _num_bytes(entry["value"] for state in self._offloaded.values() for entry in state.values())
        return state + self._low_bits_bytes(is_trained=False)

    def _low_bits_bytes(self, *, is_trained: bool) -> int:
        named = self._parameters
        return sum(low.nbytes for name, low in self._low_bits.items() if named[name].requires_grad is is_trained)

    def describe(self) -> str:
        """Return a line about the active block."""
        layers = ", ".join(map(str, self._parameter_blocks.layers[self.block])) or "none"
        return f"phase {self.phase}: block {self.block}, layers {layers}; {self._schedule.describe()}"

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:  # type: ignore[override]
        """Step the active parameters, update the inactive ones and free their gradients; switch at the end of a phase.

        Returns:
            The loss of ``closure``, which is called once.

        Raises:
            ValueError: the gradients of several processes were not averaged.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        if _num_ranks() > 1 and not self._is_reduced and not all(map(_is_sharded, self.active_parameters)):
            raise ValueError(
                f"the gradients of {_num_ranks()} processes were not averaged. Wrap the model in "
                "DistributedDataParallel, or apply fully_shard to it, and call the whole model."
            )
        if self._inactive_update != "none":
            self._step_inactive()
        self._step_active()
        state_bytes = _num_bytes(value for entry in self.state.values() for value in entry.values())
        self.optimizer_state_bytes = state_bytes + self._low_bits_bytes(is_trained=True)
        before, self._phase_state = self._phase_state, self._schedule.after_step(self._phase_state)
        if self._schedule.is_switch(before, self._phase_state):
            self._enter_phase()
        return loss

    def _before_forward(self, *_: Any) -> None:
        """Rebuild the reducer in the first forward pass of a phase that builds a graph."""
        if not self._is_reduced and torch.is_grad_enabled():
            self._is_reduced = pytorch.rebuild_reducer()

    def _main_param(self, name: str, p: nn.Parameter) -> torch.Tensor:
        """Return the fp32 main parameter of a bf16 weight, and any other parameter itself."""
        if not _is_bf16(p):
            return p
        main_param = p.detach().float()
        if name in self._low_bits:
            _local(main_param).copy_(bf16.join(_local(p), self._low_bits[name]))
        return main_param

    def _set_weight(self, name: str, p: nn.Parameter, main_param: torch.Tensor) -> None:
        """Write a main parameter into its bf16 weight and low bits."""
        if main_param is p:
            return
        weight, value = _local(p), _local(main_param)
        low_bits = self._low_bits.setdefault(name, torch.empty_like(weight, dtype=torch.int16))
        bf16.split(value, weight=weight, low_bits=low_bits)
        weight.masked_fill_(value.isnan(), float("nan"))  # the bits of a GPU's NaN round to -0

    def _step_active(self) -> None:
        """Step the wrapped optimizers, which see main parameters in place of bf16 weights."""
        active, named = self.active_names, self._parameters
        in_bf16 = {name: p for name, p in named.items() if name in active and _is_bf16(p) and p.grad is not None}
        main_params = {p: self._main_param(name, p) for name, p in in_bf16.items()}
        for p, main_param in main_params.items():
            main_param.grad = p.grad.float()
        with self._replaced(main_params):
            for wrapped in self._optimizers:
                wrapped.step()
        for name, p in in_bf16.items():
            self._set_weight(name, p, main_params[p])

    @contextlib.contextmanager
    def _replaced(self, others: Mapping[torch.Tensor, torch.Tensor]) -> Iterator[None]:
        """Let the wrapped optimizers see other tensors in place of their parameters. State moves along."""

        def replace(new: Mapping[torch.Tensor, torch.Tensor]) -> None:
            for wrapped in self._optimizers:
                for group in wrapped.param_groups:
                    group["params"] = [new.get(p, p) for p in group["params"]]
                for p in [p for p in new if p in wrapped.state]:
                    wrapped.state[new[p]] = wrapped.state.pop(p)

        replace(others)
        try:
            yield
        finally:
            replace({other: p for p, other in others.items()})

    def _step_inactive(self) -> None:
        active, names = self.active_names, {id(p): name for name, p in self._parameters.items()}
        for group in self.param_groups:
            rate, decay = float(group["lr"]), float(group.get("weight_decay", 0.0))
            size = self._inactive_lr_ratio * (rate if group.get("maximize") else -rate)
            for p in group["params"]:
                if p.grad is None or (name := names[id(p)]) in active:
                    continue
                main_param = self._main_param(name, p).mul_(1 - rate * decay)
                gradient = p.grad.full_tensor() if _is_sharded(p) else p.grad
                update = orthogonalize(gradient.flatten(1)).reshape(p.shape)
                if _is_sharded(p):
                    from torch.distributed.tensor import distribute_tensor

                    update = distribute_tensor(update, p.device_mesh, p.placements, src_data_rank=None)
                self._set_weight(name, p, main_param.add_(update, alpha=size))
                p.grad = None

    def _enter_phase(self) -> None:
        """Freeze inactive parameters, and move the optimizer's state to where the phase needs it."""
        self._is_reduced = False
        active = self.active_names
        for name, p in self._parameters.items():
            has_update = self._inactive_update != "none" and p.ndim > 1
            p.requires_grad_(name in active or has_update)
            if name in self._low_bits:
                self._low_bits[name] = self._low_bits[name].to(p.device if p.requires_grad else "cpu")
            if name in active:
                self._restore_state(name, p)
            else:
                p.grad = None
                self._remove_state(name, p)

    def _remove_state(self, name: str, p: nn.Parameter) -> None:
        for wrapped in self._optimizers:
            entry = wrapped.state.pop(p, None)
            if entry and self._keeps_state:
                # step counts may always be in host memory, so store where each value was
                self._offloaded[name] = {
                    key: {
                        "value": _to_host(value),
                        "is_on_device": isinstance(value, torch.Tensor) and value.device == p.device,
                    }
                    for key, value in entry.items()
                }

    def _restore_state(self, name: str, p: nn.Parameter) -> None:
        state = self._offloaded.pop(name, None)
        if state is None:
            return
        owner = next(w for w in self._optimizers if any(p is q for group in w.param_groups for q in group["params"]))
        owner.state[p] = {
            key: entry["value"].to(p.device) if entry["is_on_device"] else entry["value"]
            for key, entry in state.items()
        }

    def state_dict(self) -> dict[str, Any]:
        """Return the wrapped optimizers' states, offloaded state and phase, for ``torch.load(weights_only=True)``."""
        return {
            "optimizers": [wrapped.state_dict() for wrapped in self._optimizers],
            "kept_state": dict(self._offloaded),
            "low_bits": dict(self._low_bits),
            "phase_state": self._phase_state.to_dict(),
            "block_layers": [list(layers) for layers in self._parameter_blocks.layers],
        }

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:  # type: ignore[override]
        """Continue from a state dict. Load the model's weights separately.

        Raises ValueError: the state dict has other blocks or another schedule.
        """
        mine = self.state_dict()
        layers, theirs = mine["block_layers"], state_dict.get("block_layers")
        if set(state_dict) != set(mine) or theirs != layers or len(state_dict["optimizers"]) != len(self._optimizers):
            raise ValueError(
                f"state_dict: is of another BlockCoordinate, with blocks {theirs} and not {layers}, or with another "
                "number of optimizers. Give the same arguments."
            )
        # an optimizer converts loaded state to the precision of its parameters, here that of main parameters
        in_bf16 = filter(_is_bf16, self._parameters.values())
        with self._replaced({p: torch.empty(0, device=p.device) for p in in_bf16}):
            for wrapped, saved in zip(self._optimizers, state_dict["optimizers"], strict=True):
                wrapped.load_state_dict(saved)
        self.param_groups = self._wrapped_groups()
        self._offloaded, self._low_bits = {}, dict(state_dict["low_bits"])
        self._phase_state = PhaseState.from_dict(state_dict["phase_state"])
        self._enter_phase()
        self._offloaded = {
            name: {key: entry | {"value": _to_host(entry["value"])} for key, entry in state.items()}
            for name, state in state_dict["kept_state"].items()
        }


def _num_ranks() -> int:
    return distributed.get_world_size() if distributed.is_initialized() else 1


def _is_bf16(p: torch.Tensor) -> bool:
    return p.dtype == torch.bfloat16


def _is_sharded(p: Any) -> bool:
    """Return whether FSDP2 has sharded the parameter."""
    return hasattr(p, "full_tensor")


def _local(p: torch.Tensor) -> torch.Tensor:
    """Return a view of this rank's shard, of at least one dimension."""
    shard: torch.Tensor = p.detach().to_local() if _is_sharded(p) else p.detach()  # type: ignore[attr-defined]
    return torch.atleast_1d(shard)


def _num_bytes(values: Iterable[Any]) -> int:
    tensors = (value for value in values if isinstance(value, torch.Tensor))
    return sum(_local(value).nbytes for value in tensors)


def _to_host(value: Any) -> Any:
    return value.cpu() if isinstance(value, torch.Tensor) else value
