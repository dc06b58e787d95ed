"""Flags of stock Megatron-LM that set nothing here: refused where the run would train something else or cannot do what
was asked for, else accepted without effect."""

from __future__ import annotations

import functools
import importlib.resources
from collections.abc import Sequence

_GELU = "the activation is --swiglu, --quick-geglu, --squared-relu, or GELU"
_SHARDED = "weights are not sharded over data-parallel ranks; the optimizer state is"
REFUSED = {
    "dense models only": ("--num-experts", "--num-moe-experts"),
    "attention is plain or grouped-query": (
        "--multi-latent-attention",
        "--experimental-attention-variant",
        "--attention-output-gate",
        "--window-",
        "--softmax-type",
        "--qk-clip",
        "--qk-l2-norm",
    ),
    "all layers are the same transformer layer": (
        "--hybrid-",
        "--is-hybrid-model",
        "--heterogeneous-",
        "--spec",
        "--mtp-",
        "--enable-gpt-oss",
        "--no-rope-freq",
        "--rope-type",
    ),
    _GELU: ("--activation-func-clamp-value", "--glu-linear-offset"),
    "weights are drawn as --init-method-std says": ("--init-method-xavier-uniform",),
    "of 8 bits --fp8-format with delayed scaling is supported alone": (
        "--fp4-",
        "--fp8-quantizer-factory",
        "--no-fp8-wgrad",
        "--disable-fp8-wgrad",
        "--first-last-layers-bf16",
        "--num-layers-at-",
        "--kitchen-",
        "--use-kitchen",
        "--te-precision-config-file",
    ),
    _SHARDED: ("--use-megatron-fsdp", "--use-custom-fsdp", "--use-torch-fsdp2"),
    "activations stay on the device; give --recompute-activations": (
        "--cpu-offloading",
        "--offload-modules",
        "--fine-grained-activation-offloading",
    ),
    "activations, loss and main parameters have the precision of --bf16, --fp16 or fp32": (
        "--fp32-residual-connection",
        "--fp16-lm-cross-entropy",
        "--main-params-dtype",
        "--batch-invariant-mode",
    ),
    "weight decay is of matrices alone; --apply-wd-to-qk-layernorm adds norms": ("--no-weight-decay-cond-type",),
    "positions are scaled by --use-rope-scaling alone": ("--rotary-seq-len-interpolation-factor",),
    "parallel sizes are given; a checkpoint fits all of them": ("--use-mp-args-from-checkpoint-args",),
    "a run starts from --load or --load-hf; tools/convert_checkpoint.py converts": (
        "--ckpt-convert-",
        "--load-main-params-from-ckpt",
        "--pretrained-checkpoint",
    ),
    "give --num-layers and --seq-length": ("--encoder-num-layers", "--encoder-seq-length"),
    "the vocabulary is that of the tokenizer's files and --make-vocab-size-divisible-by": (
        "--vocab-extra-ids",
        "--padded-vocab-size",
        "--tokenizer-",
        "--tiktoken-special-tokens",
        "--allow-ambiguous-pad-tokens",
    ),
    "data are prepared before the run; --sft reads records": (
        "--fim-data",
        "--finetune-",
        "--sft-tokenizer-prompt-format",
        "--multiple-validation-sets",
    ),
    "every step is trained, with the batch size that is given": (
        "--iterations-to-skip",
        "--phase-transition-iterations",
        "--decrease-batch-size-if-needed",
        "--fake-process-group",
    ),
    "this trains language models on text": ("--perform-rl-step", "--export-", "--modelopt-"),
    "give --config, a YAML file of flags": ("--yaml-cfg",),
}
"""Why flags are refused, and how those start."""
_HARMLESS = {"--main-params-dtype": ["fp32"], "--rotary-seq-len-interpolation-factor": ["1"]}
"""The one value of a refused flag that asks for what is done."""


@functools.cache
def stock_flags() -> frozenset[str]:
    """Every flag of stock Megatron-LM, supported or not."""
    file = importlib.resources.files("megatron.bcd.arguments") / "megatron_flag_names.txt"
    lines = file.read_text(encoding="utf-8").splitlines()
    return frozenset(name for line in lines if (name := line.split("#")[0].strip()))


def reason_of(name: str) -> str | None:
    """Why a flag is refused; None where the table has no such flag."""
    return next((why for why, starts in REFUSED.items() if name.startswith(starts)), None)


REPLACED = {
    "--cpu-kernels": "a CPU runs Megatron Core's own functions",
    "--eval-generate": "tools/generate.py on a folder of --save-hf takes its place",
    "--eval-generate-tokens": "tools/generate.py on a folder of --save-hf takes its place",
}
"""Flags that this program had: accepted with any value, without effect, and the run summary says what took their
place."""


def has_no_effect(name: str, values: Sequence[str]) -> bool:
    """Whether a flag that sets nothing here is stock's, or was this program's, and may be ignored."""
    if name in REPLACED:
        return True
    return name in stock_flags() and (reason_of(name) is None or _HARMLESS.get(name) == list(values))
