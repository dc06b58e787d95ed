"""The self-test of tools/check_machine.py: train on all ranks and compare with one process of this machine."""

from __future__ import annotations

import itertools
import json
import random
import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from _processes import SCRIPTS, CannotRun, launcher, read_metrics, run

PASS, FAIL, SKIP = "PASS", "FAIL", "SKIP"


@dataclass(frozen=True, kw_only=True)
class Check:
    """The result for one part of the machine or of the self-test."""

    part: str
    verdict: str
    """PASS, FAIL or SKIP."""
    detail: str
    """What was measured or detected; for SKIP, the reason."""
    remedy: str = ""
    """For FAIL: what to do."""
    figures: Mapping[str, Any] = field(default_factory=dict)
    """Values for --json."""


def passed(part: str, detail: str, **figures: Any) -> Check:
    return Check(part=part, verdict=PASS, detail=detail, figures=figures)


def failed(part: str, detail: str, *, remedy: str, **figures: Any) -> Check:
    return Check(part=part, verdict=FAIL, detail=detail, remedy=remedy, figures=figures)


def skipped(part: str, reason: str) -> Check:
    return Check(part=part, verdict=SKIP, detail=reason)


SAVE_INTERVAL = 4
NO_GPU = {"CUDA_VISIBLE_DEVICES": ""}
FLAGS: dict[str, Any] = {
    "num_layers": 4, "hidden_size": 64, "num_attention_heads": 4, "seq_length": 64, "max_position_embeddings": 64,
    "global_batch_size": 8, "lr": 1e-3, "min_lr": 1e-4, "lr_decay_style": "cosine", "lr_warmup_iters": 2,
    "weight_decay": 0.1, "clip_grad": 1.0, "adam_beta2": 0.95, "hidden_dropout": 0, "attention_dropout": 0,
    "openai_gelu": True, "seed": 1234, "tokenizer_type": "NullTokenizer", "vocab_size": 256,
    "use_cpu_initialization": True, "split": "90,10,0", "num_workers": 0, "log_interval": 1, "eval_iters": 0,
}  # fmt: skip
"""Flags of every run. GELU is written as a GPU's fused kernel computes it, and the learning rate is one at which
rounding errors hardly grow."""
ONE_BLOCK = {"bcd_num_blocks": 1, "train_iters": 6}
SHORT = {"bcd_num_blocks": 2, "train_iters": 8, "bcd_steps_per_block": 2}
LONG = {"bcd_num_blocks": 2, "train_iters": 24, "bcd_steps_per_block": 3}
LAYOUTS = {
    "spread": SHORT | {"bcd_layout": "spread"},
    "strided": SHORT | {"bcd_layout": "strided"},
    "submodel": LONG | {"bcd_layout": "submodel"},
    "interleaved": SHORT | {"bcd_layout": "interleaved"},
}
SAME_BLOCKS = {
    "spread": {"bcd_layout": "strided"},
    "strided": {},
    "submodel": {"bcd_layout": "spread", "bcd_num_blocks": 4},
    "interleaved": {"bcd_layout": "spread"},
}
"""Flags with which one stage forms the same blocks as two stages."""
PREFIX_CACHE = {"bcd_num_blocks": 2, "train_iters": 6, "bcd_steps_per_block": 3, "bcd_sample_ratio": 0.026}
TOLERANCE = {"fp32": 2e-4, "tf32": 3e-3, "bf16": 5e-3}
"""Relative tolerance of losses; ten times as much for gradient norms, which are not compared in bf16."""


Steps = tuple[Mapping[str, Any], ...]
"""The metrics lines of a run's training steps."""


def losses(steps: Steps) -> list[float]:
    return [step["loss"] for step in steps]


def flag_words(values: Mapping[str, Any]) -> list[str]:
    """Return the flags as words of a command line."""
    words: list[str] = []
    for name, value in values.items():
        flag = f"--{name.replace('_', '-')}"
        words += [flag] if value is True else [] if value is False else [flag, str(value)]
    return words


def write_data(folder: Path) -> str:
    """Write an indexed dataset of 200 random walks over 250 tokens, the same on every machine; return its prefix.
    Raises CannotRun if tools/preprocess_data.py failed."""
    draw, walks = random.Random(5), []
    for _ in range(200):
        steps = draw.choices(range(4), k=draw.randrange(20, 200))
        walks.append(" ".join(str(token % 250) for token in itertools.accumulate(steps, initial=draw.randrange(250))))
    (folder / "walks.txt").write_text("\n".join(walks))
    files = ["--input", str(folder / "walks.txt"), "--output-prefix", str(folder / "walks"), "--append-eod"]
    tokenizer = ["--tokenizer-type", FLAGS["tokenizer_type"], "--vocab-size", str(FLAGS["vocab_size"])]
    command = [sys.executable, "tools/preprocess_data.py", *files, *tokenizer]
    run(command, folder / "data.log", environment=NO_GPU)
    return str(folder / "walks_text_document")


@dataclass(frozen=True, kw_only=True)
class Runner:
    """Starts the training script under torchrun on this machine's ranks. Files go to `folder`."""

    folder: Path
    num_ranks: int
    on_gpu: bool
    flags: Mapping[str, Any]
    """Flags of every run, which a run's flags override."""
    seconds: float = 300.0
    """Time limit of one run."""
    environment: Mapping[str, str] = field(default_factory=dict)
    """Variables in addition to this process's."""

    @property
    def num_stages(self) -> int:
        """Number of pipeline stages in runs that can have several."""
        return 1 if self.num_ranks == 1 else 2

    def prepare(self) -> None:
        """Write the data and a checkpoint of initial weights, from which all runs start.

        The weights are drawn on the CPU as stock Megatron-LM does; a GPU would draw others. Raises CannotRun.
        """
        write_data(self.folder)
        no_step = {"train_iters": 1, "lr": 1e-30, "min_lr": 0, "lr_warmup_iters": 0}
        flags = {**no_step, "bcd_num_blocks": 1, "load": False, "save": self.folder / "weights"}
        self.train("weights", flags, num_ranks=1, on_cpu=True)

    def train(
        self,
        name: str,
        flags: Mapping[str, Any],
        *,
        num_ranks: int | None = None,
        on_cpu: bool = False,
        until: Callable[[], bool] = lambda: False,
    ) -> Steps:
        """Train on all ranks, or on `num_ranks`, from the initial weights unless `flags` has --load. Raises CannotRun
        if the run failed."""
        num_ranks = num_ranks or self.num_ranks
        stages = int(flags.get("pipeline_model_parallel_size", 1)) * int(flags.get("tensor_model_parallel_size", 1))
        values = {**self.flags, "micro_batch_size": 2 if num_ranks // stages <= 2 else 1}
        values["deterministic_mode"] = self.on_gpu and not on_cpu
        if "load" not in flags:
            values |= {"load": self.folder / "weights", "finetune": True}
        metrics = self.folder / f"{name}.jsonl"
        values |= {**flags, "data_path": self.folder / "walks_text_document", "metrics_file": metrics}
        environment = {**self.environment, **(NO_GPU if on_cpu else {})}
        command = [*launcher(num_ranks), SCRIPTS["gpt"], *flag_words(values)]
        run(command, self.folder / f"{name}.log", seconds=self.seconds, environment=environment, until=until)
        return tuple(line for line in read_metrics(metrics) if "loss" in line)


NUMERICS = "a kernel computes a different result: try without Transformer Engine and Apex, and another GPU"
MESSAGES = "read the run's log; NCCL_DEBUG=INFO shows how the GPUs are connected"


@dataclass(kw_only=True)
class SelfTest:
    """The parts of the self-test. They share runs, so one part may reuse another's."""

    runner: Runner
    fp32: str
    """Key of TOLERANCE for fp32 runs: tf32 if Transformer Engine multiplies fp32 matrices in TF32."""
    only: Callable[[str], bool] = field(default=lambda part: True)
    _runs: dict[Any, Steps] = field(default_factory=dict)

    def checks(self) -> Iterator[Check]:
        """Yield each part's result when it is known. Stops if the initial weights cannot be written."""
        try:
            self.runner.prepare()
        except CannotRun as error:
            yield failed("start", f"a run of one step: {error}", remedy=f"see the logs in {self.runner.folder}")
            return
        yield passed("start", f"torchrun and a checkpoint; {self.runner.num_ranks} rank(s) follow")
        for part, check in self.parts().items():
            if self.only(part):
                try:
                    yield check(part)
                except CannotRun as error:
                    yield failed(part, str(error), remedy=MESSAGES, folder=str(self.runner.folder))

    def parts(self) -> dict[str, Callable[[str], Check]]:
        """Return the parts by name, in order."""
        return {
            "one block": self.one_block,
            "one block, bf16": self.one_block,
            "tensor parallel": self.tensor_parallel,
            **{f"layout {layout}": self.layout for layout in LAYOUTS},
            "kill and resume": self.resume,
            "prefix cache": self.prefix_cache,
            "offload": self.offload,
        }

    def one_block(self, part: str) -> Check:
        """Compare data-parallel training on all ranks with one process on the CPU."""
        precision = "bf16" if "bf16" in part else self.fp32
        flags = ONE_BLOCK | ({"bf16": True} if precision == "bf16" else {})
        return self.compare(part, flags, flags, precision, on_cpu=True)

    def tensor_parallel(self, part: str) -> Check:
        if self.runner.num_ranks == 1:
            return skipped(part, "one rank")
        # Megatron pads the vocabulary to a multiple of this times the ranks: with 64 and 2 ranks, as with one rank.
        split = {"tensor_model_parallel_size": 2, "make_vocab_size_divisible_by": 64}
        return self.compare(part, ONE_BLOCK | split, ONE_BLOCK)

    def layout(self, part: str) -> Check:
        layout = part.removeprefix("layout ")
        same_blocks = SAME_BLOCKS[layout] if self.runner.num_stages > 1 else {}
        return self.compare(part, self._on_stages(LAYOUTS[layout]), LAYOUTS[layout] | same_blocks)

    def _on_stages(self, flags: Mapping[str, Any]) -> dict[str, Any]:
        return dict(flags) | ({"pipeline_model_parallel_size": 2} if self.runner.num_stages > 1 else {})

    def resume(self, part: str) -> Check:
        """Kill a run after a checkpoint, resume it, and compare with an uninterrupted run bit for bit."""
        flags, folder = self._on_stages(LAYOUTS["submodel"]), self.runner.folder / "killed"
        whole, flags = self._train(flags), flags | {"save": folder, "save_interval": SAVE_INTERVAL}
        tracker = folder / "latest_checkpointed_iteration.txt"
        self.runner.train("killed", flags, until=tracker.is_file)
        again = self.runner.train("resumed", flags | {"load": folder})
        first = again[0]["iteration"] if again else 0
        if first <= 1:
            return failed(part, "the second start did not resume", remedy="see the log of the run", first=first)
        ours, theirs = losses(again), losses(whole[first - 1 :])
        if ours != theirs:
            remedy = "see docs/checkpoints.md; a kernel that is not deterministic may be the reason"
            return failed(part, f"losses after iteration {first - 1} differ", remedy=remedy, ours=ours, theirs=theirs)
        return passed(part, f"killed, resumed after iteration {first - 1}: the same losses bit for bit")

    def prefix_cache(self, part: str) -> Check:
        """Compare a run that reads the frozen layers' outputs from disk with one that computes them."""
        flags = self._on_stages(PREFIX_CACHE)
        cached = flags | {"bcd_prefix_cache": self.runner.folder / "prefix"}
        hits = sum(step["prefix_cache_hits"] for step in self._train(cached))
        if not hits:
            remedy = "the folder needs a file system with free space and locks: give another with --output"
            return failed(part, "no sample was read from the cache", remedy=remedy)
        check = self.compare(part, cached, flags, num_ranks=self.runner.num_ranks, on_cpu=False)
        return replace(check, detail=f"{check.detail}; {hits} samples from the cache")

    def offload(self, part: str) -> Check:
        """Compare the optimizer in host memory with the one on the device."""
        if not self.runner.on_gpu:
            return skipped(part, "needs a CUDA GPU")
        return self.compare(part, ONE_BLOCK | {"optimizer_cpu_offload": True}, ONE_BLOCK, on_cpu=False)

    def _train(self, flags: Mapping[str, Any], *, num_ranks: int | None = None, on_cpu: bool = False) -> Steps:
        sizes = {"num_ranks": num_ranks or self.runner.num_ranks, "on_cpu": on_cpu or not self.runner.on_gpu}
        key = json.dumps([flags, sizes], sort_keys=True, default=str)
        if key not in self._runs:
            self._runs[key] = self.runner.train(f"run_{len(self._runs)}", flags, **sizes)
        return self._runs[key]

    def compare(
        self,
        part: str,
        flags: Mapping[str, Any],
        wanted: Mapping[str, Any],
        precision: str | None = None,
        *,
        num_ranks: int = 1,
        on_cpu: bool | None = None,
    ) -> Check:
        """Compare losses and gradient norms of a run on all ranks with a run with the flags `wanted`.

        The reference uses the same kind of device, unless it would then be the same run: then it uses the CPU.
        """
        precision = precision or self.fp32
        one_rank = self.runner.num_ranks == 1
        if one_rank and not self.runner.on_gpu and flags == wanted:
            return skipped(part, "one process on the CPU is the reference itself")
        run = self._train(flags)
        reference = self._train(wanted, num_ranks=num_ranks, on_cpu=one_rank if on_cpu is None else on_cpu)
        pairs = {"loss": (losses(run), losses(reference))}
        if precision != "bf16":
            norms = ([step["grad_norm"] or 0.0 for step in side] for side in (run, reference))
            pairs["gradient norm"] = tuple(norms)
        for quantity, (ours, theirs) in pairs.items():
            allowed = TOLERANCE[precision] * (10 if quantity == "gradient norm" else 1)
            # "not <=" and not ">", so that NaN counts as different
            differs = [not abs(x - y) <= allowed * abs(y) for x, y in zip(ours, theirs, strict=False)]
            if len(ours) != len(theirs) or any(differs):
                place = f"step {differs.index(True) + 1}" if any(differs) else f"{len(ours)} of {len(theirs)} steps"
                detail = f"{quantity} differs from the reference run's: {place}, more than {allowed:g} apart"
                return failed(part, detail, remedy=NUMERICS, ours=ours, theirs=theirs)
        deviation = max(abs(x / y - 1) for x, y in zip(*pairs["loss"], strict=True))
        detail = f"{len(run)} losses equal the reference run's within {deviation:.1e} ({precision})"
        return passed(part, detail, loss=losses(run))
