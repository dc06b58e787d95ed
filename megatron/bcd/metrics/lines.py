"""Metrics as text: one line each, the same on a terminal and in a log file."""

from collections.abc import Callable, Iterable, Mapping, Sequence

from megatron.bcd.metrics.schema import BlockSummary, EvalMetrics, StepMetrics

MIB = 2**20
GIB = 2**30
_LINE_LENGTH = 120
_NUM_SHOWN = 4  # of a longer list only minimum and maximum are printed, to fit a screen


def format_bytes(num_bytes: float) -> str:
    """`num_bytes` in MiB, or in GiB from 1 GiB, with one decimal."""
    return f"{num_bytes / GIB:,.1f} GiB" if num_bytes >= GIB else f"{num_bytes / MIB:,.1f} MiB"


def listed(values: Sequence[float], show: Callable[[float], str], noun: str) -> str:
    """A short list in full; of a long one the minimum and maximum: "1.0 MiB to 3.0 MiB over 64 ranks"."""
    if len(values) <= _NUM_SHOWN:
        return ", ".join(show(value) for value in values) or "-"
    ends = dict.fromkeys((show(min(values)), show(max(values))))
    return f"{' to '.join(ends)} over {len(values)} {noun}"


def bytes_by_rank(by_rank: Sequence[int]) -> str:
    return listed(by_rank, format_bytes, "ranks")


def highest_by_rank(blocks: Iterable[BlockSummary]) -> tuple[int, ...]:
    """Model state by rank: the maximum over the phases."""
    return tuple(max(column) for column in zip(*(b.model_state_bytes for b in blocks), strict=True))


def format_left(milliseconds: float) -> str:
    """A remaining time: "0:00:06 left", "3d 14h left"."""
    minutes, seconds = divmod(round(milliseconds / 1000.0), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours // 24}d {hours % 24}h left" if hours >= 24 else f"{hours}:{minutes:02d}:{seconds:02d} left"


def step_lines(record: StepMetrics, *, train_iters: int, left: str) -> list[str]:
    """The log line of one log step, of at most 120 characters; what does not fit (figures that flags ask for) follows
    on another."""
    step_ms = record.step_time_ms
    parts = [
        f"iteration {record.iteration:{len(str(train_iters))}d}/{train_iters}",
        f"block {record.block}",
        f"loss {record.loss:.6E}",
        f"lr {record.learning_rate:.3E}",
        f"grad norm {'-' if record.grad_norm is None else f'{record.grad_norm:.4g}'}",
        f"{step_ms:.{0 if step_ms >= 1000 else 1}f} ms/step",
        left,
    ]
    if record.tflops_per_gpu is not None:
        parts.append(f"{record.tflops_per_gpu:,.1f} TFLOP/s per GPU")
    if record.num_zeros is not None:
        parts.append(f"zeros in gradient {record.num_zeros:,}")
    if record.params_norm is not None:
        parts.append(f"params norm {record.params_norm:.3f}")
    if record.loss_scale is not None:
        parts.append(f"loss scale {record.loss_scale:,.0f}")
    if record.skipped_iterations:
        parts.append(f"skipped iterations {record.skipped_iterations}")
    lines = parts[:1]
    for part in parts[1:]:
        if len(f"{lines[-1]} | {part}") <= _LINE_LENGTH:
            lines[-1] += f" | {part}"
        else:
            lines.append(f"  {part}")
    return lines


_TIMES = {"max": "max time", "minmax": "(min, max) time", "all": "times"}


def timer_lines(times: Mapping[str, Sequence[float]], *, option: str) -> list[str]:
    """Times of parts of a step by name and rank, under a heading, as --timing-log-option says; zeros are left out."""
    lines = []
    for name, by_rank in times.items():
        measured = [time for time in by_rank if time > 0.0]
        if measured and option == "all":
            lines.append(f"  {name}: " + ", ".join(f"rank {rank} {time:.2f}" for rank, time in enumerate(by_rank)))
        elif measured:
            shown = f"{max(measured):.2f}" if option == "max" else f"({min(measured):.2f}, {max(measured):.2f})"
            lines.append(f"  {name}: {shown}")
    return [f"{_TIMES[option]} across ranks (ms):", *lines] if lines else []


def straggler_lines(times: Mapping[str, Sequence[float]], *, num_named: int) -> list[str]:
    """The fastest and the slowest rank, of its forward passes and its batches; with `num_named` from 2 to the number of
    ranks less 1, also so many of each by their forward passes."""
    if not times:
        return []

    def sorted_ranks(name: str) -> list[str]:
        return [
            f"rank {rank} {time:.2f}" for time, rank in sorted((time, rank) for rank, time in enumerate(times[name]))
        ]

    forward, batch = sorted_ranks("forward"), sorted_ranks("batch")
    lines = [
        f"forward passes of a step (ms): {forward[0]} to {forward[-1]} | longest wait for a batch (ms): {batch[0]} to "
        f"{batch[-1]}"
    ]
    if 1 < num_named < len(forward):
        lines.append(f"  slowest: {', '.join(forward[: -num_named - 1 : -1])}")
        lines.append(f"  fastest: {', '.join(forward[:num_named])}")
    return lines


def evaluation_line(record: EvalMetrics) -> str:
    """The log line of an evaluation."""
    when = "at the end, iteration" if record.is_final else "at iteration"
    measure = f"perplexity {record.perplexity:,.3f}" if record.accuracy is None else f"accuracy {record.accuracy:.2%}"
    return f"{record.split} {when} {record.iteration:8d} | loss {record.loss:.6E} | {measure}"
