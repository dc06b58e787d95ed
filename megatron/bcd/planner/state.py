"""Model state of every rank in every phase, and the work of its optimizer step, for planner and trainer.

Some matrices are stepped without Megatron Core's optimizer (`optim.matrix_optimizer`). One of the ranks with the same
weights owns each of them: it alone stores momentum and low bits, and computes the update.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from itertools import compress, product

from megatron.bcd.blocks.ownership import EXPERT_STACK_ELEMENTS, matrix_owners, matrix_stacks, sharing_group
from megatron.bcd.blocks.partition import Partition
from megatron.bcd.config import RunConfig
from megatron.bcd.config.measured import Parameters
from megatron.bcd.planner import cost
from megatron.bcd.planner.cost import DTYPE_BYTES, MOMENT_BYTES, ModelShape
from megatron.bcd.planner.tensors import Buffer, Tensor, build_buffer, round_up, stage_tensors

STEP_COUNTER_BYTES = 4
"""PyTorch's Adam has a step counter for each parameter of which the rank stores a part."""
_ARENA_ALIGNMENT = 128
"""Elements to which `model.host_layers` aligns tensors."""
_LOW_BIT_CHUNK, _LOW_BIT_WORK, MATRIX_WORK, _CHUNK_WORK = 2**22, 28, 36, 44
"""Elements whose moments `optim.low_bit_adam` decodes at once on a GPU, and the temporary bytes of each; those of a
matrix, whose fp32 value is one of them; those of an update by chunk, which may be skipped."""

ROWS_ELEMENTS = 2**26
"""As in `optim.update_rules`: a larger matrix takes the factored update some rows at a time."""
_WORKING_BYTES = {"orthogonal": (10.5, 14, 16), "factored": (8, 12, 12)}
"""Temporary bytes per element of the matrices that one update steps, by rule: of a single matrix; of several, with
copies of weights, low bits and momentum; and where queries, keys and values are taken apart."""
_INACTIVE_PASSES, _MUON_PASSES, ADAM_PASSES = {"orthogonal": 17, "factored": 5}, 27, 11
"""4-byte elements that a step reads or writes per parameter, outside the products of the orthogonalisation: norm and
copies of the gradient, scaling, weight decay, update; with a momentum also its update and Nesterov's mean. Those of
factored hold for compiled updates in bf16: one H200 took 48 ms for the matrices of an 8B model, which at its
memory_share in examples/clusters.csv are 4.3 passes with its embedding and head, 5 without (eager: 295 ms). Adam: the
gradient for norm, clipping (2), step and zeroing; the weight (2); both moments (4)."""


@dataclass(frozen=True, kw_only=True)
class RankMemory:
    """The bytes of one rank in one phase, from the second cycle on."""

    stage: int
    block: int
    weights: int  # with the padding of the buffers of all phases
    gradients: int
    optimizer: int
    """Moments, main parameters and step counters of the rank's shard; momenta and low bits of its own matrices. 0 if
    they are on the host."""
    activations: int = 0
    """With --bcd-schedule breadth-first those of a chunk, or the temporary memory of its update if that is larger."""
    chunks: int = 0
    """With --bcd-schedule breadth-first during the passes: saved inputs on the device, and the gradients of a chunk."""
    optimizer_work: int
    """Temporary memory of the optimizer step, when activations are already freed."""
    communication: int = 0
    framework: int = 0

    @property
    def model_state(self) -> int:
        """The bytes of weights, gradients and optimizer state."""
        return self.weights + self.gradients + self.optimizer

    @property
    def total(self) -> int:
        """The peak of the phase."""
        moving = max(self.chunks + self.activations + self.communication, self.optimizer_work)
        return self.model_state + moving + self.framework


@dataclass(frozen=True, kw_only=True)
class StreamedLayers:
    """The layers of a stage that --bcd-layers-on host moves, without always-active parameters."""

    sizes: tuple[int, ...]
    """Elements of each layer, in order."""
    padded: int
    """Elements of a layer with alignment, in host memory and in a device buffer."""
    is_active: tuple[tuple[bool, ...], ...]
    """By block, whether each layer is active."""


@dataclass(frozen=True, kw_only=True)
class MatrixShare:
    """A rank's share of the matrices that are stepped in one phase. The default is an empty share."""

    gradients: int = 0  # bytes, for all matrices that are stepped at the end, those of other owners included
    by_chunk: tuple[int, ...] = ()  # breadth-first: bytes of gradients while each virtual chunk is open
    working_by_chunk: tuple[int, ...] = ()  # and temporary bytes of its update
    state: int = 0  # bytes of momenta, factors, and the low 16 bits of bf16 weights
    working: int = 0  # temporary bytes while the rank updates its largest stack of matrices at the end
    orthogonalization: int = 0  # operations
    traffic: int = 0  # bytes of element-wise work
    messages: int = 0  # bytes of gradients sent to owners, and of weights that come back


@dataclass(frozen=True, kw_only=True, eq=False)
class ModelState:
    """Weights, gradients and optimizer state of all ranks."""

    config: RunConfig
    partition: Partition
    padded_vocabulary: int
    num_replicas: int
    """Number of ranks with the same weights: data-parallel times context-parallel ones."""
    parameters: Parameters = ()
    """See `cost.shape_of`."""

    @cached_property
    def shape(self) -> ModelShape:
        """The sizes of the model, with the padded vocabulary."""
        return cost.shape_of(self.config, vocab_size=self.padded_vocabulary, parameters=self.parameters)

    @cached_property
    def budget(self) -> cost.StateBudget:
        """Bytes per parameter of the parameters that Megatron Core's optimizer steps."""
        return cost.state_budget(self.config)

    @cached_property
    def passes(self) -> Partition:
        """The partition into what the schedule runs at once."""
        partition, layers = self.partition, self.config.bcd.bcd_layers_per_pass
        return partition.in_passes(layers) if self.config.is_breadth_first else partition

    @property
    def chunks(self) -> tuple[range, ...]:
        """The layers of each virtual chunk of --bcd-schedule breadth-first."""
        return self.passes.virtual_stages if self.config.is_breadth_first else ()

    @cached_property
    def tensors(self) -> tuple[tuple[Tensor, ...], ...]:
        """The parameters of a rank, by stage."""
        sizes = {name: getattr(self.config, name) for name in ("tensor_size", "expert_size", "expert_tensor_size")}
        sizes["padded_vocabulary"] = self.padded_vocabulary
        return tuple(
            stage_tensors(self.shape, self.partition, stage, **sizes) for stage in range(self.partition.num_stages)
        )

    def whole_tensors(self, stage: int) -> tuple[Tensor, ...]:
        """Return the parameters of a stage, not divided by tensor and expert parallelism."""
        return stage_tensors(self.shape, self.partition, stage, padded_vocabulary=self.padded_vocabulary)

    @cached_property
    def _experts_place(self) -> list[int]:
        """Index among the ranks with the same experts, by index among those with the same other weights."""
        if self.config.expert_size == 1:
            return list(range(self.num_replicas))
        ranks = self.config.expert_size * self.config.expert_tensor_size
        return [replica * self.config.tensor_size // ranks for replica in range(self.num_replicas)]

    @property
    def _num_expert_replicas(self) -> int:
        """Number of ranks with the same experts."""
        if self.config.expert_size == 1:
            return self.num_replicas
        return self.num_replicas * self.config.tensor_size // (self.config.expert_size * self.config.expert_tensor_size)

    @property
    def num_expert_parts(self) -> int:
        """Number of different parts of a layer's experts among the ranks with the same other weights."""
        return max(1, self.num_replicas // self._num_expert_replicas)

    @cached_property
    def num_parameters(self) -> tuple[int, ...]:
        """The number of parameters of a rank, by stage."""
        return tuple(sum(tensor.size for tensor in tensors) for tensors in self.tensors)

    @cached_property
    def buffers(self) -> tuple[tuple[Buffer, ...], ...]:
        """The buffers of active parameters, by stage and block."""
        return tuple(
            tuple(self._buffer(tensors, block.index) for block in self.partition.blocks) for tensors in self.tensors
        )

    @property
    def layer_state_bytes(self) -> float:
        """The bytes of state of an element of a layer in host memory, beside its weight."""
        low_bits = 2 * (self.config.precision == "bf16" and self.config.updates_streamed_layers)
        return low_bits + sum(DTYPE_BYTES[dtype] / shared for dtype, shared in self.config.state_on_host.values())

    def _steps_matrix(self, tensor: Tensor) -> bool:
        """Return whether a matrix of the active block is stepped without Megatron Core's optimizer."""
        return bool(tensor.parts) and self.config.has_matrix_optimizer

    def _buffer(self, tensors: tuple[Tensor, ...], block: int) -> Buffer:
        stepped = [tensor for tensor in tensors if tensor.owned.is_active(block) and not self._steps_matrix(tensor)]
        experts = [tensor for tensor in stepped if tensor.is_expert]
        buffer = build_buffer([each for each in stepped if not each.is_expert], num_ranks=self.num_replicas)
        if not experts:
            return buffer
        return buffer.joined(build_buffer(experts, num_ranks=self._num_expert_replicas), self._experts_place)

    @cached_property
    def streamed(self) -> tuple[StreamedLayers, ...]:
        """The layers that can be in host memory, by stage."""
        return tuple(self._streamed(tensors) for tensors in self.tensors)

    def _streamed(self, tensors: tuple[Tensor, ...]) -> StreamedLayers:
        by_chunk, by_layer = self.config.steps_block_by_chunk, dict[int, list[Tensor]]()
        for tensor in tensors:
            is_streamed = bool(tensor.parts) if by_chunk else not tensor.owned.is_always_active
            if tensor.owned.layer is not None and is_streamed:
                by_layer.setdefault(tensor.owned.layer, []).append(tensor)
        layers = list(by_layer.values())
        padded = (sum(round_up(tensor.size, _ARENA_ALIGNMENT) for tensor in layer) for layer in layers)
        return StreamedLayers(
            sizes=tuple(sum(tensor.size for tensor in layer) for layer in layers),
            padded=max(padded, default=0),
            is_active=tuple(
                tuple(not by_chunk and any(each.owned.is_active(block.index) for each in layer) for layer in layers)
                for block in self.partition.blocks
            ),
        )

    def embedding_on_host(self, stage: int) -> int:
        """Return the elements of the stage's embedding if it is in host memory (`RunConfig.has_embedding_on_host`)."""
        config, partition = self.config, self.partition
        is_on_host = config.bcd.bcd_layers_on != "device" and "embedding" in partition.frozen and not partition.tied
        return self.padded_vocabulary // config.tensor_size * self.shape.hidden_size * (is_on_host and stage == 0)

    def num_layer_buffers(self, stage: int) -> int:
        """Return the device buffers for layers in host memory."""
        most = 3 * max(map(len, self.chunks[stage :: self.partition.num_stages])) + self.config.bcd.bcd_resident_layers
        return min(most, len(self.streamed[stage].sizes))

    def buffer_state(self, stage: int, replica: int) -> int:
        """Return the bytes of state in the device buffers: each stores that which the rank owns in a layer."""
        if self.config.bcd.bcd_layers_on == "device" or not self.layer_state_bytes:
            return 0
        by_layer = Counter[int]()
        for tensor, owners in self._matrices[stage]:
            if tensor.owned.layer is not None and replica in owners:
                number = 2 * (self.config.precision == "bf16") * round_up(tensor.size, _ARENA_ALIGNMENT)
                for dtype, shared in self.config.state_on_host.values():
                    number += DTYPE_BYTES[dtype] * round_up(-(-tensor.size // shared), _ARENA_ALIGNMENT)
                by_layer[tensor.owned.layer] += number
        return self.num_layer_buffers(stage) * max(by_layer.values(), default=0)

    @cached_property
    def _matrices(self) -> list[list[tuple[Tensor, list[int]]]]:
        """The matrices that are stepped apart, and their owners, by stage. With divided experts each part has one."""
        return [self._with_owners([tensor for tensor in tensors if tensor.parts]) for tensors in self.tensors]

    def _with_owners(self, matrices: list[Tensor]) -> list[tuple[Tensor, list[int]]]:
        passes = self.passes if self.config.is_breadth_first else None
        owners = dict[str, list[int]]()
        for are_experts in (False, True):
            some = [tensor for tensor in matrices if tensor.is_expert == are_experts]
            places = self._experts_place if are_experts else range(self.num_replicas)
            num_owners = self._num_expert_replicas if are_experts else self.num_replicas
            groups = [sharing_group(each.owned, passes, has_moments=not self.config.is_muon) for each in some]
            numbers = matrix_owners([each.size for each in some], num_owners, groups)
            for tensor, owner in zip(some, numbers, strict=True):
                owners[tensor.name] = [rank for rank, place in enumerate(places) if place == owner]
        return [(tensor, owners[tensor.name]) for tensor in matrices]

    def weight_elements(self, stage: int, block: int) -> int:
        """Return the weights on the device in elements, with the padding of buffers."""
        is_streamed, buffers = self.config.bcd.bcd_layers_on != "device", self.buffers[stage]
        if is_streamed or self.partition.always_active:  # a buffer ends with its phase
            buffers = buffers[block : block + 1]
        elements = self.num_parameters[stage] + sum(buffer.padding for buffer in buffers)
        if is_streamed:
            layers, is_active = self.streamed[stage], self.streamed[stage].is_active[block]
            elements += sum(compress(layers.sizes, is_active)) - sum(layers.sizes)
            elements += (not all(is_active)) * self.num_layer_buffers(stage) * layers.padded
            elements -= self.embedding_on_host(stage)
        return elements

    def rank(self, stage: int, block: int, replica: int) -> RankMemory:
        """Return the model state of one rank, excluding activations."""
        buffer, share = self.buffers[stage][block], matrix_shares(self, stage, block)[replica]
        stored, count = buffer.stored[replica], buffer.counts[replica]
        is_low_bit = self.config.training.adam_moments_dtype != "fp32"
        of_adam = int(self.budget.optimizer * stored) + STEP_COUNTER_BYTES * count * (not is_low_bit)
        adam_work = 4 * stored * (self.budget.gradient == 2)  # gradients of 2 bytes are copied to fp32
        adam_work += _LOW_BIT_WORK * min(stored, _LOW_BIT_CHUNK) * is_low_bit
        on_device = 1 - cost.offload_fraction(self.config)
        return RankMemory(
            stage=stage,
            block=block,
            weights=self.budget.weight * self.weight_elements(stage, block) + self.buffer_state(stage, replica),
            gradients=self.budget.gradient * buffer.size + share.gradients,
            optimizer=int(on_device * of_adam) + share.state,
            optimizer_work=max(int(on_device * adam_work), share.working),
        )

    @cached_property
    def kept_bytes(self) -> int:
        """The most bytes of offloaded momenta of a rank in a phase."""
        offloads = self.partition.has_active_block and self.config.bcd.bcd_optimizer_state == "host"
        if not self._momentum_bytes or not offloads:
            return 0
        most, blocks, ranks = 0, range(self.partition.num_blocks), range(self.num_replicas)
        for matrices, block, rank in product(self._matrices, blocks, ranks):
            sizes = (each.size for each, owners in matrices if rank in owners and not each.owned.is_active(block))
            most = max(most, sum(int(self._momentum_bytes * size) for size in sizes))
        return most

    @property
    def _momentum_bytes(self) -> float:
        """The bytes of state of an element that is stepped without Megatron Core's optimizer, beside its low bits."""
        if self.config.is_muon:
            return MOMENT_BYTES[self.config.bcd.muon_momentum_dtype]
        return self.budget.moments if self.config.has_matrix_optimizer else 0

    def rank_share(self, stage: int, block: int, rank: int) -> MatrixShare:
        bcd = self.config.bcd
        block_gradient = DTYPE_BYTES[bcd.muon_grad_dtype] if self.config.is_muon else self.budget.gradient
        inactive_gradient = DTYPE_BYTES[bcd.bcd_inactive_grad_dtype]
        low_bits = 2 if self.config.precision == "bf16" else 0
        total, updated, by_chunk = Counter[str](), [], [0] * len(self.chunks)
        working_by_chunk = list(by_chunk)
        for tensor, owners in self._matrices[stage]:
            is_active = tensor.owned.is_active(block)
            is_stepped = is_active and self._steps_matrix(tensor) or tensor.owned.has_inactive_update(block)
            waits = is_active and not self.config.steps_block_by_chunk  # for the end of the step
            chunks = self._open_chunks(tensor) if is_stepped and not waits else ()
            if is_stepped:
                gradient = block_gradient if is_active else inactive_gradient
                total["gradients"] += gradient * tensor.size * (not chunks)
                for chunk in chunks:
                    by_chunk[chunk] += gradient * tensor.size
                total["messages"] += (gradient + self.budget.weight) * tensor.size * (self.num_replicas > 1)
            if rank not in owners:
                continue
            is_in_arena = self.config.bcd.bcd_layers_on != "device" and tensor.owned.layer is not None
            has_low_bits = self._steps_matrix(tensor) if is_active else bool(tensor.owned.inactive_updates_in)
            if not is_in_arena or waits:
                total["state"] += int((low_bits * has_low_bits + self._momentum_bytes * is_active) * tensor.size)
            has_factors = self._inactive_rule(tensor) == "factored" and bool(tensor.owned.inactive_updates_in)
            total["state"] += 4 * tensor.num_factors * has_factors
            if is_stepped:
                updated.append((tensor, is_active, chunks))
                rule = self._inactive_rule(tensor)
                passes = _MUON_PASSES if self.config.is_muon else ADAM_PASSES
                total["traffic"] += 4 * (passes if is_active else _INACTIVE_PASSES[rule]) * tensor.size
                if self.config.is_muon if is_active else rule == "orthogonal":
                    is_gram_iterated = bcd.muon_gram_iteration
                    flops = sum(
                        cost.newton_schulz_flops(*part, is_gram_iterated=is_gram_iterated) for part in tensor.parts
                    )
                    total["orthogonalization"] += tensor.num_matrices * flops
        keys = [(tensor.parts, tensor.num_matrices, is_active, chunks) for tensor, is_active, chunks in updated]
        names, sizes = [tensor.name for tensor, _, _ in updated], [tensor.size for tensor, _, _ in updated]
        for stack in matrix_stacks(keys, names, sizes):
            first, is_active, chunks = updated[stack[0]]
            by_form = _WORKING_BYTES["orthogonal" if is_active else self._inactive_rule(first)]
            size = len(stack) * first.size
            if first.num_matrices > 1 and len(stack) == 1:
                size = min(size, max(EXPERT_STACK_ELEMENTS, first.size // first.num_matrices))
            if by_form is _WORKING_BYTES["factored"] and len(first.parts) == 1:
                size = min(size, ROWS_ELEMENTS)
            working = by_form[2 if len(first.parts) > 1 else len(stack) > 1] * size
            if is_active and not self.config.is_muon:
                working = (_CHUNK_WORK if chunks else MATRIX_WORK) * min(first.size, _LOW_BIT_CHUNK)
            if chunks:
                working_by_chunk[chunks[0]] = max(working_by_chunk[chunks[0]], int(working))
            else:
                total["working"] = max(total["working"], int(working))
        return MatrixShare(**total, by_chunk=tuple(by_chunk), working_by_chunk=tuple(working_by_chunk))

    def _open_chunks(self, tensor: Tensor) -> Sequence[int]:
        """Return the chunks during which an inactive update's matrix has a gradient; none if it waits for the step."""
        if tensor.owned.layer is None and self.partition.tied:
            return range(len(self.chunks)) if self.partition.num_stages == 1 else ()
        return (tensor.owned.virtual_stage(self.passes),) if self.config.is_breadth_first else ()

    def _inactive_rule(self, tensor: Tensor) -> str:
        is_in_layer = tensor.owned.module == "layer"
        return self.config.bcd.bcd_inactive_update if is_in_layer else self.config.bcd.bcd_embedding_update


@lru_cache(maxsize=4096)  # a search needs them repeatedly
def matrix_shares(state: ModelState, stage: int, block: int) -> list[MatrixShare]:
    """Return the ranks' shares of the matrices that are stepped in the block's phase."""
    if not state.config.has_matrix_optimizer:
        return [MatrixShare()] * state.num_replicas
    return [state.rank_share(stage, block, rank) for rank in range(state.num_replicas)]


@lru_cache(maxsize=4096)
def largest_rank(state: ModelState, stage: int, block: int) -> RankMemory:
    """Return the rank of the stage with the most state."""
    ranks = (state.rank(stage, block, replica) for replica in range(state.num_replicas))
    return max(ranks, key=lambda rank: rank.model_state)
