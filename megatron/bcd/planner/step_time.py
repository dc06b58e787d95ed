"""Estimate the time of an iteration: a roofline per layer, the simulated pipeline, optimizer step and reductions.

A layer takes the time of its matrix products at the achieved share of the peak, plus the time of its element-wise
work at the achieved share of the memory bandwidth. The forward pass writes and reads what a layer saves for its
backward pass once; each gradient does so once more.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

from megatron.bcd.pipeline.build import host_passes, kept_passes, pass_orders
from megatron.bcd.pipeline.plan import Plan, PlanShape
from megatron.bcd.pipeline.simulate import Timeline, Work, simulate
from megatron.bcd.planner.cost import fp8_matrices, pass_products
from megatron.bcd.planner.memory import recomputation
from megatron.bcd.planner.recipe import Recipe
from megatron.bcd.planner.state import ADAM_PASSES, MatrixShare, matrix_shares

_SIMULATED_ROUNDS = 3
"""Number of simulated microbatches per stage. The time of the others is extrapolated."""


@dataclass(frozen=True, kw_only=True)
class PhaseTime:
    """The seconds of one iteration in the phase of a block."""

    block: int
    pipeline: float  # forward and backward of all microbatches, bubbles included
    optimizer: float  # the step of the slowest rank, orthogonalisation included
    reductions: float  # reduce-scatter of gradients and all-gather of weights; messages of matrices with an owner
    bubble: float  # share of the pipeline's time in which stages are idle, over all stages

    @property
    def total(self) -> float:
        """The seconds of the iteration."""
        return self.pipeline + self.optimizer + self.reductions


def pass_seconds(recipe: Recipe) -> tuple[float, float, float]:
    """Return the seconds of a pass of one microbatch through a layer, head and loss, and the core of attention.

    Forward, input gradient and weight gradient are a pass each.
    """
    cluster, sizes = recipe.cluster, recipe.memory.layer_bytes
    tokens = recipe.tokens // recipe.config.context_size * recipe.micro_batch_size
    matrices, core = pass_products(recipe.shape, sequence=recipe.tokens)
    rate = cluster.flops_per_s(recipe.config.precision, fp16_accumulation=recipe.config.training.fp16_accumulation)

    def seconds(products: int, traffic: int, per_second: float = rate) -> float:
        return 2 * tokens * products / per_second + traffic / cluster.bytes_per_s

    head = seconds(recipe.padded_vocabulary * recipe.shape.hidden_size, 8 * tokens * recipe.padded_vocabulary)
    core_seconds = seconds(core, 2 * sizes.suffix_core)
    if not recipe.config.fp8_products:
        return seconds(matrices + core, 2 * sizes.active), head, core_seconds
    rounded = fp8_matrices(recipe.shape)
    narrow = min(matrices, sum(rows * columns for rows, columns in rounded))
    # three passes read inputs and output gradients three times each, two of 16 bits and one for the scale, and write
    # them twice; two passes read weights and write them: once an iteration in breadth-first order
    uses = recipe.num_microbatches if recipe.config.is_breadth_first else 1
    traffic = tokens * 8 * sum(map(sum, rounded)) // 3 + 2 * narrow // uses
    wide = seconds(matrices - narrow + core, 2 * sizes.active)
    return wide + seconds(narrow, traffic, cluster.flops_per_s("fp8")), head, core_seconds


def phase_seconds(recipe: Recipe, block: int) -> PhaseTime:
    """Return the time of an iteration in the middle of the block's phase."""
    buffers = [by_block[block] for by_block in recipe.state.buffers]
    shares = [matrix_shares(recipe.state, stage, block) for stage in range(len(buffers))]
    steps = [
        _step_seconds(recipe, stored, share)
        for stage, buffer in enumerate(buffers)
        for stored, share in zip(buffer.stored, shares[stage], strict=True)
    ]
    step = max(steps)
    shape = recipe.memory.schedule_shape(block)
    work = _breadth_first_work(recipe, block, step) if shape.is_breadth_first else _work(recipe, block)
    pipeline, bubble = _pipeline_seconds(shape, work, message=_message_seconds(recipe))
    return PhaseTime(
        block=block,
        pipeline=pipeline,
        optimizer=step,
        reductions=max(
            _reduction_seconds(recipe, buffer.size, shares[stage][0].messages) for stage, buffer in enumerate(buffers)
        ),
        bubble=bubble,
    )


def _work(recipe: Recipe, block: int) -> Work:
    partition, choices = recipe.partition, recomputation(recipe)
    layer, _, core = pass_seconds(recipe)
    exchange = exchange_seconds(recipe)
    forward, backward = [], []
    for virtual, layers in enumerate(partition.virtual_stages):
        chunk, stage = divmod(virtual, partition.num_stages)
        updated, choice = partition.behind_prefix[virtual][block], choices[stage][block]
        num_inputs, num_updated, recomputed = len(updated), sum(updated), choice.num_whole(chunk)
        forward.append(len(layers) * (layer + exchange))
        backward.append((num_inputs + num_updated + recomputed) * layer + (num_inputs + recomputed) * exchange)
        if choice.granularity == "selective":
            backward[-1] += num_inputs * core
    return _with_head(recipe, block, forward, backward)


def chunk_seconds(recipe: Recipe, block: int) -> list[tuple[float, float]]:
    """Return the seconds of a forward and a backward pass of a microbatch through each virtual chunk of breadth-first,
    without the head and without the forward pass that the backward pass repeats."""
    layer, _, core = pass_seconds(recipe)
    layer_input = layer + exchange_seconds(recipe)
    core *= recipe.config.transformer.get("recompute_granularity") is not None
    seconds = []
    for layers, by_block in zip(recipe.state.chunks, recipe.state.passes.behind_prefix, strict=True):
        updated = by_block[block]
        seconds.append((len(layers) * layer_input, len(updated) * (layer_input + core) + sum(updated) * layer))
    return seconds


def _breadth_first_work(recipe: Recipe, block: int, update: float) -> Work:
    """Return the times of passes with --bcd-schedule breadth-first, and of copies that wait behind them.

    While a chunk computes, the stage's next one is copied; while it is updated too, the last one is written back.
    Copies to and from the device run side by side. `update` is the time of all updates of a stage.
    """
    state, number, stages = recipe.state, recipe.num_microbatches, recipe.pipeline_size
    shape = recipe.memory.schedule_shape(block)
    speed, last = 1e9 * recipe.cluster.copy_gb_per_s, len(state.chunks) - 1
    forward, backward, by_stage = [], [], []
    kept, on_host = Counter[int](), Counter[int]()
    for stage in range(stages):
        activations, places = recipe.memory.activations(stage, block), host_passes(shape, stage)
        inputs = activations.input_bytes("host") / max(1, activations.num_saved_inputs)
        saved = activations.host_bytes(recipe.memory.recomputed(stage, block)) / max(1, len(places))
        by_stage.append((*copy_bytes(recipe, stage, block), inputs, saved))
        on_host.update(shape.virtual_stage(stage, chunk) for chunk, _ in places)
        kept.update(shape.virtual_stage(stage, chunk) for chunk, _ in (*kept_passes(shape, stage), *places))
    for virtual, (layers, (passing, computing)) in enumerate(
        zip(state.chunks, chunk_seconds(recipe, block), strict=True)
    ):
        loads, store, inputs, saved = by_stage[virtual % stages]
        inputs += saved * on_host[virtual]
        forward.append(max(passing, max(loads[0] * len(layers), inputs) / speed / number))
        copying = max(loads[1] * len(layers) + inputs, store * len(layers)) / speed
        repeating = (1 - kept[virtual] / number) * passing
        waiting = copying - number * (repeating + computing) - update * stages / len(state.chunks)
        if recipe.config.clips_by_chunk:  # updates wait for the norm, and load and store once more
            waiting = max(0.0, waiting) + max(0.0, store * len(layers) / speed - update * stages / len(state.chunks))
        computing += max(0.0, waiting) / number
        # all chunks but the last one repeat their forward pass, unless it is kept
        repeated = 0.0 if virtual == last else (1 - kept[virtual] / number) * (forward[-1] - passing)
        backward.append(computing - repeated)
    return _with_head(recipe, block, forward, backward)


def _with_head(recipe: Recipe, block: int, forward: list[float], backward: list[float]) -> Work:
    """Return the times of passes of layers with those of the head, which follows the last ones."""
    head, is_active = pass_seconds(recipe)[1], recipe.partition.head_active(block)
    # a linear loss computes the gradient of its input in the forward pass, and the logits again for the weight's
    is_linear = recipe.config.has_linear_loss
    forward[-1] += (1 + is_linear) * head
    backward[-1] += (2 * is_active if is_linear else 1 + is_active) * head
    return [*zip(forward, backward, strict=True)]


def copy_bytes(recipe: Recipe, stage: int, block: int) -> tuple[tuple[float, float], float]:
    """Return the bytes of a layer that breadth-first copies to the device in the forward and in the backward pass, and
    back. They are means over the layers, of which the active ones are not copied. A rank copies its own state."""
    if not recipe.is_streamed:
        return (0.0, 0.0), 0.0
    layers = recipe.state.streamed[stage]
    share = layers.is_active[block].count(False) / len(layers.sizes)
    elements, config = share * layers.padded, recipe.config
    weights = recipe.state.budget.weight * elements
    updated = weights + recipe.state.layer_state_bytes * elements / recipe.num_replicas
    return (weights, weights if config.clips_by_chunk else updated), updated * config.updates_streamed_layers


def _group_speed(recipe: Recipe, ranks: int) -> float:
    """Return the bytes per second between ranks of one stage, which are neighbours."""
    cluster = recipe.cluster
    return 1e9 * (cluster.link_gb_per_s if ranks <= recipe.gpus_per_node else cluster.network_gb_per_s)


def exchange_seconds(recipe: Recipe) -> float:
    """Return the time to gather a layer's keys and values over context-parallel ranks. Scattering takes as long."""
    ranks = recipe.config.context_size
    size = 2 * recipe.tokens * recipe.micro_batch_size * recipe.shape.key_value_size * recipe.state.budget.weight
    return size * (ranks - 1) / ranks / _group_speed(recipe, ranks)


def _message_seconds(recipe: Recipe) -> float:
    """Return the mean time of a message over the pipeline's links, which is exact if messages follow one another."""
    if recipe.pipeline_size == 1:
        return 0.0
    cluster, num_links = recipe.cluster, recipe.pipeline_size - (recipe.partition.num_chunks == 1)
    # ranks of one stage are neighbours, so a stage starts every num_replicas ranks
    nodes = [stage * recipe.num_replicas // recipe.gpus_per_node for stage in range(recipe.pipeline_size)]
    between = sum(nodes[stage] != nodes[(stage + 1) % recipe.pipeline_size] for stage in range(num_links))
    # all ranks of a stage on a node send at once
    network = cluster.network_gb_per_s / min(recipe.num_replicas, recipe.gpus_per_node)
    speeds = [network] * between + [cluster.link_gb_per_s] * (num_links - between)
    return recipe.memory.layer_bytes.input * sum(1 / (1e9 * speed) for speed in speeds) / num_links


def _pipeline_seconds(shape: PlanShape, work: Work, *, message: float) -> tuple[float, float]:
    """Return time and bubble. The first microbatches are simulated; the others continue at the same pace."""
    if shape.num_stages == 1:
        return _one_stage_seconds(shape, work), 0.0
    simulated = shape.mid_phase(min(shape.num_microbatches, _SIMULATED_ROUNDS * shape.num_stages))
    timeline = _timeline(simulated, work, message)
    more = (shape.num_microbatches - simulated.num_microbatches) / simulated.num_microbatches
    if not more:
        return timeline.iteration_time, timeline.bubble
    fewer = _timeline(shape.mid_phase(simulated.num_microbatches - shape.num_stages), work, message)
    slope = (timeline.iteration_time - fewer.iteration_time) / shape.num_stages
    total = timeline.iteration_time + more * simulated.num_microbatches * slope
    return total, 1 - sum(timeline.busy_times) * (1 + more) / (total * shape.num_stages)


def _timeline(shape: PlanShape, work: Work, message: float) -> Timeline:
    return simulate(Plan(shape=shape, stages=pass_orders(shape)), work, message=message)


def _one_stage_seconds(shape: PlanShape, work: Work) -> float:
    """Return the time of the passes of one stage, which follow one another."""
    seconds = 0.0
    for virtual, (forward, backward) in enumerate(work):
        is_repeated = shape.is_breadth_first and virtual < shape.last
        seconds += forward if shape.is_forward_only(virtual) else (1 + is_repeated) * forward + backward
    kept = (*kept_passes(shape, 0), *host_passes(shape, 0))
    return shape.num_microbatches * seconds - sum(work[chunk][0] for chunk, _ in kept)


def _step_seconds(recipe: Recipe, stored: int, share: MatrixShare) -> float:
    """Return the time of Adam's step on `stored` elements, plus that of the rank's matrix steps.

    They orthogonalise in bf16 whatever the precision of the run.
    """
    traffic = 4 * ADAM_PASSES * stored + share.traffic
    if recipe.method == "offload":
        return traffic / (1e9 * recipe.cluster.host_gb_per_s)
    return traffic / recipe.cluster.bytes_per_s + share.orthogonalization / recipe.cluster.flops_per_s("bf16")


def _reduction_seconds(recipe: Recipe, size: int, messages: int) -> float:
    """Return the time of reduce-scatter and all-gather, without overlap. Each rank transfers all ``messages`` bytes."""
    ranks = recipe.num_replicas
    if ranks == 1:
        return 0.0
    budget = recipe.state.budget
    return ((budget.gradient + budget.weight) * size * (ranks - 1) / ranks + messages) / _group_speed(recipe, ranks)
