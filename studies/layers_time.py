"""Compare the CPU time of a Llama's training step on transformers' layers, on Megatron Core's, and by Trainer.

    python studies/layers_time.py --rounds 3

Trains a Llama of 41 million parameters in turn by `pretrain_llama_bcd.py --bcd-num-blocks 1` with both implementations,
and by transformers' Trainer with torch's AdamW, with the same weights and batch sizes. A step's time is counted as in
stock_time.py. Prints the times of each round, and the ratios of the shortest ones.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from pathlib import Path
from typing import Any

sys.path.append(str(Path(__file__).resolve().parents[1] / "tools"))
sys.path.append(str(Path(__file__).resolve().parent))

from _parser import Parser, check_positive, command, run_main
from _processes import SCRIPTS
from stock_time import shortest_times

PROG = "studies/layers_time.py"
BATCH, SEQUENCE, VOCABULARY = 2, 256, 1024
FLAGS = (
    f"--bcd-num-blocks 1 --seq-length {SEQUENCE} --micro-batch-size {BATCH} --global-batch-size {BATCH} --lr 1e-4 "
    "--lr-decay-style constant --weight-decay 0 --mock-data --tokenizer-type NullTokenizer "
    f"--vocab-size {VOCABULARY - 1} --num-workers 0 --eval-iters 0 --log-interval 1"
)


def write_model(folder: str) -> None:
    """Write a random Llama."""
    import transformers

    sizes = {"hidden_size": 512, "intermediate_size": 1408, "num_hidden_layers": 12, "num_attention_heads": 8}
    config = transformers.LlamaConfig(**sizes, vocab_size=VOCABULARY, max_position_embeddings=SEQUENCE)
    transformers.LlamaForCausalLM(config).save_pretrained(folder)


def train(folder: str, steps: int) -> None:
    """Train the model of a folder by transformers' Trainer."""
    import torch
    from transformers import AutoModelForCausalLM, Trainer, TrainingArguments

    tokens = torch.randint(0, VOCABULARY, (BATCH * steps, SEQUENCE))
    samples: Any = [{"input_ids": each, "labels": each} for each in tokens]
    with tempfile.TemporaryDirectory() as output:
        arguments = TrainingArguments(
            output,
            max_steps=steps,
            per_device_train_batch_size=BATCH,
            optim="adamw_torch",
            learning_rate=1e-4,
            lr_scheduler_type="constant",
            logging_steps=1,
            save_strategy="no",
            report_to=[],
            use_cpu=True,
            disable_tqdm=True,
        )
        Trainer(AutoModelForCausalLM.from_pretrained(folder), arguments, train_dataset=samples).train()


@command(PROG)
def main(argv: list[str]) -> None:
    parser = Parser(prog=PROG, description=__doc__)
    parser.add_argument("--rounds", type=int, default=3, metavar="N", help="measurements of each (default: 3)")
    parser.add_argument("--trainer", metavar="FOLDER", help=argparse.SUPPRESS)
    parser.add_argument("--train-iters", type=int, help=argparse.SUPPRESS)
    options = parser.parse_args(argv)
    check_positive(options, "rounds")
    if options.trainer is not None:
        train(options.trainer, options.train_iters)
        return
    with tempfile.TemporaryDirectory(prefix="layers_time_") as folder:
        write_model(folder)
        ours = [sys.executable, SCRIPTS["llama"], *FLAGS.split(), "--load-hf", folder, "--transformer-impl"]
        ways = {
            "transformers": [*ours, "transformers"],
            "Megatron Core": [*ours, "local"],
            "Trainer": [sys.executable, PROG, "--trainer", folder],
        }
        best = shortest_times(ways, rounds=options.rounds)
    for name in ("Megatron Core", "Trainer"):
        print(
            f"CPU time of a step on transformers' layers over that of {name}: {best['transformers'] / best[name]:.3f}"
        )


if __name__ == "__main__":
    run_main(main)
