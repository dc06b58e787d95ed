"""Time steps of other systems on a model of random weights: the peers of a run of this project with the same flags.

    python studies/peer_steps.py --peer {trainer,deepspeed} --json FILE FLAG ...     FLAG: of pretrain_llama_bcd.py
    python studies/peer_steps.py --peer megatron --json FILE FLAG ...                FLAG: of stock's pretrain_gpt.py

trainer: transformers' Trainer with gradient checkpointing in bf16, and with Liger and 8-bit AdamW where they can be
imported. deepspeed: the same with AdamW by ZeRO-3, weights and optimizer in host memory. megatron: the program in the
folder MEGATRON_LM. The file says what ran, or in `skipped` why nothing did.
"""

from __future__ import annotations

import argparse
import importlib
import json
import os
import re
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch

from megatron.bcd.arguments import FAMILY_DEFAULTS, parse_run_config
from megatron.bcd.huggingface.run_network import run_architecture
from megatron.bcd.runtime import device

OFFLOAD = {"device": "cpu", "pin_memory": True}
ZERO_3 = {
    "bf16": {"enabled": True}, "gradient_clipping": "auto", "train_micro_batch_size_per_gpu": "auto",
    "gradient_accumulation_steps": "auto", "optimizer": {"type": "AdamW", "params": {"lr": "auto"}},
    "zero_optimization": {"stage": 3, "offload_param": OFFLOAD, "offload_optimizer": OFFLOAD},
}  # fmt: skip
"""DeepSpeed's configuration."""
WITHOUT_ENGINE = (
    "--transformer-impl local --no-persist-layer-norm --no-gradient-accumulation-fusion --no-masked-softmax-fusion"
    " --no-rope-fusion"
)
"""Stock's flags without Transformer Engine and Apex."""


def fault(name: str) -> str:
    """Return why a package cannot be used, in one line; an empty text if it can. DeepSpeed's extension is built."""
    try:
        module = importlib.import_module(name)
        if name == "deepspeed":
            module.ops.op_builder.CPUAdamBuilder().load()
    except Exception as error:
        return f"{name}: {type(error).__name__}: {' '.join(str(error).split())[:150]}"
    return ""


def train(words: Sequence[str], folder: Path, *, with_deepspeed: bool) -> dict[str, Any]:
    """Train transformers' model of these flags. Return the ms of each step, and the device's peak in bytes."""
    from transformers import AutoConfig, AutoModelForCausalLM, Trainer, TrainerCallback, TrainingArguments

    parts = {"liger_kernel.transformers": "Liger", "bitsandbytes": "8-bit AdamW"}
    faults = {part: fault(name) if device.has_cuda() else "no GPU" for name, part in parts.items()}
    if with_deepspeed:
        faults["8-bit AdamW"] = "ZeRO-3 has its own"
        os.environ.update(RANK="0", LOCAL_RANK="0", WORLD_SIZE="1", MASTER_ADDR="127.0.0.1", MASTER_PORT="29577")
    config = parse_run_config(words, prog="studies/peer_steps.py", defaults=FAMILY_DEFAULTS["llama"], world_size=1)
    training, length = config.training, config.model.seq_length
    batch = training.global_batch_size or training.micro_batch_size
    options = TrainingArguments(
        output_dir=str(folder), save_strategy="no", report_to=[], max_steps=training.train_iters or 1,
        learning_rate=1e-5, per_device_train_batch_size=training.micro_batch_size, bf16=True,
        use_cpu=not device.has_cuda(),
        gradient_accumulation_steps=batch // training.micro_batch_size, gradient_checkpointing=True,
        use_liger_kernel=not faults["Liger"], optim="adamw_torch_fused" if faults["8-bit AdamW"] else "adamw_8bit",
        deepspeed=ZERO_3 if with_deepspeed else None,
    )  # fmt: skip
    _, values = run_architecture(config, is_on_gpu=False, vocab_size=(config.tokenizer.vocab_size or 0) + 1)
    settings = AutoConfig.for_model(values.pop("model_type"), **values)
    with torch.device("cpu" if with_deepspeed else device.current()):
        model = AutoModelForCausalLM.from_config(settings, attn_implementation="sdpa", dtype=torch.bfloat16)
    times: list[float] = []

    class Clock(TrainerCallback):
        """Appends the start of each step, and replaces it by its duration in ms."""

        def on_step_begin(self, *_: Any, **__: Any) -> None:
            device.synchronize()
            times.append(time.perf_counter())

        def on_step_end(self, *_: Any, **__: Any) -> None:
            device.synchronize()
            times[-1] = 1e3 * (time.perf_counter() - times[-1])

    tokens = torch.randint(settings.vocab_size, (batch * options.max_steps, length))
    data = [{"input_ids": row, "labels": row} for row in tokens]
    Trainer(model=model, args=options, train_dataset=data, callbacks=[Clock()]).train()
    used = ", ".join(f"without {part} ({why})" if why else part for part, why in faults.items())
    peak = torch.cuda.max_memory_allocated() if device.has_cuda() else 0
    used += f", {options.optim.value}" * (not with_deepspeed)
    return {"how": f"{'ZeRO-3, offload' if with_deepspeed else 'Trainer'}, {used}", "step_ms": times, "peak": peak}


def run_stock(folder: Path, words: Sequence[str]) -> dict[str, Any]:
    """Run stock's program and return what its log says."""
    missing = fault("transformer_engine")
    program = [sys.executable, str(folder / "pretrain_gpt.py"), *words, *(WITHOUT_ENGINE.split() if missing else ())]
    alone = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29578"}
    done = subprocess.run(program, env=os.environ | alone | {"CUDA_DEVICE_MAX_CONNECTIONS": "1"}, capture_output=True,
                          text=True)  # fmt: skip
    print(done.stdout, done.stderr, sep="\n")
    if done.returncode:
        sys.exit(done.returncode)
    times = [float(ms) for ms in re.findall(r"elapsed time per iteration \(ms\): ([\d.]+)", done.stdout)]
    peaks = [float(mb) * 2**20 for mb in re.findall(r"max allocated: ([\d.]+)", done.stdout)]
    how = f"stock Megatron-LM{', local layers' * bool(missing)}"
    return {"how": how, "step_ms": times, "peak": max(peaks, default=0.0)}


def measure(peer: str, words: Sequence[str], folder: Path) -> dict[str, Any]:
    """Return the times of a peer, or why it is skipped."""
    if peer == "megatron":
        stock = Path(os.environ.get("MEGATRON_LM", ""))
        if not (stock / "pretrain_gpt.py").is_file():
            return {"skipped": "MEGATRON_LM names no folder of Megatron-LM"}
        return run_stock(stock, words)
    needed = ["accelerate"] + ["deepspeed"] * (peer == "deepspeed")
    if reason := next(filter(None, map(fault, needed)), ""):
        return {"skipped": reason}
    return train(words, folder, with_deepspeed=peer == "deepspeed")


def main(argv: Sequence[str]) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--peer", choices=("trainer", "deepspeed", "megatron"), required=True)
    parser.add_argument("--json", type=Path, required=True, metavar="FILE")
    options, words = parser.parse_known_args(argv)
    result = measure(options.peer, words, options.json.parent / "trainer")
    batch, length = (int(words[words.index(flag) + 1]) for flag in ("--global-batch-size", "--seq-length"))
    result["step_tokens"] = batch * length
    print(result)
    options.json.write_text(json.dumps(result) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main(sys.argv[1:])
