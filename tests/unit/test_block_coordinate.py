"""BlockCoordinate in plain PyTorch loops: the wrapped optimizer's steps on the active block, exact resume, errors."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from support.small_net import Net
from torch import nn

from megatron.bcd import BlockCoordinate
from megatron.bcd.optim.update_rules import orthogonalize

NUM_LAYERS = 5


def batches(steps: int, start: int = 0) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    for step in range(start, steps):
        generator = torch.Generator().manual_seed(step)
        yield torch.randint(11, (8, 2), generator=generator), torch.randint(3, (8,), generator=generator)


def train(model: Net, optimizer: torch.optim.Optimizer, *, steps: int, start: int = 0, schedule: Any = None) -> None:
    for inputs, targets in batches(steps, start):
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(inputs), targets).backward()
        optimizer.step()
        if schedule is not None:
            schedule.step()


def cosine(optimizer: torch.optim.Optimizer) -> Any:
    return torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=40)


def assert_same_weights(left: nn.Module, other: nn.Module) -> None:
    expected = other.state_dict()
    assert {name: torch.equal(value, expected[name]) for name, value in left.state_dict().items()} == dict.fromkeys(
        expected, True
    )


@pytest.mark.parametrize(
    ("optimizer", "settings"),
    [(torch.optim.AdamW, {"lr": 0.01}), (torch.optim.SGD, {"lr": 0.1, "momentum": 0.9, "weight_decay": 0.01})],
)
def test_one_block_is_the_wrapped_optimizer(optimizer: Any, settings: dict[str, Any]) -> None:
    """With one block the steps are those of the wrapped optimizer."""
    plain, model = Net(NUM_LAYERS), Net(NUM_LAYERS)
    alone = optimizer(plain.parameters(), **settings)
    wrapped = BlockCoordinate(model, optimizer, num_blocks=1, steps_per_block=4, **settings)
    train(plain, alone, steps=15, schedule=cosine(alone))
    train(model, wrapped, steps=15, schedule=cosine(wrapped))
    assert_same_weights(model, plain)


def plain_loop(
    model: Net, blocks: list[list[str]], *, steps: int, per_block: int, keeps: bool, rule: str, always: set[str]
) -> None:
    """Train the same way with one AdamW per block, and one for always-active parameters."""
    named = dict(model.named_parameters())
    optimizers: dict[int, torch.optim.AdamW] = {}
    constant = torch.optim.AdamW([named[name] for name in sorted(always)] or [torch.zeros(1)], lr=0.01)
    for step, (inputs, targets) in enumerate(batches(steps)):
        number = step // per_block % len(blocks)
        if step % per_block == 0 and not keeps:
            optimizers.clear()
        rate = 0.01 * 0.9**step
        active = [named[name] for name in blocks[number] if name not in always]
        block_optimizer = optimizers.setdefault(number, torch.optim.AdamW(active, lr=0.01))
        model.zero_grad()
        nn.functional.cross_entropy(model(inputs), targets).backward()
        if rule != "none":
            with torch.no_grad():
                for name in sorted(set(named) - set(blocks[number]) - always):
                    p = named[name]
                    if p.ndim == 2:
                        p.mul_(1 - rate * 0.01)
                        p.add_(orthogonalize(p.grad), alpha=-rate * 0.2)
        for optimizer in (block_optimizer, constant):
            optimizer.param_groups[0]["lr"] = rate
            optimizer.step()


def layer_names(*layers: int) -> list[str]:
    """Return the parameters of these layers; the first includes the embedding, the last final norm and head."""
    names = [name for name, _ in Net(NUM_LAYERS).named_parameters()]
    prefixes = [f"layers.{layer}." for layer in layers]
    prefixes += ["embedding."] * (0 in layers) + ["final_norm.", "head."] * (NUM_LAYERS - 1 in layers)
    return [name for name in names if name.startswith(tuple(prefixes))]


CONTIGUOUS = [layer_names(0, 1), layer_names(2, 3), layer_names(4)]
STRIDED = [layer_names(0, 3), layer_names(1, 4), layer_names(2)]
NORMS_AND_EMBEDDING = {"embedding.weight"} | {
    f"{owner}.{kind}" for owner in ("final_norm", *(f"layers.{i}.1" for i in range(5))) for kind in ("weight", "bias")
}


@pytest.mark.parametrize(
    ("layout", "order", "keep_state", "rule", "always"),
    [
        ("contiguous", "ascending", "reset", "none", ()),
        ("contiguous", "descending", "host", "none", ("norms", "embedding")),
        ("strided", "ascending", "host", "orthogonal", ("norms", "embedding")),
        ("strided", "descending", "reset", "orthogonal", ()),
    ],
)
def test_steps_of_an_independent_loop(
    layout: str, order: str, keep_state: str, rule: str, always: tuple[str, ...]
) -> None:
    """The weights equal those of a plain loop with one AdamW per block."""
    plain, model = Net(NUM_LAYERS), Net(NUM_LAYERS)
    optimizer = BlockCoordinate(
        model,
        lambda parameters: torch.optim.AdamW(parameters, lr=0.01),
        steps_per_block=4,
        layout=layout,
        order=order,
        keep_state=keep_state,
        always_active=always,
        inactive_update=rule,
    )
    train(model, optimizer, steps=30, schedule=torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 0.9**step))
    plain_loop(
        plain,
        (STRIDED if layout == "strided" else CONTIGUOUS)[:: 1 if order == "ascending" else -1],
        steps=30,
        per_block=4,
        keeps=keep_state == "host",
        rule=rule,
        always=NORMS_AND_EMBEDDING if always else set(),
    )
    assert_same_weights(model, plain)


def test_a_frozen_parameter_costs_its_weights_only() -> None:
    """Only active parameters change, and only they have gradients and moments after a switch."""
    model = Net(NUM_LAYERS)
    optimizer = BlockCoordinate(model, torch.optim.AdamW, num_blocks=3, steps_per_block=2, always_active=["norms"])
    before: dict[str, torch.Tensor] = {}
    for step in range(8):
        active = optimizer.active_names
        assert (set(CONTIGUOUS[step // 2 % 3]) | NORMS_AND_EMBEDDING - {"embedding.weight"}) == active
        active_before = optimizer.active_parameters
        before = copy.deepcopy(model.state_dict())
        train(model, optimizer, steps=step + 1, start=step)
        changed = {name for name, value in model.state_dict().items() if not torch.equal(value, before[name])}
        assert changed == active
        assert optimizer.optimizer_state_bytes == sum(8 * p.numel() + 4 for p in active_before)
        next_active = optimizer.active_names
        for name, p in model.named_parameters():
            assert p.requires_grad is (name in next_active)
            assert p.grad is None or name in next_active
            assert p not in optimizer.state or name in next_active


@pytest.mark.parametrize(
    ("keep_state", "rule", "stopped_at"), [("reset", "none", 6), ("host", "none", 9), ("host", "orthogonal", 12)]
)
def test_resume_is_exact(tmp_path: Path, keep_state: str, rule: str, stopped_at: int) -> None:
    """A resumed run ends with the weights of an uninterrupted one."""

    def build() -> tuple[Net, BlockCoordinate, Any]:
        model = Net(NUM_LAYERS)
        optimizer = BlockCoordinate(
            model,
            torch.optim.AdamW,
            lr=0.01,
            steps_per_block=3,
            order="random",
            keep_state=keep_state,
            inactive_update=rule,
            always_active=("biases",),
        )
        return model, optimizer, cosine(optimizer)

    model, optimizer, schedule = build()
    train(model, optimizer, steps=25, schedule=schedule)
    killed, optimizer, schedule = build()
    train(killed, optimizer, steps=stopped_at, schedule=schedule)
    saved = {"model": killed.state_dict(), "optimizer": optimizer.state_dict(), "schedule": schedule.state_dict()}
    torch.save(saved, tmp_path / "saved.pt")
    resumed, optimizer, schedule = build()
    loaded = torch.load(tmp_path / "saved.pt", weights_only=True)
    resumed.load_state_dict(loaded["model"])
    optimizer.load_state_dict(loaded["optimizer"])
    schedule.load_state_dict(loaded["schedule"])
    train(resumed, optimizer, steps=25, start=stopped_at, schedule=schedule)
    assert_same_weights(resumed, model)


def bf16_of(main_params: nn.Module) -> dict[str, torch.Tensor]:
    """Return the weights of an fp32 model in bf16, with halves rounded away from zero."""
    return {
        name: (value.view(torch.int32) + 0x8000 >> 16 << 16).view(torch.float32).bfloat16()
        for name, value in main_params.state_dict().items()
    }


@pytest.mark.parametrize(("keep_state", "rule"), [("host", "none"), ("reset", "orthogonal")])
def test_a_bf16_model_takes_the_steps_of_an_fp32_one(tmp_path: Path, keep_state: str, rule: str) -> None:
    """A model in bf16 learns as its fp32 main parameters do with the same gradients, through switches and a resume.
    Without them steps below half a bf16 step would be lost."""
    settings = {"lr": 1e-5, "steps_per_block": 4, "keep_state": keep_state, "inactive_update": rule}
    main_params, model = Net(NUM_LAYERS), Net(NUM_LAYERS).bfloat16()
    main_params.load_state_dict(model.state_dict())
    start = copy.deepcopy(main_params.state_dict())
    reference = BlockCoordinate(main_params, torch.optim.AdamW, **settings)
    optimizer = BlockCoordinate(model, torch.optim.AdamW, **settings)
    for step, (inputs, targets) in enumerate(batches(30)):
        if step == 15:
            saved = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
            torch.save(saved, tmp_path / "saved.pt")
            saved = torch.load(tmp_path / "saved.pt", weights_only=True)
            model = Net(NUM_LAYERS).bfloat16()
            model.load_state_dict(saved["model"])
            optimizer = BlockCoordinate(model, torch.optim.AdamW, **settings)
            optimizer.load_state_dict(saved["optimizer"])
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(inputs).float(), targets).backward()
        for p, main_param in zip(model.parameters(), main_params.parameters(), strict=True):
            main_param.grad = None if p.grad is None else p.grad.float()
        active = {name: dict(model.named_parameters())[name].numel() for name in optimizer.active_names}
        optimizer.step()
        reference.step()
        expected = bf16_of(main_params)
        assert all(torch.equal(value, expected[name]) for name, value in model.state_dict().items())
    moved = [
        (value != start[name]).float().mean() for name, value in main_params.state_dict().items() if value.ndim > 1
    ]
    assert min(moved) > 0.9
    num_low_bits = sum(low_bits.numel() for low_bits in optimizer.state_dict()["low_bits"].values())
    assert num_low_bits == sum(p.numel() for p in model.parameters())
    low_bits_bytes = 2 * (sum(active.values()) if rule == "none" else num_low_bits)
    assert optimizer.optimizer_state_bytes == sum(8 * numel + 4 for numel in active.values()) + low_bits_bytes


def test_nan_in_a_bf16_model_stays_nan() -> None:
    """A NaN with a GPU's bits (0x7fffffff) stays NaN, and does not round to a weight of -0."""

    class ToNan(torch.optim.SGD):
        def step(self, closure: Any = None) -> None:
            for p in self.param_groups[0]["params"]:
                if p.grad is not None:
                    p.copy_(torch.full(p.shape, 0x7FFFFFFF, dtype=torch.int32).view(torch.float32))

    model = Net(NUM_LAYERS).bfloat16()
    train(model, BlockCoordinate(model, ToNan), steps=1)
    assert all(p.isnan().all() for p in model.layers[0].parameters())


def test_a_step_that_the_scaler_skips_does_not_count() -> None:
    """A step that the scaler skips ends no phase and changes no weight."""
    model = Net(NUM_LAYERS)
    optimizer = BlockCoordinate(model, torch.optim.AdamW, steps_per_block=1, inactive_update="orthogonal")
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0)
    before = copy.deepcopy(model)
    for factor, phase in ((float("inf"), 0), (1.0, 1)):
        inputs, targets = next(batches(1))
        scaler.scale(nn.functional.cross_entropy(model(inputs), targets) * factor).backward()
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        assert optimizer.phase == phase
        if phase == 0:
            assert_same_weights(model, before)
    assert all(torch.isfinite(p).all() for p in model.parameters())


def test_muon_for_the_blocks_and_adam_for_the_rest() -> None:
    """Muon steps the matrices of the blocks and Adam all other parameters, each at its own rate."""
    model = Net(NUM_LAYERS)
    always = ("norms", "biases", "embedding", "head")
    optimizer = BlockCoordinate(
        model,
        lambda parameters: torch.optim.Muon(parameters, lr=0.01),
        num_blocks=2,
        steps_per_block=2,
        always_active=always,
        always_active_optimizer=lambda parameters: torch.optim.AdamW(parameters, lr=0.002),
        keep_state="host",
    )
    assert [group["lr"] for group in optimizer.param_groups] == [0.01, 0.002]
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 0.5**step)
    train(model, optimizer, steps=2, schedule=schedule)
    assert [group["lr"] for group in optimizer.param_groups] == [0.0025, 0.0005]
    matrices = {f"layers.{layer}.0.weight" for layer in range(5)}
    assert optimizer.active_names & matrices == {"layers.3.0.weight", "layers.4.0.weight"}
    saved = copy.deepcopy(optimizer.state_dict())
    assert set(saved["kept_state"]) == {"layers.0.0.weight", "layers.1.0.weight", "layers.2.0.weight"}
    optimizer.load_state_dict(saved)
    train(model, optimizer, steps=8, start=2, schedule=schedule)
    assert optimizer.phase == 4


def test_what_is_always_active_by_default() -> None:
    """By default all but the layers' matrices is always active with orthogonal updates, and nothing without."""
    always = {"none": set(), "orthogonal": {"embedding.weight", "head.weight", "head.bias"} | NORMS_AND_EMBEDDING}
    for rule, expected in always.items():
        optimizer = BlockCoordinate(Net(NUM_LAYERS), torch.optim.AdamW, inactive_update=rule)
        in_block = {"layers.0.0.weight", "layers.1.0.weight"} if expected else set(layer_names(0, 1))
        biases = {f"layers.{layer}.0.bias" for layer in range(5)} if expected else set()
        assert optimizer.active_names == in_block | biases | expected


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"num_blocks": 6}, "num_blocks 6"),
        ({"num_blocks": 0}, "num_blocks 0"),
        ({"order": "greedy"}, "order"),
        ({"inactive_update": "muon"}, "inactive_update"),
        ({"always_active": ("lm_head*",)}, "always_active"),
    ],
)
def test_bad_arguments(settings: dict[str, Any], message: str) -> None:
    """A bad argument is refused by name when the optimizer is built."""
    with pytest.raises(ValueError, match=message):
        BlockCoordinate(Net(NUM_LAYERS), **{"optimizer": torch.optim.AdamW, **settings})


SIZES = {"vocab_size": 64, "hidden_size": 32, "intermediate_size": 48, "max_position_embeddings": 64}
SIZES |= {"num_hidden_layers": 4, "num_attention_heads": 4, "num_key_value_heads": 2, "pad_token_id": 0}
EXPERTS = {"num_experts_per_tok": 2, "head_dim": 8}


@pytest.mark.parametrize(
    ("model_type", "settings"),
    [
        ("qwen3_moe", EXPERTS | {"num_experts": 4, "moe_intermediate_size": 16}),
        ("gpt_oss", EXPERTS | {"num_local_experts": 4, "sliding_window": 8}),
        ("gemma3_text", {"head_dim": 8, "sliding_window": 8}),
        ("phi3", {}),
    ],
)
def test_models_that_megatron_core_is_not_built_for(model_type: str, settings: dict[str, Any]) -> None:
    """A phase changes the layers of its block only, experts included, and the loss falls."""
    config = transformers.AutoConfig.for_model(model_type, **SIZES | settings)
    with torch.random.fork_rng():
        torch.manual_seed(1)
        model = transformers.AutoModelForCausalLM.from_config(config)
    tokens = torch.randint(3, 64, (4, 16), generator=torch.Generator().manual_seed(2))
    optimizer = BlockCoordinate(model, torch.optim.AdamW, num_blocks=2, steps_per_block=4, lr=0.01)
    losses = []
    for phase in range(2):
        before = copy.deepcopy(model.state_dict())
        for _ in range(4):
            optimizer.zero_grad()
            loss = model(input_ids=tokens, labels=tokens).loss
            loss.backward()
            losses.append(loss.item())
            optimizer.step()
        moved = {name for name, weight in model.state_dict().items() if not torch.equal(weight, before[name])}
        layers = {int(name.split("layers.")[1][0]) for name in moved if "layers." in name}
        assert layers == {2 * phase, 2 * phase + 1}
    assert losses[3] < losses[0] - 0.1 and losses[7] < losses[4]


def test_a_state_of_other_blocks_is_refused() -> None:
    """A state of other blocks or of another optimizer is refused."""
    saved = BlockCoordinate(Net(NUM_LAYERS), torch.optim.AdamW, num_blocks=3).state_dict()
    with pytest.raises(ValueError, match="blocks"):
        BlockCoordinate(Net(NUM_LAYERS), torch.optim.AdamW, num_blocks=2).load_state_dict(saved)
    with pytest.raises(ValueError, match="BlockCoordinate"):
        BlockCoordinate(Net(NUM_LAYERS), torch.optim.AdamW).load_state_dict(
            torch.optim.AdamW(Net(NUM_LAYERS).parameters()).state_dict()
        )


def test_a_parameter_that_the_user_froze_stays_frozen() -> None:
    """A parameter that the user froze stays frozen."""
    model = Net(NUM_LAYERS)
    model.embedding.requires_grad_(False)
    optimizer = BlockCoordinate(model, torch.optim.AdamW, steps_per_block=1, inactive_update="orthogonal")
    assert "embedding.weight" not in optimizer.active_names
    train(model, optimizer, steps=4)
    assert torch.equal(model.embedding.weight, Net(NUM_LAYERS).embedding.weight)
