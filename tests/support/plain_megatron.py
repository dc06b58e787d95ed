"""Read a checkpoint with plain Megatron Core: this file imports nothing of this repository's package.

python plain_megatron.py CHECKPOINT '{"transformer": {...}, "model": {...}, "vocab_size": ...}' prints the mean loss on
synthetic tokens. Needs one process and no GPU.
"""

from __future__ import annotations

import json
import sys

import torch
from megatron.core import dist_checkpointing, parallel_state, tensor_parallel
from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.transformer.transformer_config import TransformerConfig


def without_a_gpu() -> None:
    """Stub the state of the GPU's random generator, which Megatron Core reads even if nothing is drawn."""
    torch.cuda.get_rng_state = lambda *args, **kwargs: torch.get_rng_state()
    torch.cuda.set_rng_state = lambda state, *args, **kwargs: torch.set_rng_state(state)
    torch.cuda.manual_seed = torch.manual_seed
    torch.cuda.current_device = lambda: "cpu"
    random = sys.modules["megatron.core.tensor_parallel.random"]
    random._get_cuda_rng_state = torch.cuda.get_rng_state
    random._set_cuda_rng_state = torch.cuda.set_rng_state


def main() -> None:
    folder, network = sys.argv[1], json.loads(sys.argv[2])
    if not torch.cuda.is_available():
        without_a_gpu()
    torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
    parallel_state.initialize_model_parallel()
    tensor_parallel.model_parallel_cuda_manual_seed(1)
    fields = network["transformer"] | {"gated_linear_unit": True, "activation_func": torch.nn.functional.silu}
    fields |= {"use_cpu_initialization": True, "bias_activation_fusion": False, "masked_softmax_fusion": False}
    model = GPTModel(
        config=TransformerConfig(**fields),
        transformer_layer_spec=get_gpt_layer_local_spec(normalization=fields.get("normalization")),
        **network["model"],
    )
    loaded = dist_checkpointing.load({"model": model.sharded_state_dict()}, folder)["model"]
    missing, unexpected = model.load_state_dict(loaded, strict=False)
    assert not unexpected and all(name.endswith("_extra_state") for name in missing), (missing, unexpected)
    model.eval()
    vocab_size, length = network["vocab_size"], network["model"]["max_sequence_length"]
    tokens = (torch.arange(2 * (length + 1)) * 7919 % vocab_size).view(2, length + 1)
    positions = torch.arange(length).expand(2, length)
    mask = torch.triu(torch.ones(1, 1, length, length, dtype=torch.bool), diagonal=1)
    with torch.no_grad():
        losses = model(tokens[:, :-1], positions, mask, labels=tokens[:, 1:])
    assert not any(name.startswith("megatron.bcd") for name in sys.modules)
    print(json.dumps(float(losses.double().mean())))


if __name__ == "__main__":
    main()
