"""Flags of stock Megatron-LM that set nothing here: some request what is done anyway, the rest are refused."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class CompatibleFlag:
    """A stock flag for what is done here anyway."""

    name: str
    why: str
    values: tuple[str, ...] = ()
    """The only values for which that is true; () for a switch."""


ANY_NUMBER = ("N",)
"""Value list of a CompatibleFlag whose number makes no difference here."""

COMPATIBLE_FLAGS = (
    CompatibleFlag(name="--use-mcore-models", why="models are always Megatron Core's"),
    CompatibleFlag(name="--use-flash-attn", why="a flash kernel is taken where there is one"),
    CompatibleFlag(name="--no-create-attention-mask-in-dataloader", why="attention makes its causal mask itself"),
    CompatibleFlag(
        name="--no-position-embedding",
        why="with --position-embedding-type rope or none there is no position table",
    ),
    CompatibleFlag(name="--use-precision-aware-optimizer", why="--optimizer-cpu-offload implies it"),
    CompatibleFlag(name="--legacy-tokenizer", why="GPT-2's vocabulary files are read directly"),
    CompatibleFlag(name="--dataloader-type", values=("single",), why="one pass in a fixed random order"),
    CompatibleFlag(name="--ckpt-format", values=("torch_dist",), why="checkpoints have this form"),
    CompatibleFlag(name="--dist-ckpt-format", values=("torch_dist",), why="checkpoints have this form"),
    CompatibleFlag(name="--use-dist-ckpt", why="checkpoints have this form"),
    CompatibleFlag(name="--context-parallel-size", values=("1",), why="sequences are not split"),
    CompatibleFlag(name="--expert-model-parallel-size", values=("1",), why="there are no experts"),
    CompatibleFlag(
        name="--cross-entropy-fusion-impl",
        values=("native",),
        why="the fused cross entropy is Megatron Core's",
    ),
    CompatibleFlag(name="--no-overlap-p2p-communication", why="only interleaved schedules overlap it"),
    CompatibleFlag(name="--no-align-param-gather", why="stages gather weights independently"),
    CompatibleFlag(name="--num-dataset-builder-threads", values=("1",), why="datasets are built by one thread"),
    CompatibleFlag(name="--empty-unused-memory-level", values=("0",), why="memory is released at switches only"),
    CompatibleFlag(name="--timing-log-level", values=("0",), why="steps are timed, their parts are not"),
    CompatibleFlag(
        name="--tensorboard-queue-size",
        values=ANY_NUMBER,
        why="the queue length changes no event",
    ),
    CompatibleFlag(name="--log-throughput", why="tokens per second are always logged"),
    CompatibleFlag(name="--log-validation-ppl-to-tensorboard", why="the validation perplexity is always written"),
    CompatibleFlag(name="--log-memory-to-tensorboard", why="memory is always written"),
    CompatibleFlag(name="--no-one-logger", why="nothing is sent to NVIDIA's OneLogger"),
    CompatibleFlag(name="--no-async-tensor-model-parallel-allreduce", why="Megatron Core ignores it"),
)

INTERLEAVED = (
    "a pipeline stage holds consecutive layers; interleaved, every rank would hold a piece of the prefix and of the "
    "active block, and none could run forward only"
)
BASELINE = "the optimizer is Adam or SGD, on the device of the weights"
REFUSAL_REASONS = (
    ("--num-experts", "mixture of experts is not supported"),
    ("--num-moe-experts", "mixture of experts is not supported"),
    ("--moe-", "mixture of experts is not supported"),
    ("--expert-", "mixture of experts is not supported"),
    ("--num-layers-per-virtual-pipeline-stage", INTERLEAVED),
    ("--num-virtual-stages-per-pipeline-rank", INTERLEAVED),
    ("--virtual-pipeline-", INTERLEAVED),
    ("--microbatch-group-size-per-", INTERLEAVED),
    ("--num-layers-in-", "layers are divided evenly over the pipeline stages"),
    ("--decoder-first-pipeline-num-layers", "layers are divided evenly over the pipeline stages"),
    ("--decoder-last-pipeline-num-layers", "layers are divided evenly over the pipeline stages"),
    ("--pipeline-model-parallel-layout", "layers are divided evenly over the pipeline stages"),
    ("--account-for-", "layers are divided evenly over the pipeline stages"),
    ("--context-parallel", "sequences are not split over ranks"),
    ("--hierarchical-context-parallel", "sequences are not split over ranks"),
    ("--hybrid-context-parallel", "sequences are not split over ranks"),
    ("--cp-comm-type", "sequences are not split over ranks"),
    ("--fp32-residual-connection", "activations pass between stages in the run's precision"),
    ("--fp8", "training in 8 bits is not supported"),
    ("--fp4", "training in 4 bits is not supported"),
    ("--use-megatron-fsdp", "weights are not sharded; the optimizer state is"),
    ("--use-custom-fsdp", "weights are not sharded; the optimizer state is"),
    ("--use-torch-fsdp2", "weights are not sharded; the optimizer state is"),
    ("--data-parallel-sharding-strategy", "weights are not sharded; the optimizer state is"),
    ("--fsdp-", "weights are not sharded; the optimizer state is"),
    ("--no-save-", "a checkpoint holds everything that a run needs to resume"),
    ("--exit-signal", "SIGTERM and SIGUSR1 save and stop in any case"),
    ("--no-pin-cpu-params", "Megatron Core pins the host's weights in any case"),
    ("--cpu-offloading", "activations stay on the device"),
    ("--use-torch-optimizer-for-cpu-offload", BASELINE),
    ("--exp-avg-", "--adam-moments-dtype is the precision of both moments of Adam"),
    ("--muon-", BASELINE),
    ("--multi-latent-attention", "attention is plain or grouped-query"),
    ("--mtp-", "multi-token prediction is not supported"),
    ("--mamba-", "models are transformers"),
    ("--cuda-graph", "phases change the graph"),
    ("--enable-cuda-graph", "phases change the graph"),
    ("--external-cuda-graph", "phases change the graph"),
    ("--rl-", "reinforcement learning is not supported"),
    ("--inference-", "this trains only"),
    ("--retro-", "Retro is not supported"),
)
"""(how the flag starts, why it is refused); the first that fits."""
