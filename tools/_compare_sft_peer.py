"""Fine-tunes transformers' model under the flags of a training script, as a method of tools/compare.py --task sft.

    python tools/_compare_sft_peer.py --peer {full,badam,lora} FLAG ...
    python tools/_compare_sft_peer.py --count FLAG ...

Weights of --load-hf, samples, masks, learning-rate schedule and evaluations are those of pretrain_llama_bcd.py with
these flags; weight decay, block order and the optimizer's arithmetic are the peer's. full: AdamW on all weights. badam:
BAdam (PyPI) with one layer a block, as it divides a model itself. lora: adapters of rank 16 on all linear layers of the
transformer (PyPI peft). --count prints the number of steps, and of validation sequences, and trains nothing. No
checkpoint is written: --save and --load are accepted, and a run that is killed starts again.
"""

from __future__ import annotations

import functools
import json
import os
import sys
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from types import SimpleNamespace
from typing import Any

sys.path.insert(0, os.path.dirname(os.path.dirname(os.path.abspath(__file__))))

import torch
from _compare_peer import model_state_bytes
from megatron.core.num_microbatches_calculator import init_num_microbatches_calculator

from megatron.bcd import data
from megatron.bcd.arguments import FAMILY_DEFAULTS, parse_run_config
from megatron.bcd.config import RunConfig
from megatron.bcd.metrics.sinks import MetricsFile
from megatron.bcd.optim.lr_schedule import build_scheduler
from megatron.bcd.runtime import device, distributed, memory, rng, threads
from megatron.bcd.runtime.exit import exit_on_error
from megatron.bcd.tokenizer import build_tokenizer
from megatron.bcd.training.pretrain import with_length

PROG = "tools/_compare_sft_peer.py"
PEERS = ("full", "badam", "lora")
LORA_RANK, LORA_ALPHA = 16, 32
LORA_MODULES = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]


class Peer:
    """A model of transformers, what of it is trained, and its optimizer."""

    def __init__(self, kind: str, config: RunConfig) -> None:
        from transformers import AutoModelForCausalLM

        assert config.checkpoint.load_hf is not None
        dtype = torch.bfloat16 if config.precision == "bf16" else torch.float32
        self.model = AutoModelForCausalLM.from_pretrained(
            config.checkpoint.load_hf, attn_implementation="sdpa", dtype=dtype
        ).to(device.current())
        self.num_parameters = sum(parameter.numel() for parameter in self.model.parameters())
        self._kind, self._config = kind, config
        if kind == "lora":
            self.model = _with_adapters(self.model)
        optimizer = config.optimizer
        adam = torch.optim.AdamW(
            [parameter for parameter in self.model.parameters() if parameter.requires_grad],
            lr=optimizer.lr,
            betas=(optimizer.adam_beta1, optimizer.adam_beta2),
            eps=optimizer.adam_eps,
            weight_decay=optimizer.weight_decay,
        )
        self.optimizer: Any = adam if kind != "badam" else _in_blocks(adam, self.model, round(config.bcd.mean_steps))
        self._state_bytes = 0

    def set_rate(self, rate: float) -> None:
        for group in self.optimizer.param_groups:
            group["lr"] = rate

    def step(self, batches: Sequence[data.Batch], *, iteration: int) -> dict[str, Any]:
        """One step on these microbatches; a line of metrics, with BAdam's block, whose times differ."""
        start = _now()
        self.optimizer.zero_grad(set_to_none=True)
        num_tokens = sum(float(batch["loss_mask"].sum()) for batch in batches)
        loss = 0.0
        for batch in batches:
            total = self.summed_loss(batch) / num_tokens
            total.backward()
            loss += float(total.detach())
        trained = [parameter for parameter in self.model.parameters() if parameter.requires_grad]
        torch.nn.utils.clip_grad_norm_(trained, self._config.optimizer.clip_grad)
        milliseconds = (_now() - start) * 1e3
        # before the step, which frees BAdam's gradients, and may switch its block
        self._state_bytes = max(self._state_bytes, self._bytes())
        block = {"block": self.optimizer.active_param_prefixs[0]} if self._kind == "badam" else {}
        start = _now()
        self.optimizer.step()
        return {
            "iteration": iteration,
            "loss": loss,
            "step_time_ms": milliseconds + (_now() - start) * 1e3,
            "model_state_bytes": [self._state_bytes],
            "peak_memory_bytes": [memory.peak_memory_bytes()],
            "num_parameters": self.num_parameters,
            **block,
        }

    def _bytes(self) -> int:
        is_blockwise = self._kind == "badam"
        base = self.optimizer.base_optimizer if is_blockwise else self.optimizer
        copies = list(self.optimizer.param_idx2hp.values()) if is_blockwise else []
        return model_state_bytes(self.model, base, copies)

    def summed_loss(self, batch: data.Batch) -> torch.Tensor:
        """Over the tokens that count."""
        mask = batch.get("attention_mask")
        logits = self.model(
            input_ids=batch["tokens"],
            position_ids=batch["position_ids"],
            attention_mask=None if mask is None else ~mask,
            use_cache=False,
        ).logits
        losses = torch.nn.functional.cross_entropy(
            logits.float().flatten(0, 1), batch["labels"].flatten(), reduction="none"
        )
        return (losses * batch["loss_mask"].flatten()).sum()

    @torch.no_grad()
    def mean_loss(self, batches: Iterator[data.Batch], count: int) -> float:
        """Per token that counts, over the next microbatches."""
        self.model.eval()
        total = num_tokens = 0.0
        for _ in range(count):
            batch = next(batches)
            total += float(self.summed_loss(batch))
            num_tokens += float(batch["loss_mask"].sum())
        self.model.train()
        return total / max(num_tokens, 1.0)


def _with_adapters(model: torch.nn.Module) -> torch.nn.Module:
    from peft import LoraConfig, get_peft_model

    settings = LoraConfig(
        r=LORA_RANK, lora_alpha=LORA_ALPHA, lora_dropout=0.0, target_modules=LORA_MODULES, task_type="CAUSAL_LM"
    )
    return get_peft_model(model, settings)


def _in_blocks(adam: torch.optim.Optimizer, model: torch.nn.Module, steps_per_block: int) -> Any:
    from badam import BlockOptimizer

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that weights are in fp32, which is what is compared
        return BlockOptimizer(
            base_optimizer=adam,
            named_parameters_list=list(model.named_parameters()),
            switch_block_every=steps_per_block,
            switch_mode="random",
            verbose=0,
        )


def _now() -> float:
    device.synchronize()
    return time.perf_counter()


class _Data:
    """Batches and evaluations as the training scripts have them."""

    def __init__(self, config: RunConfig) -> None:
        self.config, training = config, config.training
        assert training.global_batch_size is not None, "the parser fills it in"
        init_num_microbatches_calculator(0, None, training.global_batch_size, training.micro_batch_size, 1)
        plan = data.plan_fine_tuning(
            config, build_tokenizer(**vars(config.tokenizer)), data.num_iterations(config), least_steps_per_cycle=1
        )
        self.splits = plan.splits
        self.per_step = training.global_batch_size // training.micro_batch_size
        self.batches = data.batches(self.splits.train, config, consumed_samples=0)

    def validation_loss(self, peer: Peer) -> float:
        """On the whole split (--full-validation)."""
        global_batch = self.config.training.global_batch_size
        steps = -(-self.splits.num_validation // global_batch)
        return peer.mean_loss(data.one_pass(self.splits.validation, self.config), steps * self.per_step)

    def test_loss(self, peer: Peer) -> float:
        batches = data.batches(self.splits.test, self.config, consumed_samples=0)
        return peer.mean_loss(batches, self.config.training.eval_iters * self.per_step)


def train(config: RunConfig, peer: Peer, write: Callable[[dict[str, Any]], None]) -> None:
    """All steps and evaluations; `write` gets the lines of metrics."""
    source, training = _Data(config), config.training
    schedule: dict[str, Any] = {}
    scheduler = build_scheduler(
        config, SimpleNamespace(param_groups=[schedule]), functools.partial(data.samples_after, config)
    )
    scheduler.step(0)
    iteration = 0
    while iteration < data.num_iterations(config):
        iteration += 1
        peer.set_rate(schedule["lr"])
        line = peer.step([next(source.batches) for _ in range(source.per_step)], iteration=iteration)
        if iteration % config.report.log_interval == 0 or iteration == 1:
            write(line)
        scheduler.step(training.global_batch_size)
        if iteration % training.eval_interval == 0:
            write({"iteration": iteration, "validation_loss": source.validation_loss(peer)})
    write({"iteration": iteration, "validation_loss": source.validation_loss(peer), "is_final": True})
    write({"iteration": iteration, "test_loss": source.test_loss(peer), "is_final": True})


def counted(config: RunConfig) -> dict[str, int]:
    """What --count prints."""
    return {"steps": data.num_iterations(config), "validation": _Data(config).splits.num_validation}


def main(argv: Sequence[str]) -> None:
    with exit_on_error(ValueError, prog=PROG):
        kind, *words = argv
        if kind == "--peer":
            kind, *words = words
        if kind not in (*PEERS, "--count"):
            raise ValueError(f"{kind}: give --count, or --peer with one of {', '.join(PEERS)}")
        config = parse_run_config(words, prog=PROG, defaults=FAMILY_DEFAULTS["llama"], world_size=1)
        config = config.replace_section("checkpoint", save=None, load=None, save_interval=None)
        if not config.data.sft or config.checkpoint.load_hf is None:
            raise ValueError("--sft and --load-hf are needed")
        if not device.has_cuda():
            threads.set_threads()
        distributed.initialize(backend="auto", timeout_minutes=10, tensor_size=1, pipeline_size=1)
        rng.seed_everything(config.training.seed)
        config = with_length(config)
        if kind == "--count":
            print(json.dumps(counted(config)))
        else:
            if not config.training.full_validation or config.report.metrics_file is None:
                raise ValueError("--full-validation and --metrics-file are needed")
            metrics = MetricsFile(config.report.metrics_file, start_iteration=0)
            train(config, Peer(kind, config), metrics.write)
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main(sys.argv[1:])
