"""Compare the CPU time of one block's training step with other programs', for the same flags or the same model.

    python studies/step_time.py --stock "torchrun --nproc-per-node 1 Megatron-LM/pretrain_gpt.py"
    python studies/step_time.py --layers

--stock: a GPT of 38 million parameters by this command, which starts pretrain_gpt.py of Megatron-LM core_v0.16.1, and
by `pretrain_gpt_bcd.py`. --layers: a Llama of 41 million parameters by `pretrain_llama_bcd.py` on transformers' layers
and on Megatron Core's, and by transformers' Trainer with torch's AdamW. Data is mocked. A step's time is the difference
between a long and a short run over the difference of their steps, so that the start does not count. Programs run in
turn. Prints the times of each round, and the ratios of the shortest ones, as other work only adds CPU time.
"""

from __future__ import annotations

import argparse
import resource
import shlex
import sys
import tempfile
from pathlib import Path
from typing import Any

sys.path.append(str(Path(__file__).resolve().parents[1] / "tools"))

from _parser import Parser, check_positive, command, run_main
from _processes import SCRIPTS, CannotRun, run

PROG = "studies/step_time.py"
BATCH, SEQUENCE, VOCABULARY = 2, 256, 1024
FLAGS = (
    f"--seq-length {SEQUENCE} --micro-batch-size {BATCH} --global-batch-size {BATCH} --lr 1e-4 --weight-decay 0 "
    f"--lr-decay-style constant --mock-data --tokenizer-type NullTokenizer --vocab-size {VOCABULARY - 1} "
    "--num-workers 0 --eval-iters 0 --log-interval 1"
)
GPT = (
    "--num-layers 12 --hidden-size 512 --num-attention-heads 8 --max-position-embeddings 256 --seed 1 "
    "--hidden-dropout 0 --attention-dropout 0 --use-cpu-initialization --eval-interval 1000"
)
SHORT, LONG = 3, 23
"""Steps of the two runs."""


def cpu_seconds(words: list[str], log: Path) -> float:
    """Run a command and return the CPU time of its processes. Raises CannotRun if it fails."""
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    run(words, log)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


def step_seconds(words: list[str], log: Path) -> float:
    """Return the CPU time of a training step."""
    short, long = (cpu_seconds([*words, "--train-iters", str(steps)], log) for steps in (SHORT, LONG))
    return (long - short) / (LONG - SHORT)


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
    what = parser.add_mutually_exclusive_group(required=True)
    what.add_argument("--stock", metavar="COMMAND", help="starts stock's pretrain_gpt.py")
    what.add_argument("--layers", action="store_true", help="compare implementations of a Llama's layers")
    what.add_argument("--trainer", metavar="FOLDER", help=argparse.SUPPRESS)
    parser.add_argument("--rounds", type=int, default=3, metavar="N", help="measurements of each (default: 3)")
    parser.add_argument("--train-iters", type=int, help=argparse.SUPPRESS)
    options = parser.parse_args(argv)
    check_positive(options, "rounds")
    if options.trainer is not None:
        train(options.trainer, options.train_iters)
        return
    with tempfile.TemporaryDirectory(prefix="step_time_") as folder:
        if options.layers:
            write_model(folder)
            words = [sys.executable, SCRIPTS["llama"], *FLAGS.split(), "--bcd-num-blocks", "1", "--load-hf", folder]
            ways = {
                "transformers' layers": [*words, "--transformer-impl", "transformers"],
                "Megatron Core's layers": [*words, "--transformer-impl", "local"],
                "Trainer": [sys.executable, PROG, "--trainer", folder],
            }
        else:
            flags = [*FLAGS.split(), *GPT.split()]
            ways = {
                "one block": [sys.executable, SCRIPTS["gpt"], *flags, "--bcd-num-blocks", "1"],
                "stock": [*shlex.split(options.stock), *flags],
            }
        times: dict[str, list[float]] = {name: [] for name in ways}
        for number in range(options.rounds):
            for name, words in ways.items():
                try:
                    times[name].append(step_seconds(words, Path(folder, "log")))
                except CannotRun as error:
                    raise ValueError(f"{name}: {error}") from None
            text = ", ".join(f"{name} {seconds[-1]:.3f} s" for name, seconds in times.items())
            print(f"round {number + 1}: {text}", flush=True)
    first, *others = times
    for other in others:
        print(f"CPU time of a step, {first} over {other}: {min(times[first]) / min(times[other]):.3f}")


if __name__ == "__main__":
    run_main(main)
