"""tools/compare.py --task sft: fine-tuning a model that was trained here, by several methods (docs/fine_tuning.md).

Runs, tuning, seeds and resuming are those of studies/study.py; `_compare_sft_base` prepares model and records,
`_compare_sft_peer` trains on transformers, `_compare_sft_rows` makes the table.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import shlex
import sys
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

sys.path.insert(0, os.path.dirname(os.path.dirname(os.path.abspath(__file__))))

sys.path.append(os.path.join(os.path.dirname(os.path.dirname(os.path.abspath(__file__))), "studies"))

from _compare_sft_base import SIZES, Base, Records, layers_of, prepare, size_of
from _compare_sft_rows import Row, Trained, grid_lines, row_of, table
from _machine import cpu_model
from _parser import Parser
from filelock import FileLock, Timeout
from results import NAME, ROOT, Point, Result, Study, Variant, final_runs, grid, points
from study import Commands, Runner, make_folder, tell

PROG = "tools/compare.py"
PEERS = {"full": "full Adam", "badam": "BAdam (PyPI), transformers", "lora": "LoRA (peft), transformers"}
BASELINE, OURS = "full", "bcd"
EVALUATIONS, CYCLES = 8, 2
"""Of a run; with one layer a block three epochs of Alpaca at the preset's 50 steps are 1.4 cycles of 32 layers."""
_NEEDS = {"badam": ("badam", "transformers"), "lora": ("peft", "transformers")}
_PEER_PROGRAM = "tools/_compare_sft_peer.py"


def add_flags(parser: Parser) -> None:
    """Flags of --task sft alone."""
    shared = ROOT.parent / "shared" / "data"
    group = parser.add_argument_group("fine-tuning", "with --task sft")
    add = group.add_argument
    add("--peers", metavar="LIST", help=f"beside the BCD preset: of {', '.join(PEERS)}, with commas (default: all)")
    add("--data", type=Path, default=shared / "alpaca" / "alpaca_5000.jsonl", metavar="FILE", help="records of --sft")
    add("--pretrain-text", type=Path, default=shared / "wikitext-2" / "train.txt", metavar="FILE",
        help="what the model is trained on first")  # fmt: skip
    add("--base", type=Path, metavar="FOLDER", help="a model in Hugging Face's format, with its tokenizer, that is "
        "fine-tuned in place of one that is trained here")  # fmt: skip
    add("--size", choices=tuple(SIZES), default="small", help="of the model (default: small, 11 M weights in layers)")
    add("--variant", action="append", default=[], metavar="NAME=FLAGS", help="one more row: the BCD preset with these "
        "flags of the training scripts besides; may be given several times")  # fmt: skip
    add("--global-batch-size", type=int, metavar="N", help="sequences of a step of fine-tuning (default: the size's)")
    add("--bf16", action="store_true", help="fine-tune in bf16, with fp32 main parameters (BCD and full Adam), "
        "BAdam's fp32 copies, fp32 adapters (default: fp32)")  # fmt: skip
    add("--base-steps", type=int, metavar="N", help="of training on the text (default: the size's)")
    add("--records", type=int, metavar="N", help="the first N of --data (default: all)")
    add("--split", default="90,5,5", metavar="LIST", help="of the records (default: 90,5,5)")
    add("--num-epochs", type=float, default=3.0, metavar="X", help="of fine-tuning (default: 3)")
    add("--learning-rates", default="1e-4,3e-4,1e-3,3e-3", metavar="LIST", help="grid of every method (default: "
        "1e-4,3e-4,1e-3,3e-3)")  # fmt: skip
    add("--seeds", default="1,2,3", metavar="LIST", help="the first one tunes (default: 1,2,3)")
    add("--step-times", type=int, default=0, metavar="N", help="when all runs are done, time 60 steps of every "
        "method in turn, N times (default: 0, times come from the runs)")  # fmt: skip
    add("--max-minutes", type=float, metavar="X", help="start no run after this time; a later start goes on")


def parse_arguments(argv: Sequence[str]) -> argparse.Namespace:
    """The checked command line of --task sft.

    Raises:
        ValueError: a flag is unknown, or its value does not fit.
    """
    parser = Parser(prog=f"{PROG} --task sft", description=__doc__)
    parser.add_argument("--task", choices=("sft",), required=True)
    parser.add_argument("--output", type=Path, default=Path("out", "sft"), metavar="FOLDER", help="(default: out/sft)")
    add_flags(parser)
    arguments = parser.parse_args(argv)
    arguments.learning_rates = _numbers(arguments.learning_rates, float, "--learning-rates")
    arguments.seeds = _numbers(arguments.seeds, int, "--seeds")
    words = list(PEERS) if arguments.peers is None else [word.strip() for word in arguments.peers.split(",")]
    for word in words:
        if word not in PEERS or words.count(word) > 1:
            what = f"{word or 'an empty name'} must be one of {', '.join(PEERS)}, once"
            raise ValueError(f"--peers {arguments.peers}: {what}")
    arguments.peers = [name for name in PEERS if name in words]
    if len(parts := _numbers(arguments.split, float, "--split", distinct=False)) != 3:
        raise ValueError(f"--split {arguments.split}: must be three shares, of training, validation and test")
    arguments.split = ",".join(f"{part:g}" for part in parts)
    if arguments.num_epochs <= 0:
        raise ValueError(f"--num-epochs {arguments.num_epochs:g}: must be more than 0")
    for flag, least in (("base_steps", 1), ("global_batch_size", 1), ("step_times", 0)):
        value = getattr(arguments, flag)
        if value is not None and value < least:
            raise ValueError(f"--{flag.replace('_', '-')} {value}: must be at least {least}")
    arguments.variants = _variants(arguments.variant)
    if arguments.records is not None and arguments.records < 20:
        raise ValueError(f"--records {arguments.records}: must be at least 20, which are divided into three splits")
    return arguments


def _variants(entries: Sequence[str]) -> dict[str, str]:
    """Flags by name. Raises ValueError for an entry that is not NAME=FLAGS, or a name that is taken."""
    found: dict[str, str] = {}
    for entry in entries:
        name, _, flags = (part.strip() for part in entry.partition("="))
        if not NAME.fullmatch(name) or not flags.startswith("--") or name in found or name in (OURS, *PEERS):
            raise ValueError(f"--variant {entry}: must be a new NAME (letters, digits, . _ -), =, and flags")
        found[name] = flags
    return found


def _numbers(text: str, kind: Any, flag: str, *, distinct: bool = True) -> tuple[Any, ...]:
    try:
        found = tuple(kind(word) for word in text.split(","))
    except ValueError:
        raise ValueError(f"{flag} {text}: must be numbers with commas between them") from None
    if (distinct and len(set(found)) < len(found)) or (kind is float and min(found) <= 0):
        numbers = "different numbers" if distinct else "numbers"
        raise ValueError(f"{flag} {text}: must be {numbers}" + (" above 0" if kind is float else ""))
    return found


def check(arguments: argparse.Namespace) -> None:
    """Raises ValueError for what can be found before anything runs."""
    for name in ("data",) if arguments.base is not None else ("data", "pretrain_text"):
        path = getattr(arguments, name)
        if not path.is_file():
            raise ValueError(f"--{name.replace('_', '-')} {path}: no such file")
    if arguments.base is not None:
        layers_of(arguments.base)
    with open(arguments.data, "rb") as file:
        if file.read(1024).lstrip().startswith(b"["):
            raise ValueError(f"--data {arguments.data}: is a JSON list; give a file with one record per line")
    for peer in arguments.peers:
        missing = [name for name in _NEEDS.get(peer, ()) if importlib.util.find_spec(name) is None]
        if missing:
            raise ValueError(f"--peers {peer} needs {' and '.join(missing)}: pip install {' '.join(missing)} (the pins "
                             "are in requirements.txt)")  # fmt: skip


def study_of(arguments: argparse.Namespace, base: Base, records: Records) -> Study:
    """All runs, as studies/study.py knows them; ``{data}`` is the prepared folder."""
    size = size_of(arguments)
    every = max(1, records.steps // EVALUATIONS)
    tokenizer = " ".join(map(str, base.tokenizer_flags(f"{{data}}/{base.tokenizer.name}")))
    flags = (
        f"--sft --load-hf {{data}}/{base.model.name} --data-path {{data}}/{records.path.name} --split {records.split} "
        f"--data-cache-path {{data}}/cache {tokenizer} "
        f"--seq-length {size.seq_length} --sft-drop-long "
        f"--micro-batch-size {size.micro_batch} --global-batch-size {size.global_batch} --train-iters {{steps}} "
        f"--lr-decay-style cosine --min-lr {{lr/10}} --lr-warmup-iters {{steps/30}} "
        f"{'--bf16 ' if arguments.bf16 else ''}"
        f"--weight-decay 0.01 --clip-grad 1 --hidden-dropout 0 --attention-dropout 0 --num-workers 0 --log-interval 1 "
        f"--eval-interval {every} --full-validation --eval-iters {records.test_iters} "
        f"--bcd-steps-per-block {max(2, records.steps // (CYCLES * base.num_layers))}"
    )
    labels = {OURS: "BCD, preset finetune"} | PEERS
    own = {BASELINE: "--bcd-num-blocks 1", OURS: "--bcd-preset finetune"}
    names = [name for name in (BASELINE, OURS, "badam", "lora") if name == OURS or name in arguments.peers]
    methods = [
        Variant(name=name, label=labels[name], flags=own.get(name, ""), program=_program(name)) for name in names
    ]
    after = names.index(OURS) + 1
    methods[after:after] = [
        Variant(name=name, label=f"BCD, {name}: {given}", flags=f"{own[OURS]} {given}")
        for name, given in arguments.variants.items()
    ]
    return Study(
        path="sft",
        program="pretrain_llama_bcd.py",
        flags=flags,
        checkpoint_flags="--save {folder} --load {folder} --save-interval {steps/3}",
        steps=records.steps,
        models=(Variant(name=arguments.size),),
        data=(Variant(name="records"),),
        methods=tuple(methods),
        baseline=BASELINE if BASELINE in names else OURS,
        seeds=arguments.seeds,
        learning_rates=arguments.learning_rates,
        extend=1,
        jobs=1,
    )


def _program(name: str) -> str | None:
    return f"{_PEER_PROGRAM} --peer {name}" if name in _NEEDS else None


def rows_of(runner: Runner, *, tokens_per_step: float) -> list[Row]:
    """Of everything that has finished, in the study's order."""
    study = runner.study
    trained = {point: _trained(runner, point, tokens_per_step) for point in points(study)}
    full = {one.seed: one for point, runs in trained.items() if point.method.name == BASELINE for one in runs}
    rows = []
    for point, runs in trained.items():
        tried = grid(study, point, runner.lookup)
        rates = [(lr, value if value < float("inf") else None) for lr, value in sorted(tried.values.items())]
        head: dict[str, Any] = {"method": point.method.name, "label": point.method.label, "rates": rates}
        if runs and tried.best_so_far is not None:
            rows.append(row_of(runs, full, lr=tried.best_so_far, lr_at_edge=tried.at_edge and len(rates) > 1, **head))
        elif rates:
            failed = [runner.lookup(point.run(lr, study.seeds[0])) for lr, _ in rates]
            reason = next((one.failure for one in failed if one and one.failure), "no finite loss")
            rows.append(Row(failure=reason, **{**head, "rates": tuple(rates)}))
    return rows


def _trained(runner: Runner, point: Point, tokens_per_step: float) -> list[Trained]:
    """The method's runs at its best rate so far."""
    lr = grid(runner.study, point, runner.lookup).best_so_far
    found = []
    for run in [] if lr is None else final_runs(runner.study, point, lr)[0]:
        result = runner.lookup(run)
        if result is None or result.validation is None or result.step_ms is None:
            continue
        curve = {step: value for step, value in result.curve if value is not None}
        curve[result.steps or 0] = result.validation
        found.append(
            Trained(
                seed=run.seed,
                curve=tuple(sorted(curve.items())),
                step_ms=runner.step_ms(point) or result.step_ms,
                tokens_per_step=tokens_per_step,
                state_bytes=round((result.state_bytes_per_parameter or 0) * (result.num_parameters or 0)),
                peak_bytes=result.peak_bytes or 0,
                test=result.test,
                commit=result.commit,
            )
        )
    return found


def compare(argv: Sequence[str]) -> int:
    """Prepare, run what is missing, print, write; the exit code. Raises ValueError for a user's mistake."""
    arguments = parse_arguments(argv)
    check(arguments)
    for name in ("data", "pretrain_text"):  # the tools that read them start in the repository
        setattr(arguments, name, getattr(arguments, name).resolve())
    folder = arguments.output.resolve()
    make_folder(folder, flag="--output")
    try:
        with FileLock(folder / ".lock", timeout=0):
            base, records = prepare(arguments, folder)
            study = study_of(arguments, base, records)
            commands = Commands(study=study, texts={}, data_folder=base.folder, folder=base.folder / "runs")
            results_file = base.folder / f"results-{size_of(arguments).global_batch}{'-bf16' * arguments.bf16}.csv"
            runner = Runner(commands, results_file)
            tell(f"{len(runner.todo()[0])} runs can start now; {records.steps} steps each, in {base.folder}")
            size = size_of(arguments)

            def report() -> list[Row]:
                rows = rows_of(runner, tokens_per_step=float(size.seq_length * size.global_batch))
                text = document(rows, arguments, base, records, argv, timing=runner.timing)
                (folder / "table.md").write_text(text, encoding="utf-8")
                figures = {"command": shlex.join(argv), "base": base.about, "steps": records.steps,
                           "rows": [asdict(row) for row in rows]}  # fmt: skip
                (folder / "results.json").write_text(json.dumps(_finite(figures), indent=1) + "\n", encoding="utf-8")
                return rows

            runner.run(max_minutes=arguments.max_minutes, finished=report)
            rows = report()
            if arguments.step_times and not runner.todo()[0] and not any(row.failure for row in rows):
                runner.take_times(arguments.step_times)
                rows = report()
    except Timeout:
        raise ValueError(f"--output {folder} is in use by another {PROG}; wait for it, or give another one") from None
    print((folder / "table.md").read_text(encoding="utf-8"))
    print(f"wrote {folder / 'table.md'} and {folder / 'results.json'}")
    return 1 if not rows or any(row.failure for row in rows) else 0


def document(
    rows: Sequence[Row],
    arguments: argparse.Namespace,
    base: Base,
    records: Records,
    argv: Sequence[str],
    *,
    timing: Result | None,
) -> str:
    """The table with what it rests on, as Markdown."""
    size = size_of(arguments)
    commits = ", ".join(sorted({commit for row in rows for commit in row.commits})) or "unknown"
    timed = (
        f"Step times: 60 steps of every method in turn, median of {timing.rounds} rounds, commit {timing.commit}."
        if timing
        else "Step times: of the runs, which may have shared the machine."
    )
    lines = [
        "# Fine-tuning side by side",
        "",
        f"`python {PROG} {shlex.join(argv)}`",
        "",
        *table(rows, baseline=BASELINE, num_seeds=len(arguments.seeds)),
        "",
        "Validation loss at the end, by learning rate (first seed):",
        "",
        *grid_lines(rows),
        "",
        f"{base.words}. Then {records.steps:,} steps of {size.global_batch} sequences of {size.seq_length} tokens, "
        f"{arguments.num_epochs:g} epochs of {records.count:,} records ({records.split} into training, validation and "
        f"test), in {'bf16' if arguments.bf16 else 'fp32'}. Seeds: "
        f"{', '.join(map(str, arguments.seeds))}; ± is half the range over them, *n of m seeds*: those that have run. "
        "To full: best validation loss, "
        "relative. At equal time: after the time that full training took, or at the end where that was earlier. Cost: "
        "training time to full Adam's lowest validation loss, over full Adam's own. Times count training steps "
        "only. Model state: weights, gradients, moments, adapters. Peak memory: of the process, with its libraries. "
        "*edge*: the best rate is the grid's first or last.",
        "",
        f"{cpu_model()}, one thread; commit {commits}. {timed}",
        "",
    ]
    return "\n".join(lines)


def _finite(value: Any) -> Any:
    """JSON has no NaN."""
    if isinstance(value, dict):
        return {key: _finite(one) for key, one in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(one) for one in value]
    return None if isinstance(value, float) and value != value else value
