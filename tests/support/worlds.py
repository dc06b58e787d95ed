"""Functions for the ranks of a `dist.World`: small runs, and what is recorded of them.

The ranks find everything here by name, so results are plain values, arrays and tensors.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import gc
import os
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import torch
from megatron.core import num_microbatches_calculator, parallel_state
from megatron.core.datasets.gpt_dataset import MockGPTLowLevelDataset
from torch.distributed import distributed_c10d

from megatron.bcd import trainer
from megatron.bcd.arguments import FAMILY_DEFAULTS, parse_run_config
from megatron.bcd.blocks import partition
from megatron.bcd.blocks.schedule import PhaseState
from megatron.bcd.checkpoint import loader
from megatron.bcd.config import RunConfig
from megatron.bcd.data.batches import TrainingSamples
from megatron.bcd.metrics.reporter import Reporter
from megatron.bcd.metrics.schema import EvalMetrics, StepMetrics
from megatron.bcd.model.builder import build_model, unwrap_model
from megatron.bcd.optim.active_block import ActiveBlock
from megatron.bcd.optim.core_optimizer import CoreOptimizer
from megatron.bcd.optim.param_shard import ALWAYS_ACTIVE, ParamShard
from megatron.bcd.optim.step import Step
from megatron.bcd.runtime import collectives, device, distributed, rng
from megatron.bcd.trainer import Trainer
from megatron.bcd.training.resolve import resolve_run
from megatron.bcd.training.state import StepResult
from support.activation_meter import ActivationMeter

MockGPTLowLevelDataset.size = 1000  # documents; to shuffle the samples of 100,000 took a third of a small run's time

PADDED_VOCABULARY = 264  # of 257 byte-level tokens, on one and on two tensor-parallel ranks
_SMALL_RUN: dict[str, object] = {
    "num_layers": 6,
    "hidden_size": 32,
    "num_attention_heads": 4,
    "seq_length": 32,
    "max_position_embeddings": 32,
    "global_batch_size": 4,
    "train_iters": 6,
    "lr": 1e-2,
    "hidden_dropout": 0,
    "attention_dropout": 0,
    "use_cpu_initialization": True,
    "tokenizer_type": "ByteLevelTokenizer",
    "split": "90,10,0",
    "num_workers": 0,
    "eval_iters": 0,
    "log_interval": 1,
    "bcd_num_blocks": 3,
    "bcd_steps_per_block": 1,
}

PIPELINE: dict[str, Any] = {"world_size": 2, "pipeline_model_parallel_size": 2}
CUTS: dict[str, dict[str, Any]] = {
    "one": {},
    "data2": {"world_size": 2},
    "tensor2": {"world_size": 2, "tensor_model_parallel_size": 2},
    "context2": {"world_size": 2, "context_parallel_size": 2},
    "pipeline2": PIPELINE,
    "stage": PIPELINE | {"bcd_layout": "stage", "bcd_num_blocks": None},
    "submodel": PIPELINE | {"bcd_layout": "submodel"},
    "pipeline2_data2": {"world_size": 4, "pipeline_model_parallel_size": 2},
}
"""Flags of a small run for a layout."""

EXPERTS: dict[str, Any] = {"num_experts": 4, "moe_ffn_hidden_size": 24, "disable_bias_linear": True, "swiglu": True}
EXPERTS |= {"moe_aux_loss_coeff": 0.1, "moe_z_loss_coeff": 0.01, "sequence_parallel": True}
"""Flags of a small run with experts: two of four for each token, and losses large enough to be seen."""
EXPERT2: dict[str, Any] = {"expert_model_parallel_size": 2, "use_cpu_initialization": False}
"""Two ranks have one half of the experts each."""
EXPERT_BIASES: dict[str, Any] = {"num_experts": 4, "moe_ffn_hidden_size": 24, "swiglu": True}
EXPERT_BIASES |= {"position_embedding_type": "rope", "normalization": "RMSNorm", "moe_aux_loss_coeff": 0.1}
EXPERT_BIASES |= {"untie_embeddings_and_output_weights": True, "group_query_attention": True, "num_query_groups": 2}
"""Flags of a small run whose routers and experts have biases."""
SHARED_EXPERT: dict[str, Any] = {"moe_shared_expert_intermediate_size": 16, "moe_shared_expert_gate": True}


def run_config(**flags: Any) -> RunConfig:
    """Return the configuration of a small run: the given flags, and small sizes for the rest.

    `world_size` is the number of ranks (default 1), `form` selects the script (default gpt). By default each rank has
    two microbatches.
    """
    values: dict[str, Any] = _SMALL_RUN | flags
    tensor_size = int(values.get("tensor_model_parallel_size", 1))
    data_size = values.get("world_size", 1) // tensor_size
    data_size //= values.get("pipeline_model_parallel_size", 1) * values.get("context_parallel_size", 1)
    values.setdefault("micro_batch_size", min(max(values["global_batch_size"] // (2 * data_size), 1), 2))
    values.setdefault("make_vocab_size_divisible_by", PADDED_VOCABULARY // tensor_size)
    return config_of(**values)


def config_of(*, world_size: int = 1, form: str = "gpt", **flags: object) -> RunConfig:
    """Parse the command line of `argv_of` for the script of that form."""
    return parse_run_config(argv_of(**flags), prog="test", defaults=FAMILY_DEFAULTS[form], world_size=world_size)


def argv_of(**flags: object) -> list[str]:
    """Return flags by field name as a command line. True is a switch; None and False are left out."""
    argv: list[str] = []
    for name, value in flags.items():
        if value is None or value is False:
            continue
        argv.append("--" + name.replace("_", "-"))
        if value is not True:
            argv += [str(word) for word in (value if isinstance(value, tuple | list) else (value,))]
    return argv


class Recorder(Reporter):
    """Keeps what a run reports, on every rank."""

    def __init__(self) -> None:
        self.steps: list[StepMetrics] = []
        self.evaluations: list[EvalMetrics] = []
        self.exchanges: list[Any] = []
        self.switches: list[int] = []
        self.notes: list[str] = []
        self.warnings: list[str] = []
        self.summary: Any = None

    def run_summary(self, summary: Any) -> None:
        self.summary = summary

    def step(self, record: StepMetrics) -> None:
        self.steps.append(record)

    def evaluation(self, record: EvalMetrics) -> None:
        self.evaluations.append(record)

    def exchange(self, **numbers: int) -> None:
        self.exchanges.append(numbers)

    def phase(self, **values: Any) -> None:
        self.switches.append(values["iteration"])

    def note(self, text: str) -> None:
        self.notes.append(text)

    def warning(self, text: str) -> None:
        self.warnings.append(text)

    def close(self) -> None:
        pass


Hook = Callable[["RecordedRun"], None]


class _HookedActiveBlock(ActiveBlock):
    """An ActiveBlock that calls the run's hooks."""

    def __init__(self, run: RecordedRun, **kwargs: Any) -> None:
        self._run = run
        super().__init__(**kwargs)

    def build(self, block: int) -> None:
        self._run.call("before_build")
        super().build(block)
        self._run.call("after_build")

    def dispose(self, **options: bool) -> None:
        super().dispose(**options)
        self._run.call("after_dispose")


class RecordedRun(Trainer):
    """A run that keeps every step's result and calls hooks; its first phase is already entered.

    Hooks by name: before_build, after_build, before_step, after_schedule (gradients are complete, the optimizer has not
    stepped), after_step, before_switch (also if the same block follows, but not at the end of the run), after_dispose.
    """

    wrapper: Callable[..., Any] | None = None
    """Wraps each call of `forward_backward`."""
    recorder: Recorder
    meters = False
    """Whether to count what autograd saves."""

    def __init__(self, config: RunConfig, **hooks: Hook) -> None:
        self.results: list[dict[str, Any]] = []
        self.saved_activation_bytes: list[tuple[int, ...]] = []
        """The peak of what autograd saves in each step, by rank, if `meters` is True and no layer is in host memory."""
        self.hooks = hooks
        self.recorder = Recorder()
        hooked = functools.partial(_HookedActiveBlock, self)
        with mock.patch.object(trainer, "ActiveBlock", hooked):
            super().__init__(resolve_run(config, loader.find(config)), build_model, reporter=self.recorder)
        self.restore()

    def forward_backward(
        self, batches: Any, num_microbatches: int, step: Step | None = None, **options: int
    ) -> list[dict[str, Any]]:
        inner = super().forward_backward
        call = inner if self.wrapper is None else functools.partial(self.wrapper, inner)
        # the meter would hold storages that layers in host memory replace between the passes
        is_metered = self.meters and step is not None and self.config.bcd.bcd_layers_on != "host"
        meter = ActivationMeter()
        with meter.measuring(self.model.parameters()) if is_metered else contextlib.nullcontext():
            reported: list[dict[str, Any]] = call(batches, num_microbatches, step, **options)
        if is_metered:
            peaks = collectives.gather_integers(meter.peak_bytes)
            self.saved_activation_bytes.append(tuple(peak for (peak,) in peaks))
        if step is not None:
            self.call("after_schedule")
        return reported

    def train_step(self, *args: Any, **kwargs: Any) -> StepResult:
        self.call("before_step")
        result = super().train_step(*args, **kwargs)
        phase_state = self.state.phase_state
        self.results.append(
            {
                "phase": phase_state.phase,
                "block": self.block,
                "step": phase_state.step_in_phase,
                "loss": result.loss,
                "grad_norm": result.grad_norm,
                "learning_rate": result.learning_rate,
                "loss_scale": self.active.core.loss_scale(),
            }
        )
        self.call("after_step")
        return result

    def switch_block(self, before: PhaseState) -> None:
        self.call("before_switch")
        super().switch_block(before)

    def build(self, block: int) -> None:
        self.active.build(block)
        self.pipeline.begin_phase(block)

    def call(self, name: str) -> None:
        if name in self.hooks:
            self.hooks[name](self)

    @property
    def iteration(self) -> int:
        return self.state.iteration

    @property
    def block(self) -> int:
        """The block that the schedule says is active."""
        return self.block_schedule.block(self.state.phase_state)


def stop_block(run: Trainer) -> None:
    """Set the learning rate of the block's parameters to 0 on this rank, in all later steps of the phase."""
    set_learning_rate = run.active.set_learning_rate

    def set_to_zero(scheduler: Any) -> None:
        set_learning_rate(scheduler)
        for group in (group for optimizer in run.active.optimizers for group in optimizer.param_groups):
            group["lr"] *= not group.get("is_of_block", not group.get(ALWAYS_ACTIVE))

    run.active.set_learning_rate = set_to_zero  # type: ignore[method-assign]


@contextlib.contextmanager
def parallel(config: RunConfig, *, freezes: bool = False) -> Iterator[None]:
    """Set up this rank's parallel groups and seeds as in `config`.

    Exempts imported modules from garbage collection, which otherwise takes a third of a small run's time. With
    `freezes` the run exempts its objects too, as it does outside tests.
    """
    _cut_world(config)
    rng.seed_everything(config.training.seed)
    gc.collect()  # what is left of the run before
    gc.freeze()
    try:
        with contextlib.nullcontext() if freezes else mock.patch.object(gc, "freeze"):
            yield
    finally:
        if freezes:
            gc.unfreeze()


def _cut_world(config: RunConfig) -> None:
    """Create parallel groups of these sizes, or reuse the existing ones if they have the same sizes."""
    torch.set_num_threads(1)
    num_microbatches_calculator.unset_num_microbatches_calculator()
    if parallel_state.model_parallel_is_initialized():
        torch.distributed.barrier()
        sizes = (
            parallel_state.get_tensor_model_parallel_world_size(),
            parallel_state.get_pipeline_model_parallel_world_size(),
            parallel_state.get_context_parallel_world_size(),
            parallel_state.get_expert_model_parallel_world_size(),
            parallel_state.get_expert_tensor_parallel_world_size(),
        )
        experts = config.expert_size, config.expert_tensor_size
        if sizes == (config.tensor_size, config.pipeline_size, config.context_size, *experts):
            return
        parallel_state.destroy_model_parallel()
        for group in [group for group in distributed_c10d._world.pg_map if group != torch.distributed.group.WORLD]:
            torch.distributed.destroy_process_group(group)
    distributed.initialize(
        backend=os.environ.get("BCD_TEST_BACKEND", "gloo"),
        timeout_minutes=2,
        tensor_size=config.tensor_size,
        pipeline_size=config.pipeline_size,
        context_size=config.context_size,
        expert_size=config.expert_size,
        expert_tensor_size=config.expert_tensor_size,
    )


@contextlib.contextmanager
def started(config: RunConfig, *, freezes: bool = False, **hooks: Hook) -> Iterator[RecordedRun]:
    """Start a run on this rank with its first block active; `freezes` as in `parallel`."""
    with parallel(config, freezes=freezes):
        yield RecordedRun(config, **hooks)
        device.synchronize()  # a run that ends inside a phase has copies under way


def first_batches(run: Trainer) -> Iterator[Any]:
    """Return this rank's microbatches from the first sample on, read separately from the run's own."""
    samples = TrainingSamples(run.config, dataset=run.samples.dataset, epoch_samples=run.samples.epoch_samples)
    return samples.batches(phase=0, consumed_samples=0, position=0)


def train_run(config: RunConfig, *, blocks_of_stages: int | None = None) -> dict[str, Any]:
    """Train; return per-step results, evaluations and metrics of this rank, and its last weights.

    With `blocks_of_stages` one pipeline stage uses the blocks that this number of stages would form.
    """
    with blocks_as_of(blocks_of_stages), started(config) as run:
        run.train()
        return outcome(run)


@contextlib.contextmanager
def blocks_as_of(num_stages: int | None) -> Iterator[None]:
    """Make runs on one stage form the blocks of `num_stages` stages: the same layers, all on stage 0."""
    original = partition.partition

    def on_one_stage(**arguments: Any) -> partition.Partition:
        assert arguments["num_stages"] == 1
        stages = {"num_stages": num_stages} | ({"num_blocks": None} if arguments["layout"] == "stage" else {})
        cut = original(**(arguments | stages | {"layers_per_stage": None}))
        return dataclasses.replace(cut, num_stages=1, virtual_stages=(range(cut.num_layers),))

    if num_stages is not None:
        partition.partition = on_one_stage
    try:
        yield
    finally:
        partition.partition = original


def outcome(run: RecordedRun) -> dict[str, Any]:
    """Return the values that are compared between runs."""
    return {
        "steps": run.results,
        "losses": [step["loss"] for step in run.results],
        "grad_norms": [step["grad_norm"] for step in run.results],
        "blocks": [step["block"] for step in run.results],
        "metrics": [
            {
                "iteration": record.iteration,
                "consumed_samples": record.consumed_samples,
                "loss": record.loss,
                "grad_norm": record.grad_norm,
                "learning_rate": record.learning_rate,
                "step_learning_rate": record.step_learning_rate,
                "global_batch_size": record.global_batch_size,
                "params_norm": record.params_norm,
                "router_losses": record.router_losses,
                "num_zeros": record.num_zeros,
            }
            for record in run.recorder.steps
        ],
        "evaluations": [(record.iteration, record.split, record.loss) for record in run.recorder.evaluations],
        "model_state_bytes": [record.model_state_bytes for record in run.recorder.steps],
        "switches": run.recorder.switches,
        "weights": weights_of(run.model),
    }


def weights_of(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    """Return host copies of this rank's parameters, by GPTModel's names."""
    return {name: parameter.detach().to("cpu", copy=True) for name, parameter in unwrap_model(model).named_parameters()}


def initial_weights(config: RunConfig) -> dict[str, torch.Tensor]:
    """Return `weights_of` the model before its first step."""
    with started(config) as run:
        return weights_of(run.model)


def logits_of(config: RunConfig, tokens: torch.Tensor) -> torch.Tensor:
    """Return [B, S, V] of a whole model on one rank before its first step."""
    with started(config) as run, torch.no_grad():
        tokens = tokens.to(device.current())
        positions = torch.arange(tokens.size(1), device=tokens.device).expand_as(tokens)
        logits: torch.Tensor = unwrap_model(run.model).eval()(tokens, positions, None)
        return logits.cpu()


def masters_of(run: RecordedRun) -> list[torch.Tensor]:
    """Return the tensors that this rank's PyTorch optimizer steps."""
    return [
        main_param
        for optimizer in run.active.core.optimizer.chained_optimizers  # type: ignore[union-attr]
        if optimizer.optimizer is not None
        for group in optimizer.optimizer.param_groups
        for main_param in group["params"]
        if main_param.numel()
    ]


def save_initial_weights(config: RunConfig, folder: str) -> None:
    """Draw the weights of `config` and write a checkpoint that any layout can load."""
    with started(dataclasses.replace(config, checkpoint=dataclasses.replace(config.checkpoint, save=folder))) as run:
        assert run.outputs.save()


def block_shards(core: CoreOptimizer) -> dict[str, ParamShard]:
    """Return this rank's optimizer state of the active block's parameters, by name."""
    return {name: shard for name, shard in core.shards.items() if name in core.block_parameters}


def same_bits(left: dict[str, torch.Tensor], right: dict[str, torch.Tensor]) -> list[str]:
    """Return the names whose tensors differ in any bit (NaN equals itself)."""
    assert left.keys() == right.keys()
    return [name for name in left if left[name].view(torch.uint8).ne(right[name].view(torch.uint8)).any()]
