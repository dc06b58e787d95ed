"""Flags of stock Megatron-LM that set nothing here: some request what is done anyway, some are accepted without effect,
the rest are refused."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class CompatibleFlag:
    """A stock flag that is accepted and changes no result."""

    name: str
    why: str
    values: tuple[str, ...] = ()
    """The only values for which that is true; () for a switch."""
    is_dropped: bool = False
    """Whether something that the flag asks for (speed, a log, a file format) is left out: the banner names it."""
    otherwise: str = ""
    """Why any other value is refused, and what to do instead."""


ANY_NUMBER = ("N",)
"""Value list of a CompatibleFlag whose number makes no difference here."""
ANY_TEXT = ("TEXT",)
"""Value list of a CompatibleFlag whose text makes no difference here."""

INTERLEAVED = "the chunks of an interleaved pipeline are given by --num-virtual-stages-per-pipeline-rank alone"
MAIN_PARAMS = (
    "main parameters have the precision of fp32: give that; --use-precision-aware-optimizer holds them in 2 bytes too"
)
SIGNALS = "Ctrl-C, SIGTERM and SIGUSR1 save and stop in any case"
EXPERTS = "mixture of experts is not supported: only dense models train here"

ANYWAY_FLAGS = (
    CompatibleFlag(name="--use-mcore-models", why="models are always Megatron Core's"),
    CompatibleFlag(name="--use-flash-attn", why="a flash kernel is taken where there is one"),
    CompatibleFlag(name="--no-create-attention-mask-in-dataloader", why="attention makes its causal mask itself"),
    CompatibleFlag(
        name="--no-position-embedding",
        why="with --position-embedding-type rope or none there is no position table",
    ),
    CompatibleFlag(name="--main-params-dtype", values=("fp32",), why="it is so anyway", otherwise=MAIN_PARAMS),
    CompatibleFlag(name="--legacy-tokenizer", why="GPT-2's vocabulary files are read directly"),
    CompatibleFlag(name="--use-dist-ckpt", why="checkpoints have this form"),
    CompatibleFlag(
        name="--cross-entropy-fusion-impl",
        values=("native",),
        why="the fused cross entropy is Megatron Core's",
    ),
    CompatibleFlag(
        name="--no-overlap-p2p-communication",
        why="it changes no result",
    ),
    CompatibleFlag(name="--no-align-param-gather", why="stages gather weights independently"),
    CompatibleFlag(
        name="--tensorboard-queue-size",
        values=ANY_NUMBER,
        why="the queue length changes no event",
    ),
    CompatibleFlag(name="--log-validation-ppl-to-tensorboard", why="the validation perplexity is always written"),
    CompatibleFlag(name="--log-memory-to-tensorboard", why="memory is always written"),
    CompatibleFlag(name="--log-learning-rate-to-tensorboard", why="it is always written"),
    CompatibleFlag(name="--log-batch-size-to-tensorboard", why="it is always written"),
    CompatibleFlag(name="--log-loss-scale-to-tensorboard", why="it is always written"),
    CompatibleFlag(name="--exit-signal-handler", why=SIGNALS),
    CompatibleFlag(name="--exit-signal-handler-for-dataloader", why=SIGNALS),
    CompatibleFlag(
        name="--exit-signal",
        values=("SIGTERM", "SIGINT", "SIGUSR1"),
        why=SIGNALS,
        otherwise=SIGNALS,
    ),
    CompatibleFlag(name="--auto-detect-ckpt-format", why="checkpoints are torch_dist, and others refused"),
    CompatibleFlag(
        name="--rotary-seq-len-interpolation-factor",
        values=("1",),
        why="positions are not interpolated",
        otherwise="positions are not interpolated; --use-rope-scaling is Llama 3.1's way",
    ),
    CompatibleFlag(
        name="--error-injection-rate",
        values=("0",),
        why="faults are not injected",
        otherwise="faults are not injected: leave the flag out",
    ),
    CompatibleFlag(name="--DDP-impl", values=("local", "torch"), why="of older Megatron-LM"),
    CompatibleFlag(name="--no-one-logger", why="nothing is sent to NVIDIA's OneLogger"),
    CompatibleFlag(name="--no-async-tensor-model-parallel-allreduce", why="Megatron Core ignores it"),
    CompatibleFlag(
        name="--ckpt-format",
        values=("torch_dist", "torch"),
        why="checkpoints are torch_dist",
        otherwise="checkpoints are torch_dist: give that, or leave the flag out",
    ),
    CompatibleFlag(name="--dist-ckpt-format", values=("torch_dist", "zarr"), why="checkpoints are torch_dist"),
    CompatibleFlag(name="--expert-model-parallel-size", values=("1",), why="there are no experts", otherwise=EXPERTS),
    CompatibleFlag(name="--expert-tensor-parallel-size", values=ANY_NUMBER, why="there are no experts"),
    CompatibleFlag(
        name="--rerun-mode",
        values=("disabled", "validate_results"),
        why="a step whose loss or gradient is not finite is skipped, not run again",
        otherwise="steps are not run again: give disabled",
    ),
    CompatibleFlag(
        name="--data-impl",
        values=("mmap",),
        why="of older Megatron-LM",
        otherwise="datasets are .bin and .idx: give mmap",
    ),
    CompatibleFlag(name="--override-opt_param-scheduler", why="the schedule is that of the flags, also after --load"),
    CompatibleFlag(name="--override-opt-param-scheduler", why="the schedule is that of the flags, also after --load"),
    CompatibleFlag(
        name="--dist-ckpt-strictness",
        values=(
            "assume_ok_unexpected",
            "log_unexpected",
            "log_all",
            "raise_unexpected",
            "raise_all",
            "return_unexpected",
            "return_all",
            "ignore_all",
        ),
        why="a checkpoint that does not fit the model is always refused",
    ),
    CompatibleFlag(name="--dist-ckpt-optim-fully-reshardable", why="checkpoints fit every parallel layout"),
)

DROPPED_FLAGS = (
    *(
        CompatibleFlag(name=name, values=values, why=why, is_dropped=True)
        for why, flags in (
            (
                "this log is not written",
                {
                    "--log-world-size-to-tensorboard": (),
                    "--log-energy": (),
                    "--log-device-memory-used": (),
                    "--log-memory-interval": ANY_NUMBER,
                    "--logging-level": ANY_NUMBER,
                },
            ),
            (
                "--log-straggler logs from the start on; there is no server that switches it",
                {"--disable-straggler-on-startup": (), "--straggler-ctrlr-port": ANY_NUMBER},
            ),
            (
                "memory is not recorded over time",
                {
                    "--record-memory-history": (),
                    "--memory-snapshot-path": ANY_TEXT,
                },
            ),
            (
                "communication is not overlapped or ordered in this way; results are the same",
                {
                    "--microbatch-group-size-per-virtual-pipeline-stage": ANY_NUMBER,
                    "--defer-embedding-wgrad-compute": (),
                    "--wgrad-deferral-limit": ANY_NUMBER,
                    "--overlap-p2p-communication-warmup-flush": (),
                    "--tp-comm-overlap": (),
                    "--tp-comm-overlap-cfg": ANY_TEXT,
                    "--use-tp-pp-dp-mapping": (),
                    "--use-ring-exchange-p2p": (),
                    "--use-sharp": (),
                    "--nccl-communicator-config-path": ANY_TEXT,
                    "--disable-gloo-process-groups": (),
                    "--no-scatter-gather-tensors-in-pipeline": (),
                },
            ),
            (
                "the optimizer state is sharded over all data-parallel ranks",
                {"--num-distributed-optimizer-instances": ANY_NUMBER},
            ),
            ("datasets are built by one thread", {"--num-dataset-builder-threads": ANY_NUMBER}),
            (
                "checkpoints are written and read in one way",
                {
                    "--ckpt-fully-parallel-save": (),
                    "--no-ckpt-fully-parallel-save": (),
                    "--ckpt-fully-parallel-load": (),
                    "--ckpt-assume-constant-structure": (),
                    "--use-persistent-ckpt-worker": (),
                },
            ),
        )
        for name, values in flags.items()
    ),
)
COMPATIBLE_FLAGS = (*ANYWAY_FLAGS, *DROPPED_FLAGS)

REFUSAL_REASONS = (
    ("--num-experts", EXPERTS),
    ("--num-moe-experts", EXPERTS),
    ("--moe-", EXPERTS),
    ("--expert-", EXPERTS),
    ("--virtual-pipeline-", INTERLEAVED),
    ("--num-layers-in-", "give --decoder-first-pipeline-num-layers or --decoder-last-pipeline-num-layers"),
    ("--hybrid-context-parallel", "sequences have one length: give --context-parallel-size alone"),
    ("--fp32-residual-connection", "activations pass between stages in the run's precision"),
    ("--fp8", "training in 8 bits is not supported"),
    ("--fp4", "training in 4 bits is not supported"),
    ("--use-megatron-fsdp", "weights are not sharded; the optimizer state is"),
    ("--use-custom-fsdp", "weights are not sharded; the optimizer state is"),
    ("--use-torch-fsdp2", "weights are not sharded; the optimizer state is"),
    ("--data-parallel-sharding-strategy", "weights are not sharded; the optimizer state is"),
    ("--fsdp-", "weights are not sharded; the optimizer state is"),
    ("--no-pin-cpu-params", "Megatron Core pins the host's weights in any case"),
    ("--cpu-offloading", "activations stay on the device"),
    ("--use-torch-optimizer-for-cpu-offload", "--optimizer-cpu-offload takes Megatron Core's own choice of optimizer"),
    ("--muon-", "not an option of Muon here"),
    ("--multi-latent-attention", "attention is plain or grouped-query"),
    ("--mtp-", "multi-token prediction is not supported"),
    ("--mamba-", "models are transformers"),
    ("--cuda-graph", "phases change the graph"),
    ("--enable-cuda-graph", "phases change the graph"),
    ("--external-cuda-graph", "phases change the graph"),
    ("--rl-", "reinforcement learning is not supported"),
    ("--inference-", "this trains only"),
    ("--retro-", "Retro is not supported"),
    ("--hybrid-", "models are transformers with the same layers throughout"),
    ("--is-hybrid-model", "models are transformers with the same layers throughout"),
    ("--heterogeneous-", "models are transformers with the same layers throughout"),
    ("--spec", "models are transformers with the same layers throughout"),
    ("--linear-", "attention is plain or grouped-query"),
    ("--experimental-attention-variant", "attention is plain or grouped-query"),
    ("--attention-output-gate", "attention is plain or grouped-query"),
    ("--window-", "attention is plain or grouped-query"),
    ("--softmax-type", "attention is plain or grouped-query"),
    ("--dsa-", "attention is plain or grouped-query"),
    ("--q-lora-rank", "multi-latent attention is not supported"),
    ("--kv-lora-rank", "multi-latent attention is not supported"),
    ("--qk-head-dim", "multi-latent attention is not supported"),
    ("--qk-pos-emb-head-dim", "multi-latent attention is not supported"),
    ("--v-head-dim", "multi-latent attention is not supported"),
    ("--mscale", "multi-latent attention is not supported"),
    ("--cache-mla-latents", "multi-latent attention is not supported"),
    ("--qk-l2-norm", "queries and keys are normalised by --qk-layernorm only"),
    ("--qk-clip", "attention scores are not clipped; --qk-layernorm bounds them"),
    ("--rope-", "rotary positions are scaled as --use-rope-scaling --rope-scaling-factor say"),
    ("--rotary-scaling-factor", "give --use-rope-scaling --rope-scaling-factor"),
    ("--no-rope-freq", "every layer has the same positions"),
    ("--mrope-section", "models read text only"),
    ("--relative-attention-", "positions are learned or rotary: --position-embedding-type"),
    ("--use-fused-weighted-squared-relu", "the activation is --swiglu, --quick-geglu, --squared-relu, or GELU"),
    ("--activation-func-clamp-value", "the activation is --swiglu, --quick-geglu, --squared-relu, or GELU"),
    ("--glu-linear-offset", "the activation is --swiglu, --quick-geglu, --squared-relu, or GELU"),
    ("--init-method-xavier-uniform", "weights are drawn from a normal distribution: --init-method-std"),
    ("--use-te-activation-func", "the activation is Megatron Core's"),
    ("--use-mp-args-from-checkpoint-args", "give the parallel sizes; checkpoints fit every parallel layout"),
    ("--use-tokenizer-model-from-checkpoint-args", "give --tokenizer-model"),
    ("--non-persistent-", "there is one kind of checkpoint: --save with --save-interval, --async-save"),
    ("--ckpt-convert-", "checkpoints are torch_dist only"),
    ("--load-main-params-from-ckpt", "main parameters come with the optimizer state of --load"),
    ("--pretrained-checkpoint", "give --load with --finetune"),
    ("--bert-", "models are decoders for text"),
    ("--ict-", "models are decoders for text"),
    ("--biencoder-", "models are decoders for text"),
    ("--retriever-", "models are decoders for text"),
    ("--vision-", "models are decoders for text"),
    ("--dino-", "models are decoders for text"),
    ("--img-", "models are decoders for text"),
    ("--mask-", "models are decoders for text"),
    ("--encoder-", "models are decoders: give the flag without encoder-"),
    ("--decoder-num-layers", "give --num-layers"),
    ("--decoder-seq-length", "give --seq-length"),
    ("--decoder-", "there is only a decoder"),
    ("--vocab-extra-ids", "the tokenizer's vocabulary is taken as it is"),
    ("--padded-vocab-size", "the vocabulary is padded by --make-vocab-size-divisible-by"),
    ("--tokenizer-", "tokenizers are set by --tokenizer-type, --tokenizer-model, --vocab-file and --merge-file only"),
    ("--tiktoken-special-tokens", "its special tokens are <unk>, <s>, </s>, <mask>, <pad>, <cls> and <sep>"),
    ("--trust-remote-code", "a tokenizer's own code is never run"),
    ("--fim-", "fill-in-the-middle samples are not made: prepare the data so"),
    ("--sft-tokenizer-prompt-format", "records take the form of the tokenizer's chat template: --sft-prompt-format"),
    ("--finetune-", "records are read from local files: --sft with --data-path"),
    ("--per-dataset-sequences-path", "weights of datasets are given before their paths in --data-path"),
    ("--object-storage-cache-path", "data are local files"),
    ("--multiple-validation-sets", "there is one validation split"),
    ("--iterations-to-skip", "a step whose loss or gradient is not finite is skipped anyway"),
    ("--phase-transition-iterations", "phases are those of --bcd-*: --bcd-steps-per-block"),
    ("--decrease-batch-size-if-needed", "give a --global-batch-size that fits the ranks"),
    ("--error-injection-", "faults are not injected: leave the flag out"),
    ("--check-for-", "a step whose loss or gradient is not finite is skipped; nothing else is checked"),
    ("--yaml-cfg", "give --config, a YAML file of flags"),
    ("--inprocess-", "start again with torchrun --max-restarts: a run resumes from --save"),
    ("--enable-ft-package", "start again with torchrun --max-restarts: a run resumes from --save"),
    ("--ft-", "start again with torchrun --max-restarts: a run resumes from --save"),
    ("--adlr-", "start again with torchrun --max-restarts: a run resumes from --save"),
    ("--export-", "models are not exported here"),
    ("--modelopt-", "models are not exported here"),
    ("--kitchen-", "training in 8 bits is not supported"),
    ("--use-kitchen-", "training in 8 bits is not supported"),
    ("--first-last-layers-bf16", "training in 8 bits is not supported"),
    ("--num-layers-at-", "training in 8 bits is not supported"),
    ("--te-precision-config-file", "training in 8 bits is not supported"),
    ("--te-rng-tracker", "it changes the random numbers: leave the flag out"),
    ("--inference-rng-tracker", "it changes the random numbers: leave the flag out"),
    ("--fp16-lm-cross-entropy", "the loss is computed in fp32"),
    ("--use-legacy-models", "models are Megatron Core's: leave the flag out"),
    ("--recompute-", "layers are recomputed as --recompute-granularity says"),
    ("--offload-modules", "activations stay on the device: give --recompute-activations"),
    ("--fine-grained-activation-offloading", "activations stay on the device: give --recompute-activations"),
    ("--overlap-moe-", EXPERTS),
    ("--outer-dp-sharding-strategy", "weights are not sharded; the optimizer state is"),
    ("--enable-full-sharding-in-hsdp", "weights are not sharded; the optimizer state is"),
    ("--torch-fsdp2-", "weights are not sharded; the optimizer state is"),
    ("--grpo-", "reinforcement learning is not supported"),
    ("--langrl-", "reinforcement learning is not supported"),
    ("--perform-rl-step", "reinforcement learning is not supported"),
    ("--tp-comm-", "tensor-parallel communication is not overlapped by Transformer Engine: leave the flag out"),
    ("--dist-ckpt-save-pre-mcore-014", "checkpoints are torch_dist as Megatron Core writes them now"),
    ("--log-max-attention-logit", "attention scores are not recorded: leave the flag out"),
    ("--num-classes", "models are decoders for text"),
    ("--num-channels", "models are decoders for text"),
    ("--patch-dim", "models are decoders for text"),
    ("--no-weight-decay-cond-type", "weight decay applies to matrices only; --apply-wd-to-qk-layernorm adds norms"),
    ("--head-lr-mult", "give --decoupled-lr"),
    ("--params-dtype", "give --bf16 or --fp16"),
    ("--pipeline-dtype", "give --bf16 or --fp16"),
    ("--autocast-dtype", "give --bf16 or --fp16"),
    ("--one-logger", "nothing is sent to NVIDIA's OneLogger"),
)
"""(how the flag starts, why it is refused); the first that fits."""
