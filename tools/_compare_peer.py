"""Trains transformers' model with BAdam (PyPI `badam`) on what tools/_compare_export.py has written, and times it.

    python tools/_compare_peer.py FOLDER METRICS

The peer of tools/compare.py: BAdam's BlockOptimizer around PyTorch's AdamW, PyTorch's fused attention, the loss as
transformers computes it, no gradient checkpointing. A step is what our own training loop's timer covers: zeroed
gradients, microbatches forward and backward, the loss as a number, clipping, the optimizer. METRICS gets a line per
step, with the names that a training's --metrics-file has.
"""

from __future__ import annotations

import json
import os
import sys
import time
import warnings
from collections.abc import Iterator, Sequence
from typing import Any

sys.path.insert(0, os.path.dirname(os.path.dirname(os.path.abspath(__file__))))

import torch
from torch import Tensor

from megatron.bcd.runtime import device, memory

JOB_FILE, TENSORS_FILE = "job.json", "tensors.pt"  # as _compare_export.py, which would bring Megatron Core along


def build_model(job: dict[str, Any], weights: dict[str, Tensor]) -> torch.nn.Module:
    """transformers' model with our initial weights, on this process's device.

    Raises ValueError where it has another number of parameters, or a weight of ours has no place in it.
    """
    from transformers import GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM

    kinds = {"gpt": (GPT2LMHeadModel, GPT2Config), "llama": (LlamaForCausalLM, LlamaConfig)}
    model_class, config_class = kinds[job["form"]]
    model = model_class._from_config(config_class(**job["model"]), attn_implementation="sdpa", dtype=torch.float32)
    count = sum(parameter.numel() for parameter in model.parameters())
    if count != job["num_parameters"]:
        raise ValueError(f"{model_class.__name__} has {count:,} parameters, ours {job['num_parameters']:,}")
    unplaced = model.load_state_dict(weights, strict=False)
    # a tied head is no weight of its own
    if unplaced.unexpected_keys or set(unplaced.missing_keys) - {"lm_head.weight"}:
        raise ValueError(f"{model_class.__name__} and our model differ: {unplaced}")
    return model.to(device.current()).train()


class Peer:
    """One run."""

    def __init__(self, job: dict[str, Any], tensors: dict[str, Any]) -> None:
        from badam import BlockOptimizer

        self.job = job
        self.model = build_model(job, tensors["weights"])
        target = device.current()
        # [microbatches, B, S]
        self.tokens, self.labels = (tensors[name].to(target) for name in ("tokens", "labels"))
        memory.reset_peak_memory()
        adam = torch.optim.AdamW(
            self.model.parameters(),
            lr=job["lr"],
            betas=tuple(job["betas"]),
            eps=job["eps"],
            weight_decay=job["weight_decay"],
        )
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # that weights are in fp32, which is what is compared
            self.optimizer = BlockOptimizer(
                base_optimizer=adam,
                named_parameters_list=list(self.model.named_parameters()),
                block_prefix_list=job["blocks"],
                switch_block_every=2**62,  # its own first phase is one step short: `run` switches
                switch_mode="ascending",
                verbose=0,
            )

    def run(self) -> Iterator[dict[str, Any]]:
        """Train; a line of metrics per step."""
        steps_per_block, num_blocks = self.job["steps_per_block"], len(self.job["blocks"])
        model_state_bytes = 0
        for step in range(self.job["num_steps"]):
            phase = step // steps_per_block
            if step and step % steps_per_block == 0:
                self.optimizer.switch_trainable_params(verbose=0)
            start = self._now()
            loss = self._backward(step)
            active = [parameter for parameter in self.model.parameters() if parameter.requires_grad]
            torch.nn.utils.clip_grad_norm_(active, self.job["clip_grad"])
            backward_ms = (self._now() - start) * 1e3
            if step % steps_per_block == 1:  # from the second step on there are moments; the gradients go with the step
                model_state_bytes = self._model_state_bytes()
            start = self._now()
            self.optimizer.step()
            yield {
                "iteration": step + 1,
                "phase": phase,
                "block": phase % num_blocks,
                "loss": loss,
                "step_time_ms": backward_ms + (self._now() - start) * 1e3,
                "model_state_bytes": [model_state_bytes],
                "peak_memory_bytes": [memory.peak_memory_bytes()],
                "num_parameters": self.job["num_parameters"],
            }

    @staticmethod
    def _now() -> float:
        device.synchronize()
        return time.perf_counter()

    def _backward(self, step: int) -> float:
        """Gradients of one step; its mean loss."""
        num_microbatches = self.job["microbatches_per_step"]
        total = torch.zeros((), device=self.tokens.device)
        self.optimizer.zero_grad(set_to_none=True)
        for index in range(step * num_microbatches, (step + 1) * num_microbatches):
            # shift_labels: ours are the tokens that follow already
            labels = self.labels[index]
            loss = self.model(self.tokens[index], labels=labels, shift_labels=labels, use_cache=False).loss
            (loss / num_microbatches).backward()
            total += loss.detach()
        return float(total.item()) / num_microbatches

    def _model_state_bytes(self) -> int:
        """See `model_state_bytes`, with BAdam's copies of the active weights."""
        copies = list(self.optimizer.param_idx2hp.values())
        return model_state_bytes(self.model, self.optimizer.base_optimizer, copies)


def model_state_bytes(model: torch.nn.Module, optimizer: torch.optim.Optimizer, copies: Sequence[Tensor] = ()) -> int:
    """Weights, gradients, `copies` and moments: live storages, shared ones once."""
    weights = list(model.parameters())
    gradients = [weight.grad for weight in weights if weight.grad is not None]
    moments = [value for state in optimizer.state.values() for value in state.values() if torch.is_tensor(value)]
    storages = {one.untyped_storage().data_ptr(): one.untyped_storage().nbytes() for one in
                (*weights, *gradients, *copies, *moments)}  # fmt: skip
    return sum(storages.values())


def main(folder: str, metrics: str) -> None:
    with open(os.path.join(folder, JOB_FILE), encoding="utf-8") as file:
        job = json.load(file)
    tensors = torch.load(os.path.join(folder, TENSORS_FILE), weights_only=True)
    peer = Peer(job, tensors)
    with open(metrics, "w", encoding="utf-8") as file:
        for line in peer.run():
            print(json.dumps(line), file=file, flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
