"""The modules of the model, and the core attention that replaces Megatron Core's local one."""

from __future__ import annotations

import re
import sysconfig
import types
from collections.abc import Callable

import pytest
import torch
import torch._dynamo
from megatron.core.models.common.embeddings import rope_utils
from megatron.core.transformer.enums import AttnMaskType
from megatron.core.transformer.transformer_config import TransformerConfig
from support.command_line import parse

from megatron.bcd.model import transformer_config
from megatron.bcd.model.attention import ScaledDotProductAttention
from megatron.bcd.model.builder import PlainNorm
from megatron.bcd.model.implementation import Implementation, available_implementation
from megatron.bcd.runtime import device, packages
from megatron.bcd.runtime.compat import megatron_core, pytorch

LOCAL = Implementation(
    layers="local", attention="scaled_dot_product_attention", norm="PyTorch LayerNorm", optimizer="PyTorch AdamW"
)


@pytest.fixture
def on_machine(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    def pretend(*, transformer_engine: bool = False, apex: bool = False) -> None:
        monkeypatch.setattr(packages, "has_transformer_engine", lambda: transformer_engine)
        monkeypatch.setattr(packages, "has_apex", lambda: apex)

    return pretend


OURS = ("local", "scaled_dot_product_attention", "PyTorch LayerNorm")
ENGINE = {"transformer_engine": True}
WHOLE_ENGINE = ("transformer_engine", "Transformer Engine", "Transformer Engine")
ENGINE_BUT_ATTENTION = ("transformer_engine", "scaled_dot_product_attention", "Transformer Engine")


@pytest.mark.parametrize(
    ("words", "machine", "expected"),
    [
        ("--bf16", {}, OURS),
        ("--bf16", {"apex": True}, (*OURS[:2], "Apex fused LayerNorm")),
        ("--bf16", ENGINE, WHOLE_ENGINE),
        ("--bf16 --transformer-impl local", ENGINE, OURS),
        ("--bf16 --transformer-impl transformer_engine", ENGINE, WHOLE_ENGINE),
        ("--normalization RMSNorm", {"apex": True}, (*OURS[:2], "PyTorch RMSNorm")),
        ("", ENGINE, ENGINE_BUT_ATTENTION),
        ("--bf16 --reset-attention-mask", ENGINE, ENGINE_BUT_ATTENTION),
        ("--attention-backend unfused", {}, ("local", "Megatron Core unfused", "PyTorch LayerNorm")),
    ],
)
def test_choice(
    on_machine: Callable[..., None], words: str, machine: dict[str, bool], expected: tuple[str, str, str]
) -> None:
    """The choice takes the fastest parts that the flags and the machine allow, and its description names them."""
    on_machine(**machine)
    chosen = available_implementation(parse(*words.split()))
    assert (chosen.layers, chosen.attention, chosen.norm) == expected
    assert all(part in chosen.describe() for part in expected)


def test_an_absent_implementation_is_refused(on_machine: Callable[..., None]) -> None:
    """--transformer-impl transformer_engine without Transformer Engine is refused."""
    on_machine(apex=True)
    with pytest.raises(ValueError, match="--transformer-impl"):
        available_implementation(parse("--transformer-impl", "transformer_engine"))


@pytest.mark.parametrize("kind", ["LayerNorm", "RMSNorm"])
def test_zero_centred_norm_in_bf16(kind: str) -> None:
    """A norm in bf16 adds 1 to its weight in fp32, so a weight of 0.001 counts."""
    config = TransformerConfig(
        num_layers=1, hidden_size=16, num_attention_heads=1, normalization=kind, layernorm_zero_centered_gamma=True
    )
    norm = PlainNorm(config, 16).bfloat16()
    x = torch.randn(64, 2, 16, generator=torch.Generator().manual_seed(1)).bfloat16()
    before = norm(x)
    with torch.no_grad():
        norm.weight.fill_(1e-3)
    assert norm.weight.dtype == norm(x).dtype == torch.bfloat16 and not torch.equal(norm(x), before)
    exact = PlainNorm(config, 16)
    exact.load_state_dict(norm.state_dict())
    assert torch.equal(norm(x), exact(x.float()).bfloat16())
    norm(x).float().sum().backward()
    assert norm.weight.grad is not None and norm.weight.grad.dtype == torch.bfloat16


def test_recomputation_that_never_ends_is_refused() -> None:
    """Recomputation of a local feed-forward part with biases, whose backward pass never ends, is refused."""
    flags = ("--recompute-granularity", "selective", "--recompute-modules", "core_attn", "mlp")
    with pytest.raises(ValueError, match="--disable-bias-linear"):
        transformer_config.build_transformer_config(parse(*flags), LOCAL)
    transformer_config.build_transformer_config(parse(*flags, "--disable-bias-linear"), LOCAL)


@pytest.mark.parametrize(
    ("flags", "switches"),
    [((), {"--no-bias-gelu-fusion"}), (("--swiglu",), {"--no-bias-swiglu-fusion"}), (("--squared-relu",), set())],
)
def test_a_gpu_without_a_compiler(flags: tuple[str, ...], switches: set[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """A GPU without a compiler or Python.h is refused, with the flags that help."""
    monkeypatch.setattr(device, "has_cuda", lambda: True)
    monkeypatch.delenv("TORCHDYNAMO_DISABLE", raising=False)
    monkeypatch.setenv("CC", "/no/such/compiler")
    with pytest.raises(ValueError) as caught:
        transformer_config.build_transformer_config(parse(*flags), LOCAL)
    suggested = set(re.findall(r"--no-[a-z-]+", str(caught.value)))
    assert suggested == switches | {"--no-bias-dropout-fusion"}
    transformer_config.build_transformer_config(parse(*flags, *sorted(suggested)), LOCAL)
    monkeypatch.setenv("CC", "true")
    monkeypatch.setattr(sysconfig, "get_paths", lambda: {"include": "/no/such/folder"})
    with pytest.raises(ValueError, match=r"Python\.h"):
        transformer_config.build_transformer_config(parse(*flags), LOCAL)


@pytest.mark.parametrize(
    ("flags", "is_fused"),
    [
        (("--bf16", "--bcd-preset", "pretrain"), True),
        (("--bcd-preset", "pretrain"), False),
        (("--bcd-inactive-update", "orthogonal"), False),
        (("--bcd-inactive-update", "orthogonal", "--bcd-inactive-grad-dtype", "fp32"), True),
        (("--optimizer", "muon", "--muon-grad-dtype", "bf16"), False),
        ((), True),
    ],
)
def test_fused_weight_gradient(flags: tuple[str, ...], is_fused: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Apex's kernel is used unless it would write bf16 gradients from fp32 inputs."""
    monkeypatch.setattr(device, "has_cuda", lambda: True)
    monkeypatch.setattr(packages, "is_importable", lambda name: name == "fused_weight_gradient_mlp_cuda")
    monkeypatch.setattr(packages, "missing_for_compilation", lambda: "")
    assert transformer_config.build_transformer_config(parse(*flags), LOCAL).gradient_accumulation_fusion == is_fused


@pytest.mark.parametrize(
    ("flags", "is_fused"),
    [
        ("", True),
        ("--no-cross-entropy-loss-fusion", False),
        ("--bcd-compile off", False),
        ("--bcd-compile off --cross-entropy-loss-fusion", True),
        ("--cross-entropy-loss-fusion --cross-entropy-fusion-impl linear", False),  # it is a function of ours
    ],
)
def test_fused_loss(flags: str, is_fused: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """A GPU with a compiler fuses Megatron Core's loss, unless a flag says otherwise."""
    monkeypatch.setattr(device, "has_cuda", lambda: True)
    monkeypatch.setattr(packages, "missing_for_compilation", lambda: "")
    monkeypatch.delenv("TORCHDYNAMO_DISABLE", raising=False)
    built = transformer_config.build_transformer_config(parse(*flags.split()), LOCAL)
    assert built.cross_entropy_loss_fusion == is_fused


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("with_mask", [False, True])
def test_grouped_queries_keep_to_the_fast_kernels(
    dtype: torch.dtype, with_mask: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a GPU grouped queries go to PyTorch's kernel only in bf16 without a mask, where it is fast."""
    monkeypatch.setattr(device, "has_cuda", lambda: True)
    options: dict[str, object] = {}

    def attend(query: torch.Tensor, *others: torch.Tensor, **flags: object) -> torch.Tensor:
        options.update(flags)
        return query

    monkeypatch.setattr(torch.nn.functional, "scaled_dot_product_attention", attend)
    config = types.SimpleNamespace(attention_dropout=0.0, sequence_parallel=False)
    attention = ScaledDotProductAttention(config, 1, AttnMaskType.causal, "self").eval()
    q, k, v = (torch.zeros(7, 3, heads, 8, dtype=dtype) for heads in (4, 2, 2))
    attention(q, k, v, torch.zeros(1, 1, 7, 7, dtype=torch.bool) if with_mask else None)
    assert options["enable_gqa"] == (dtype is torch.bfloat16 and not with_mask)


def test_a_compiled_rotation_serves_all_lengths() -> None:
    """A compiled rotary embedding is Megatron Core's within bf16, also of a part of each head, and sequences of any
    length share its code: generation during a run has a new length at each token."""
    graphs = torch._dynamo.utils.counters["stats"]["unique_graphs"]
    rotate = pytorch.compiled(megatron_core._rotate, has_dynamic_shapes=True)
    for length in range(3, 12):
        for heads, size in ((4, 16), (2, 8)):
            x, angles = torch.randn(length, 2, heads, 16, dtype=torch.bfloat16), torch.randn(length, 1, 1, size)
            expected = rope_utils._apply_rotary_pos_emb_bshd(x, angles)
            torch.testing.assert_close(rotate(x, angles), expected, rtol=2e-2, atol=5e-2)
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] - graphs <= 2
