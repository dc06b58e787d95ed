"""The self-test of tools/check_machine.py: training runs on all ranks, compared with committed figures."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from _check_result import Check, failed, passed, skipped
from _check_runs import Run, Runner
from _compare_runs import CannotRun

from megatron.bcd.planner.memory import rank_memory
from megatron.bcd.planner.recipe import Recipe
from megatron.bcd.planner.tables import Cluster, Model

LAYOUTS = ("spread", "strided", "submodel", "interleaved")
SAVE_INTERVAL = 4
NUMERICS = "a kernel computes something else: try without Transformer Engine and Apex, and another GPU"
MESSAGES = "look into the run's log; NCCL_DEBUG=INFO says how the GPUs are connected"


@dataclass(kw_only=True)
class SelfTest:
    """Its parts share runs: a part may need that of another."""

    runner: Runner
    expected: Mapping[str, Any]
    """tools/check_machine_figures.json."""
    fp32: str
    """Key of the tolerance of fp32 runs: tf32 where Transformer Engine multiplies so."""
    only: Callable[[str], bool] = field(default=lambda part: True)
    _runs: dict[str, Run] = field(default_factory=dict)

    def checks(self) -> Iterator[Check]:
        """Each part as soon as it is known. Without initial weights nothing else is tried."""
        try:
            self.runner.prepare()
        except CannotRun as error:
            yield failed("start", f"a run of one step: {error}", remedy=f"see the logs in {self.runner.folder}")
            return
        yield passed("start", f"torchrun and a checkpoint; {self.runner.num_ranks} rank(s) follow")
        for part, check in self.parts().items():
            if self.only(part):
                yield self._guarded(part, check)

    def parts(self) -> dict[str, Callable[[str], Check]]:
        """By name, in their order."""
        several = {
            "one block": self.one_block,
            "one block, bf16": self.one_block,
            "tensor parallel": self.one_block,
        }
        layouts = {f"layout {layout}": self.layout for layout in LAYOUTS}
        return several | layouts | {
            "memory at a switch": self.memory,
            "kill and resume": self.resume,
            "prefix cache": self.prefix_cache,
            "offload": self.offload,
        }  # fmt: skip

    def _guarded(self, part: str, check: Callable[[str], Check]) -> Check:
        try:
            return check(part)
        except CannotRun as error:
            return failed(part, str(error), remedy=MESSAGES, folder=str(self.runner.folder))

    def one_block(self, part: str) -> Check:
        """The curve of stock Megatron-LM: data parallel on all ranks."""
        flags = dict(self.expected["stock"]["flags"])
        precision = "bf16" if part.endswith("bf16") else self.fp32
        if precision == "bf16":
            flags["bf16"] = True
        if part == "tensor parallel":
            if self.runner.num_ranks == 1:
                return skipped(part, "one rank")
            # the vocabulary is padded to a multiple of this times the ranks: to as many rows as without
            flags |= {"tensor_model_parallel_size": 2, "make_vocab_size_divisible_by": 64}
        return self.compare(part, self._train(part, flags), self.expected["stock"], precision, of="stock Megatron-LM")

    def layout(self, part: str) -> Check:
        layout = part.removeprefix("layout ")
        return self.compare(part, self._of_layout(layout), self.expected["bcd"][layout][self._stages], self.fp32)

    def _of_layout(self, layout: str) -> Run:
        flags = self.expected["bcd"][layout]["flags"] | {"pipeline_model_parallel_size": self.runner.num_stages}
        return self._train(f"layout {layout}", flags)

    @property
    def _stages(self) -> str:
        return str(self.runner.num_stages)

    def memory(self, part: str) -> Check:
        """Bytes that are alive in every phase of the second cycle, against the formula's."""
        steps = self._of_layout("spread").steps
        planned = self.planned_state()
        visits = [step.raw for step in steps if step.raw["cycle"] > 0]
        worst = 0.0
        for step in visits:
            counted, wanted = step["model_state_bytes"], planned[step["block"]]
            worst = max(worst, *(one / other - 1 for one, other in zip(counted, wanted, strict=True)))
        figures = {"planned": planned, "counted": {step["block"]: step["model_state_bytes"] for step in visits}}
        if not visits or worst > 0.01:
            detail = f"a phase holds {worst:.1%} more model state than planned: a switch did not free its block"
            return failed(part, detail, remedy="report it, with the file of --json", **figures)
        return passed(part, f"model state of every phase is the planned one ({worst:+.2%})", **figures)

    def planned_state(self) -> dict[int, list[int]]:
        """By block: model state of every rank in layout spread."""
        flags, stages = self.runner.flags, self.runner.num_stages
        model = Model(name="self-test", form="gpt", layers=flags["num_layers"], hidden=flags["hidden_size"],
                      heads=flags["num_attention_heads"], groups=flags["num_attention_heads"],
                      ffn=4 * flags["hidden_size"], vocabulary=flags["vocab_size"] + 1, sequence=flags["seq_length"],
                      source="")  # fmt: skip
        recipe = Recipe(model=model, cluster=UNKNOWN, num_gpus=self.runner.num_ranks, pipeline_size=stages,
                        num_blocks=self.expected["bcd"]["spread"]["flags"]["bcd_num_blocks"], layout="spread",
                        global_batch_size=flags["global_batch_size"])  # fmt: skip
        found: dict[int, list[int]] = {block.index: [] for block in recipe.partition.blocks}
        for stage in range(stages):  # ranks of a stage are neighbours
            for replica in range(recipe.num_replicas):
                for rank in rank_memory(recipe, replica=replica):
                    if rank.stage == stage:
                        found[rank.block].append(rank.model_state)
        return found

    def resume(self, part: str) -> Check:
        """Kill a run after a checkpoint and start it again: its losses are those of a run that was not killed."""
        whole, folder = self._of_layout("submodel"), self.runner.folder / "killed"
        flags = self.expected["bcd"]["submodel"]["flags"] | {
            "pipeline_model_parallel_size": self.runner.num_stages,
            "save": folder,
            "save_interval": SAVE_INTERVAL,
        }
        tracker = folder / "latest_checkpointed_iteration.txt"
        self.runner.train("killed", flags, until=tracker.is_file)
        again = self.runner.train("resumed", flags | {"load": folder})
        first = again.steps[0].raw["iteration"] if again.steps else 0
        if first <= 1:
            return failed(part, "the second start began anew", remedy="see the log of the run", first=first)
        ours, theirs = again.losses, whole.losses[first - 1 :]
        if ours != theirs:
            remedy = "see docs/checkpoints.md; a kernel that is not deterministic may be the reason"
            return failed(part, f"losses after iteration {first - 1} differ", remedy=remedy, ours=ours, theirs=theirs)
        return passed(part, f"killed, resumed after iteration {first - 1}: the same losses bit for bit")

    def prefix_cache(self, part: str) -> Check:
        """Outputs of frozen layers, read from disk: the losses of a run that computes them."""
        of_cache = self.expected["prefix_cache"]
        flags = of_cache["flags"] | {
            "pipeline_model_parallel_size": self.runner.num_stages,
            "bcd_prefix_cache": self.runner.folder / "prefix",
        }
        run = self._train(part, flags)
        hits = sum(step.raw["prefix_cache_hits"] for step in run.steps)
        if not hits:
            remedy = "the folder needs a file system with room and locks: give another with --output"
            return failed(part, "no sample was read from the cache", remedy=remedy)
        check = self.compare(part, run, of_cache[self._stages], self.fp32, of="a run without cache")
        return Check(**vars(check) | {"detail": f"{check.detail}; {hits} samples from the cache"})

    def offload(self, part: str) -> Check:
        """The optimizer in host memory: the curve of stock Megatron-LM."""
        if not self.runner.on_gpu:
            return skipped(part, "needs a CUDA GPU")
        offload = {"optimizer_cpu_offload": True, "optimizer_offload_fraction": 1.0}
        flags = self.expected["stock"]["flags"] | offload
        return self.compare(part, self._train(part, flags), self.expected["stock"], self.fp32, of="stock Megatron-LM")

    def record(self) -> dict[str, Any]:
        """The figures with those of this machine's runs in place of their own. Raises CannotRun."""
        self.runner.prepare()
        places = [*self.expected["bcd"].items(), ("prefix_cache", self.expected["prefix_cache"])]
        for name, place in places:
            flags = place["flags"] | {"pipeline_model_parallel_size": self.runner.num_stages}
            run = self._train(f"recorded {name}", flags)
            place[self._stages] = {
                "loss": [round(step.loss, 6) for step in run.steps],
                "grad_norm": [round(step.grad_norm, 5) for step in run.steps],
            }
        return dict(self.expected)

    def _train(self, part: str, flags: Mapping[str, Any]) -> Run:
        if part not in self._runs:
            self._runs[part] = self.runner.train(part.replace(" ", "_").replace(",", ""), flags)
        return self._runs[part]

    def compare(
        self, part: str, run: Run, figures: Mapping[str, Any], precision: str, *, of: str = "the CPU's"
    ) -> Check:
        """Losses and gradient norms within the tolerance of the precision."""
        tolerance = self.expected["tolerance"][precision]
        pairs = {"loss": (run.losses, figures["loss"])}
        if precision != "bf16":
            pairs["gradient norm"] = ([step.grad_norm for step in run.steps], figures["grad_norm"])
        if "validation_loss" in figures:
            wanted = figures["validation_loss"]
            pairs["validation loss"] = ([run.validation_loss.get(at, math.nan) for at in wanted], [*wanted.values()])
        for what, (ours, theirs) in pairs.items():
            allowed = tolerance * (10 if what == "gradient norm" else 1)
            at = first_difference(ours, theirs, allowed)
            if at is not None:
                shown = " and ".join(f"{series[at]:.6f}" if at < len(series) else "none" for series in (ours, theirs))
                detail = f"{what} {at + 1} is not {of}: {shown}, more than {allowed:g} apart"
                return failed(part, detail, remedy=NUMERICS, ours=ours, theirs=list(theirs))
        deviation = max(abs(one / other - 1) for one, other in zip(*pairs["loss"], strict=True))
        return passed(part, f"{len(run.steps)} losses as {of}, within {deviation:.1e} ({precision})", loss=run.losses)


UNKNOWN = Cluster(name="none", gpu="none", memory_gib=1, fp32_tflops=1, bf16_tflops=1, memory_gb_per_s=1,
                  link_gb_per_s=1, network_gb_per_s=1, gpus_per_node=4096, usd_per_gpu_hour=0, compute_share=1,
                  memory_share=1, framework_gib=0, host_gb_per_s=1, source="")  # fmt: skip
"""A cluster for what does not depend on one: bytes of model state."""


def first_difference(ours: Sequence[float], theirs: Sequence[float], tolerance: float) -> int | None:
    """Index of the first pair further apart than the tolerance, relative to theirs; a missing one is too far."""
    for index in range(max(len(ours), len(theirs))):
        if index >= min(len(ours), len(theirs)):
            return index
        if not abs(ours[index] - theirs[index]) <= tolerance * abs(theirs[index]):  # NaN is too far
            return index
    return None
