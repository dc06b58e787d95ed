"""Train transformers' model under the flags of a training script, as the peer in comparisons.

    python studies/peer.py --peer {full,badam,lora} [--family llama] FLAG ...
    python studies/peer.py --count FLAG ...

Initial weights, samples, masks, learning-rate schedule and evaluations are those of the training script with these
flags; weight decay and the optimizer's arithmetic are the peer's. full: AdamW on all weights. badam: BAdam (PyPI) on
the blocks of the flags, in their order; with --sft BAdam's default, one layer per block in random order. lora: adapters
of rank 16 on all linear layers of the transformer (PyPI peft). --count prints the numbers of steps and of validation
sequences, and does not train. --save and --load are accepted, but no checkpoint is written: a killed run starts again.
"""

from __future__ import annotations

import argparse
import functools
import json
import os
import sys
import time
import warnings
from collections.abc import Iterator, Sequence
from types import SimpleNamespace
from typing import Any

sys.path.insert(0, os.path.dirname(os.path.dirname(os.path.abspath(__file__))))

import torch
from megatron.core.num_microbatches_calculator import init_num_microbatches_calculator
from torch import Tensor

from megatron.bcd import data
from megatron.bcd.arguments import FAMILY_DEFAULTS, parse_run_config
from megatron.bcd.blocks.partition import Partition, partition_from_config
from megatron.bcd.blocks.schedule import block_schedule_from_config
from megatron.bcd.config import RunConfig
from megatron.bcd.huggingface.run_network import run_architecture
from megatron.bcd.huggingface.tensors import build_rows
from megatron.bcd.metrics.sinks import MetricsFile
from megatron.bcd.model.builder import build_model, unwrap_model
from megatron.bcd.model.implementation import available_implementation
from megatron.bcd.optim.lr_schedule import build_scheduler
from megatron.bcd.runtime import device, distributed, memory, rng, threads
from megatron.bcd.runtime.exit import exit_on_error
from megatron.bcd.tokenizer import build_tokenizer, padded_vocab_size
from megatron.bcd.training.resolve import with_length

PROG = "studies/peer.py"
PEERS = ("full", "badam", "lora")
LORA_RANK, LORA_ALPHA = 16, 32
LORA_MODULES = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
# Transformer Engine's layers contain the norm before them, and checkpoints use those names.
SEPARATE_NORMS = {"self_attention.linear_qkv.layer_norm_": "input_layernorm.",
             "mlp.linear_fc1.layer_norm_": "pre_mlp_layernorm."}  # fmt: skip


def load_model(config: RunConfig) -> torch.nn.Module:
    from transformers import AutoModelForCausalLM

    dtype = torch.bfloat16 if config.precision == "bf16" else torch.float32
    model = AutoModelForCausalLM.from_pretrained(config.checkpoint.load_hf, attn_implementation="sdpa", dtype=dtype)
    return model.to(device.current())


def draw_model(config: RunConfig, vocab_size: int) -> torch.nn.Module:
    """Build transformers' model with the initial weights that the training script draws."""
    from transformers import AutoConfig, AutoModelForCausalLM

    ours = dict(unwrap_model(build_model(config, vocab_size, available_implementation(config))).named_parameters())
    network, values = run_architecture(config, is_on_gpu=device.has_cuda(), vocab_size=vocab_size)
    settings = AutoConfig.for_model(values.pop("model_type"), **values)
    model = AutoModelForCausalLM.from_config(settings, attn_implementation="sdpa", dtype=torch.float32)
    state: dict[str, Tensor] = {}
    for row in build_rows(network):
        name = row.key.replace("decoder.layers.", f"decoder.layers.{row.layer}.")
        if name not in ours:
            for fused, separate in SEPARATE_NORMS.items():
                name = name.replace(fused, separate)
        state |= zip(row.names, row.split(ours[name].detach()), strict=True)
    unmatched = model.load_state_dict(state, strict=False)
    # a tied head shares the embedding's weight
    assert not unmatched.unexpected_keys and set(unmatched.missing_keys) <= {"lm_head.weight"}, unmatched
    return model.to(device.current())


def block_prefixes(partition: Partition, *, is_llama: bool) -> list[list[str]]:
    """Return BAdam's block_prefix_list with the blocks of the BCD run: layers, embedding, final norm and head."""
    stem = "model.layers" if is_llama else "transformer.h"
    blocks = []
    for block in partition.blocks:
        prefixes = [f"{stem}.{layer}." for layer in block.layers]
        if partition.embedding_active(block.index):
            prefixes += ["model.embed_tokens."] if is_llama else ["transformer.wte.", "transformer.wpe."]
        if partition.final_norm_active(block.index):
            prefixes += ["model.norm."] if is_llama else ["transformer.ln_f."]
        if partition.head_active(block.index) and is_llama:  # GPT-2's head is the embedding
            prefixes += ["lm_head."]
        blocks.append(prefixes)
    return blocks


def now() -> float:
    """Return the time in seconds, once the device has finished its work."""
    device.synchronize()
    return time.perf_counter()


class Peer:
    """A model of transformers, its trainable weights and its optimizer."""

    def __init__(self, kind: str, config: RunConfig, model: torch.nn.Module) -> None:
        self.model, self.config = model.train(), config
        self.num_parameters = sum(parameter.numel() for parameter in model.parameters())
        memory.reset_peak_memory()
        if kind == "lora":
            from peft import LoraConfig, get_peft_model

            adapters = LoraConfig(
                r=LORA_RANK, lora_alpha=LORA_ALPHA, lora_dropout=0.0, target_modules=LORA_MODULES, task_type="CAUSAL_LM"
            )
            self.model = get_peft_model(model, adapters)
        optimizer = config.optimizer
        self._adam = torch.optim.AdamW(
            [parameter for parameter in self.model.parameters() if parameter.requires_grad],
            lr=optimizer.lr,
            betas=(optimizer.adam_beta1, optimizer.adam_beta2),
            eps=optimizer.adam_eps,
            weight_decay=optimizer.weight_decay,
        )
        self.optimizer: Any = self._adam
        self._steps_per_block: int | None = None
        if kind == "badam":
            self._divide()
        self._state_bytes = 0

    def _divide(self) -> None:
        from badam import BlockOptimizer

        config = self.config
        partition = partition_from_config(config)
        schedule = block_schedule_from_config(config, partition, num_steps=data.num_iterations(config))
        steps_per_block = round(schedule.settings.mean_steps)
        if config.data.sft:
            options: dict[str, Any] = {"switch_mode": "random", "switch_block_every": steps_per_block}
        else:  # BAdam's first phase would be one step short, so `step` switches instead
            self._steps_per_block = steps_per_block
            blocks = block_prefixes(partition, is_llama=config.model.position_embedding_type == "rope")
            options = {"switch_mode": "ascending", "switch_block_every": 2**62, "block_prefix_list": blocks}
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # BAdam warns about fp32 weights, which are intended here
            parameters = list(self.model.named_parameters())
            self.optimizer = BlockOptimizer(
                base_optimizer=self._adam, named_parameters_list=parameters, verbose=0, **options
            )

    def step(self, batches: Sequence[data.Batch], *, iteration: int, rate: float) -> dict[str, Any]:
        """Train on these microbatches. Return a line of metrics, with BAdam's block because step times depend on it."""
        for group in self.optimizer.param_groups:
            group["lr"] = rate
        phase = (iteration - 1) // self._steps_per_block if self._steps_per_block else 0
        if phase and (iteration - 1) % (self._steps_per_block or 1) == 0:
            self.optimizer.switch_trainable_params(verbose=0)
        start = now()
        self.optimizer.zero_grad(set_to_none=True)
        num_tokens = sum(float(batch["loss_mask"].sum()) for batch in batches)
        loss = 0.0
        for batch in batches:
            part = self.summed_loss(batch) / num_tokens
            part.backward()
            loss += float(part.detach())
        trained = [parameter for parameter in self.model.parameters() if parameter.requires_grad]
        torch.nn.utils.clip_grad_norm_(trained, self.config.optimizer.clip_grad)
        seconds = now() - start
        # count before the step, which frees BAdam's gradients and may switch its block
        self._state_bytes = max(self._state_bytes, self._count_bytes())
        block = self.optimizer.active_param_prefixs[0] if self.optimizer is not self._adam else 0
        start = now()
        self.optimizer.step()
        return {
            "iteration": iteration,
            "phase": phase,
            "block": block,
            "loss": loss,
            "step_time_ms": (seconds + now() - start) * 1e3,
            "model_state_bytes": [self._state_bytes],
            "peak_memory_bytes": [memory.peak_memory_bytes()],
            "num_parameters": self.num_parameters,
        }

    def _count_bytes(self) -> int:
        """Count weights, gradients, BAdam's copies of active weights, and moments; shared storages count once."""
        weights = list(self.model.parameters())
        tensors = [*weights, *(weight.grad for weight in weights if weight.grad is not None)]
        tensors += getattr(self.optimizer, "param_idx2hp", {}).values()
        states = self._adam.state.values()
        tensors += [value for state in states for value in state.values() if torch.is_tensor(value)]
        storages = {tensor.untyped_storage().data_ptr(): tensor.untyped_storage().nbytes() for tensor in tensors}
        return sum(storages.values())

    def summed_loss(self, batch: data.Batch) -> Tensor:
        """Return the sum of the losses of all tokens in the loss mask."""
        # positions that start again separate texts
        logits = self.model(input_ids=batch["tokens"], position_ids=batch["position_ids"], use_cache=False).logits
        losses = torch.nn.functional.cross_entropy(
            logits.float().flatten(0, 1), batch["labels"].flatten(), reduction="none"
        )
        return (losses * batch["loss_mask"].flatten()).sum()

    @torch.no_grad()
    def mean_loss(self, batches: Iterator[data.Batch], count: int) -> float:
        """Return the loss per token in the loss mask, over the next `count` microbatches."""
        self.model.eval()
        total = num_tokens = 0.0
        for _ in range(count):
            batch = next(batches)
            total += float(self.summed_loss(batch))
            num_tokens += float(batch["loss_mask"].sum())
        self.model.train()
        return total / max(num_tokens, 1.0)


def build_splits(config: RunConfig, tokenizer: Any) -> data.Splits:
    """Build the samples of the training script."""
    steps = data.num_iterations(config)
    if config.data.sft:
        return data.plan_fine_tuning(config, tokenizer, steps).build()
    return data.plan_splits(config, tokenizer, steps).build()


class Evaluations:
    """The training script's evaluations; counts are in microbatches."""

    def __init__(self, config: RunConfig, peer: Peer, splits: data.Splits) -> None:
        self._config, self._peer, self._splits = config, peer, splits
        training = config.training
        self._per_step = data.global_batch_size(config) // training.micro_batch_size
        self._validation = data.batches(splits.validation, config, consumed_samples=0)

    def validation_loss(self) -> float:
        training, splits = self._config.training, self._splits
        if training.full_validation:
            steps = -(-splits.num_validation // data.global_batch_size(self._config))
            return self._peer.mean_loss(data.one_pass(splits.validation, self._config), steps * self._per_step)
        if training.eval_fixed:
            self._validation = data.batches(splits.validation, self._config, consumed_samples=0)
        return self._peer.mean_loss(self._validation, training.eval_iters * self._per_step)

    def test_loss(self) -> float:
        test = data.batches(self._splits.test, self._config, consumed_samples=0)
        return self._peer.mean_loss(test, self._config.training.eval_iters * self._per_step)


def train(config: RunConfig, peer: Peer, splits: data.Splits, metrics: MetricsFile) -> None:
    """Run all steps and evaluations."""
    training, num_steps = config.training, data.num_iterations(config)
    per_step = data.global_batch_size(config) // training.micro_batch_size
    batches = data.batches(splits.train, config, consumed_samples=0)
    evaluations = Evaluations(config, peer, splits) if training.eval_iters or training.full_validation else None
    schedule: dict[str, Any] = {}
    scheduler = build_scheduler(
        config, SimpleNamespace(param_groups=[schedule]), functools.partial(data.samples_after, config)
    )
    scheduler.step(0)
    for iteration in range(1, num_steps + 1):
        line = peer.step([next(batches) for _ in range(per_step)], iteration=iteration, rate=schedule["lr"])
        if iteration % config.report.log_interval == 0 or iteration == 1:
            metrics.write(line)
        scheduler.step(data.global_batch_size(config))
        if evaluations and iteration % training.eval_interval == 0:
            metrics.write({"iteration": iteration, "validation_loss": evaluations.validation_loss()})
    if evaluations:
        for name in ("validation_loss", "test_loss"):
            metrics.write({"iteration": num_steps, name: getattr(evaluations, name)(), "is_final": True})


def main(argv: Sequence[str]) -> None:
    with exit_on_error(ValueError, prog=PROG):
        parser = argparse.ArgumentParser(allow_abbrev=False)
        parser.add_argument("--peer", choices=PEERS)
        parser.add_argument("--count", action="store_true")
        parser.add_argument("--family", choices=("gpt", "llama"))
        options, words = parser.parse_known_args(argv)
        family = options.family or ("llama" if "--sft" in words else "gpt")
        config = parse_run_config(words, prog=PROG, defaults=FAMILY_DEFAULTS[family], world_size=1)
        config = config.replace_section("checkpoint", save=None, load=None, save_interval=None)
        if not device.has_cuda():
            threads.set_threads()
        distributed.initialize(backend="auto", timeout_minutes=10, tensor_size=1, pipeline_size=1)
        rng.seed_everything(config.training.seed)
        config = with_length(config, build_tokenizer(**vars(config.tokenizer)))
        training = config.training
        init_num_microbatches_calculator(0, None, data.global_batch_size(config), training.micro_batch_size, 1)
        tokenizer = build_tokenizer(**vars(config.tokenizer))
        splits = build_splits(config, tokenizer)
        if options.count:
            print(json.dumps({"steps": data.num_iterations(config), "validation": splits.num_validation}))
        else:
            if config.report.metrics_file is None:
                raise ValueError("--metrics-file: is required")
            if config.checkpoint.load_hf is None:
                divisor = config.model.make_vocab_size_divisible_by
                model = draw_model(config, padded_vocab_size(tokenizer.vocab_size, divisor, 1))
            else:
                model = load_model(config)
            metrics = MetricsFile(config.report.metrics_file, start_iteration=0)
            train(config, Peer(options.peer, config, model), splits, metrics)
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main(sys.argv[1:])
