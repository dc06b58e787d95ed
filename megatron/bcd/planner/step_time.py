"""Iteration time: a roofline per layer, the simulated pipeline, the optimizer step, the reductions.

A layer takes the time of its matrix products at the achieved share of the peak, plus the time of its element-wise
work at the achieved share of the memory bandwidth. What a layer saves for its backward pass is written and read once
in the forward pass, and once more for each gradient.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass, replace

from megatron.bcd.pipeline.build import build_plan
from megatron.bcd.pipeline.plan import Kind, PlanShape
from megatron.bcd.pipeline.simulate import ActionCosts, simulate
from megatron.bcd.planner.cost import adapter_products, pass_products
from megatron.bcd.planner.memory import recomputation, schedule_shape
from megatron.bcd.planner.recipe import Recipe
from megatron.bcd.planner.state import MatrixShare

_ADAM_PASSES = 11
"""4-byte elements read or written per parameter in one step: the gradient for norm, clipping (2), step and zeroing,
the weight (2), both moments (4)."""
_SIMULATED_BLOCKS = 5
_SIMULATED_ROUNDS = 3
"""Microbatches simulated, in multiples of the stages; the rest are extrapolated."""


@dataclass(frozen=True, kw_only=True)
class PhaseTime:
    """Seconds of one iteration in the phase of a block."""

    block: int
    pipeline: float  # forward and backward of all microbatches, bubbles included
    optimizer: float  # the slowest rank's step, orthogonalisation included
    orthogonalization: float  # matrix products of this step
    reductions: float  # of gradients and weights: reduce-scatter and all-gather; for matrices with an owner, whole
    bubble: float  # share of the pipeline's time in which stages are idle, over all stages

    @property
    def total(self) -> float:
        return self.pipeline + self.optimizer + self.reductions


@dataclass(frozen=True, kw_only=True)
class PassCost:
    """Work of one microbatch in one pass (forward, input gradient or weight gradient) of a layer or the head."""

    flops: float
    traffic: float  # bytes of element-wise work

    def seconds(self, recipe: Recipe) -> float:
        cluster = recipe.cluster
        return self.flops / cluster.flops_per_s(recipe.precision) + self.traffic / cluster.bytes_per_s


def layer_pass(recipe: Recipe) -> PassCost:
    """One pass of one transformer layer."""
    products = sum(pass_products(recipe.shape, sequence=recipe.tokens))
    return PassCost(flops=2 * recipe.micro_batch_tokens * products, traffic=2 * recipe.layer_bytes.active)


def core_pass(recipe: Recipe) -> PassCost:
    """The core of attention in one forward pass of a layer."""
    _, core = pass_products(recipe.shape, sequence=recipe.tokens)
    return PassCost(flops=2 * recipe.micro_batch_tokens * core, traffic=2 * recipe.layer_bytes.suffix_core)


def head_pass(recipe: Recipe) -> PassCost:
    """One pass of the output head and the loss."""
    elements = recipe.micro_batch_tokens * recipe.padded_vocabulary
    return PassCost(flops=2 * elements * recipe.shape.hidden_size, traffic=8 * elements)


def pass_seconds(recipe: Recipe) -> tuple[float, float, float, float]:
    """Of a layer, of its adapters, of the head, and of the core of attention."""
    adapters = PassCost(flops=2 * recipe.micro_batch_tokens * adapter_products(recipe.shape), traffic=0)
    layer, head, core = (each(recipe).seconds(recipe) for each in (layer_pass, head_pass, core_pass))
    return layer, adapters.seconds(recipe), head, core


def phase_seconds(recipe: Recipe, block: int, *, is_rough: bool = False) -> PhaseTime:
    """An iteration in the middle of the block's phase.

    ``is_rough`` replaces the simulation by fill, drain and the slowest stage: fast, and exact for balanced stages.
    """
    shape = schedule_shape(recipe, block)
    costs = _costs(recipe, shape, block)
    pipeline, bubble = _rough_seconds(shape, costs) if is_rough else _pipeline_seconds(shape, costs)
    buffers = [by_block[block] for by_block in recipe.state.buffers]
    ranks = [
        (_step_seconds(recipe, held, share := recipe.state.share(stage, block, rank)), share)
        for stage, buffer in enumerate(buffers)
        for rank, held in enumerate(buffer.held)
    ]
    step, slowest = max(ranks, key=lambda rank: rank[0])
    return PhaseTime(
        block=block,
        pipeline=pipeline,
        optimizer=step,
        orthogonalization=_orthogonalization_seconds(recipe, slowest),
        reductions=max(
            _reduction_seconds(recipe, buffer.size, recipe.state.share(stage, block, 0).messages)
            for stage, buffer in enumerate(buffers)
        ),
        bubble=bubble,
    )


def cycle_seconds(recipe: Recipe) -> tuple[PhaseTime, ...]:
    """One iteration in the phase of every block.

    At most _SIMULATED_BLOCKS blocks are simulated, evenly spaced. The rough time of the others is corrected by the
    factor of the nearest simulated one.
    """
    blocks = range(recipe.partition.num_blocks)
    if len(blocks) <= _SIMULATED_BLOCKS:
        return tuple(phase_seconds(recipe, block) for block in blocks)
    chosen = [index * (len(blocks) - 1) // (_SIMULATED_BLOCKS - 1) for index in range(_SIMULATED_BLOCKS)]
    simulated = {block: phase_seconds(recipe, block) for block in chosen}
    rough = [phase_seconds(recipe, block, is_rough=True) for block in blocks]
    phases = []
    for phase in rough:
        nearest = min(chosen, key=lambda block: abs(block - phase.block))
        factor = simulated[nearest].pipeline / rough[nearest].pipeline
        corrected = replace(phase, pipeline=factor * phase.pipeline, bubble=1 - (1 - phase.bubble) / factor)
        phases.append(simulated.get(phase.block, corrected))
    return tuple(phases)


def mean_seconds(recipe: Recipe, *, is_rough: bool = False) -> float:
    """Mean iteration time of a cycle, each phase as `phase_seconds` says: every block has the same number of steps."""
    blocks = range(recipe.partition.num_blocks)
    return sum(phase_seconds(recipe, each, is_rough=is_rough).total for each in blocks) / len(blocks)


def _costs(recipe: Recipe, shape: PlanShape, block: int) -> ActionCosts:
    partition, choices = recipe.partition, recomputation(recipe)
    layer, adapter, head, core = pass_seconds(recipe)
    unhidden = functools.partial(_unhidden_seconds, recipe, block)
    exchange = exchange_seconds(recipe)
    forward, backward = [], []
    for virtual in range(partition.num_virtual_stages):
        chunk, stage = divmod(virtual, partition.num_stages)
        layers = partition.chunk_layers(stage, chunk)
        num_layers, num_inputs = len(layers), len(partition.behind_prefix[virtual][block])
        num_updated = sum(partition.trains_matrices(each, block) for each in layers)
        choice = choices[stage][block]
        recomputed = choice.num_whole(chunk)
        forward.append(num_layers * (layer + adapter + exchange) + unhidden(virtual, layer + exchange))
        backward.append((num_inputs + num_updated + recomputed) * layer + (num_inputs + recomputed) * exchange)
        backward[-1] += (2 * num_inputs + recomputed) * adapter
        of_layers = (layer + exchange) * (1 + recomputed / max(1, num_inputs))
        backward[-1] += unhidden(virtual, of_layers, num_last=num_inputs)
        if choice.granularity == "selective":
            backward[-1] += num_inputs * core
        if virtual == shape.last:
            of_forward, of_backward = passes_of_head(recipe, block)
            forward[-1] += of_forward * head
            backward[-1] += of_backward * head
    return ActionCosts(forward=forward, backward=backward, backward_input=backward, message=_message_seconds(recipe))


def passes_of_head(recipe: Recipe, block: int) -> tuple[int, int]:
    """In a microbatch's forward and backward pass. A linear loss computes the gradient of its input with the loss, and
    logits again for the weight's."""
    is_active = recipe.partition.head_active(block)
    return (2, 2 * is_active) if recipe.has_linear_loss else (1, 1 + is_active)


def _unhidden_seconds(
    recipe: Recipe, block: int, virtual: int, computing: float, *, num_last: int | None = None
) -> float:
    """What copies of streamed layers add to a pass, each of which computes for so long while the next one is copied;
    `num_last`: of a pass that reads the last layers of the virtual stage only."""
    if not recipe.is_streamed:
        return 0.0
    chunk, stage = divmod(virtual, recipe.partition.num_stages)
    first = sum(len(recipe.partition.chunk_layers(stage, before)) for before in range(chunk))
    last = first + len(recipe.partition.chunk_layers(stage, chunk))
    read = range(first if num_last is None else last - num_last, last)
    copies = len(streamed_layers(recipe, stage, block).intersection(read))
    return copies * max(0.0, copy_seconds(recipe, stage) - computing)


def streamed_layers(recipe: Recipe, stage: int, block: int) -> set[int]:
    """Of a stage whose frozen layers lie in host memory: those that are copied in the block's phase."""
    frozen = [index for index, is_active in enumerate(recipe.state.streamed[stage].is_active[block]) if not is_active]
    return set(frozen[: len(frozen) - (recipe.resident_layers or 0)])


def copy_seconds(recipe: Recipe, stage: int) -> float:
    """Of one layer to the device."""
    return recipe.bytes_per_element * recipe.state.streamed[stage].padded / (1e9 * recipe.cluster.copy_gb_per_s)


def _group_speed(recipe: Recipe, ranks: int) -> float:
    """Bytes per second between ranks of one stage, which are neighbours."""
    cluster = recipe.cluster
    return 1e9 * (cluster.link_gb_per_s if ranks <= recipe.gpus_per_node else cluster.network_gb_per_s)


def exchange_seconds(recipe: Recipe) -> float:
    """Gathering keys and values of one layer over context-parallel ranks, or scattering their gradients; not
    overlapped."""
    ranks = recipe.context_size
    size = 2 * recipe.tokens * recipe.micro_batch_size * recipe.shape.key_value_size * recipe.bytes_per_element
    return size * (ranks - 1) / ranks / _group_speed(recipe, ranks)


def _message_seconds(recipe: Recipe) -> float:
    """Mean over the pipeline's links: exact if messages follow one another. Between chunks the last stage has a link to
    the first one."""
    if recipe.pipeline_size == 1:
        return 0.0
    cluster, num_links = recipe.cluster, recipe.pipeline_size - (recipe.partition.num_chunks == 1)
    # ranks of one stage are neighbours, so a stage starts every num_replicas ranks
    nodes = [stage * recipe.num_replicas // recipe.gpus_per_node for stage in range(recipe.pipeline_size)]
    between = sum(nodes[stage] != nodes[(stage + 1) % recipe.pipeline_size] for stage in range(num_links))
    # all ranks of a stage on a node send at once
    network = cluster.network_gb_per_s / min(recipe.num_replicas, recipe.gpus_per_node)
    speeds = [network] * between + [cluster.link_gb_per_s] * (num_links - between)
    return recipe.layer_bytes.input * sum(1 / (1e9 * speed) for speed in speeds) / num_links


def _pipeline_seconds(shape: PlanShape, costs: ActionCosts) -> tuple[float, float]:
    """Time and bubble; of many microbatches the first are simulated, the rest continue at the same pace."""
    simulated = _with_microbatches(shape, min(shape.num_microbatches, _SIMULATED_ROUNDS * shape.num_stages))
    timeline = simulate(build_plan(simulated), costs)
    more = (shape.num_microbatches - simulated.num_microbatches) / simulated.num_microbatches
    if not more:
        return timeline.iteration_time, timeline.bubble
    fewer = simulate(build_plan(_with_microbatches(shape, simulated.num_microbatches - shape.num_stages)), costs)
    slope = (timeline.iteration_time - fewer.iteration_time) / shape.num_stages
    total = timeline.iteration_time + more * simulated.num_microbatches * slope
    return total, 1 - sum(timeline.busy_times) * (1 + more) / (total * shape.num_stages)


def _with_microbatches(shape: PlanShape, number: int) -> PlanShape:
    ahead = min(shape.run_ahead, number)
    return replace(shape, num_microbatches=number, done_ahead=ahead, run_ahead=ahead)


def _rough_seconds(shape: PlanShape, costs: ActionCosts) -> tuple[float, float]:
    """Time and bubble without a simulation. Every stage from the first trainable one once, and the slowest stage for
    all other microbatches; with several chunks the slowest stage's work, and a chunk's passes on all other stages."""
    if shape.num_chunks > 1:
        work = [0.0] * shape.num_stages
        for virtual in range(shape.num_virtual):
            work[shape.stage_of(virtual)] += costs.duration(virtual, Kind.FORWARD)
            if not shape.is_forward_only(virtual):
                work[shape.stage_of(virtual)] += costs.duration(virtual, Kind.BACKWARD)
        fill = (sum(work) - max(work)) / shape.num_chunks + 2 * (shape.num_stages - 1) * costs.message
        total, busy = shape.num_microbatches * max(work) + fill, shape.num_microbatches * sum(work)
        return total, 1 - busy / (total * shape.num_stages)
    forward = [costs.duration(stage, Kind.FORWARD) for stage in range(shape.num_stages)]
    both = [
        forward[stage] + costs.duration(stage, Kind.BACKWARD)
        for stage in range(shape.first_trainable, shape.num_stages)
    ]
    slowest = max(*both, *forward)
    total = sum(both) + 2 * (len(both) - 1) * costs.message + (shape.num_microbatches - 1) * slowest
    busy = shape.num_microbatches * (sum(both) + sum(forward[: shape.first_trainable]))
    return total, 1 - busy / (total * shape.num_stages)


def _step_seconds(recipe: Recipe, held: int, share: MatrixShare) -> float:
    """Adam's step on the parameters whose state a rank holds, then that of its matrices."""
    traffic = 4 * _ADAM_PASSES * held + share.traffic
    if recipe.method == "offload":
        return traffic / (1e9 * recipe.cluster.host_gb_per_s)
    return traffic / recipe.cluster.bytes_per_s + _orthogonalization_seconds(recipe, share)


def _orthogonalization_seconds(recipe: Recipe, share: MatrixShare) -> float:
    """In bf16, whatever the precision of the run."""
    return share.orthogonalization / recipe.cluster.flops_per_s("bf16")


def _reduction_seconds(recipe: Recipe, size: int, messages: int) -> float:
    """Reduce-scatter of the gradients and all-gather of the weights, without overlap; ``messages`` passes each rank
    whole, as in a chain of ranks."""
    ranks = recipe.num_replicas
    if ranks == 1:
        return 0.0
    budget = recipe.state.budget
    return ((budget.gradient + budget.weight) * size * (ranks - 1) / ranks + messages) / _group_speed(recipe, ranks)
