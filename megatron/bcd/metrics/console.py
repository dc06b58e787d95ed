"""Metrics as text, one line each."""

from collections.abc import Callable, Sequence

from megatron.bcd.metrics.schema import EvalMetrics, RunSummary, StepMetrics

MIB = 2**20
GIB = 2**30
_NUM_SHOWN = 4  # print only the minimum and maximum of longer lists, to fit a screen


def format_bytes(num_bytes: float) -> str:
    """Return `num_bytes` in MiB, or in GiB from 1 GiB on, with one decimal."""
    return f"{num_bytes / GIB:,.1f} GiB" if num_bytes >= GIB else f"{num_bytes / MIB:,.1f} MiB"


def format_list(values: Sequence[float], show: Callable[[float], str], noun: str) -> str:
    """Return a short list in full, a long one as its range: "1.0 MiB to 3.0 MiB over 64 ranks"."""
    if len(values) <= _NUM_SHOWN:
        return ", ".join(show(value) for value in values) or "-"
    ends = dict.fromkeys((show(min(values)), show(max(values))))
    return f"{' to '.join(ends)} over {len(values)} {noun}"


def step_line(record: StepMetrics, *, train_iters: int, left: str) -> str:
    """Return the log line of one log step."""
    step_ms = record.step_time_ms
    parts = [
        f"iteration {record.iteration:{len(str(train_iters))}d}/{train_iters}",
        f"block {record.block}",
        f"loss {record.loss:.6E}",
        f"lr {record.learning_rate if record.step_learning_rate is None else record.step_learning_rate:.3E}",
        f"grad norm {'-' if record.grad_norm is None else f'{record.grad_norm:.4g}'}",
        f"{step_ms:.{0 if step_ms >= 1000 else 1}f} ms/step",
        left,
    ]
    parts += [f"{name.replace('_', ' ')} {loss:.4g}" for name, loss in record.router_losses.items()]
    optional = {
        "{:,.1f} TFLOP/s per GPU": record.tflops_per_gpu,
        "zeros in gradient {:,}": record.num_zeros,
        "params norm {:.3f}": record.params_norm,
        "loss scale {:,.0f}": record.loss_scale,
        "skipped iterations {}": record.skipped_iterations or None,
        "skipped layers {}": record.skipped_layers or None,
    }
    return " | ".join([*parts, *(text.format(value) for text, value in optional.items() if value is not None)])


def evaluation_line(record: EvalMetrics) -> str:
    when = "at the end, iteration" if record.is_final else "at iteration"
    measure = f"perplexity {record.perplexity:,.3f}" if record.accuracy is None else f"accuracy {record.accuracy:.2%}"
    return f"{record.split} {when} {record.iteration:8d} | loss {record.loss:.6E} | {measure}"


def summary_lines(summary: RunSummary) -> list[str]:
    """Return the run summary, one line for each fact and each block."""
    stages = format_list(summary.parameters_per_stage, lambda n: f"{n:,}", "stages")
    num_blocks = f"{len(summary.blocks)} block{'' if len(summary.blocks) == 1 else 's'}"
    facts = [
        ("model", summary.model),
        ("parameters", f"{summary.total_parameters:,} (by pipeline stage: {stages})"),
        ("parallel", summary.parallel),
        ("training", summary.training),
        ("layout", f"{summary.layout}, {num_blocks}, {summary.phases}"),
        *(("note", note) for note in summary.notes),
    ]
    highest = [max(column) for column in zip(*summary.model_state_bytes, strict=True)]
    full = summary.full_model_state_bytes
    ratios = [mine / whole for mine, whole in zip(highest, full, strict=True) if whole]
    ratio = f" ({format_list(ratios, '{:.1%}'.format, 'ranks')} of full)" if ratios else ""

    def model_state(by_rank: Sequence[int], suffix: str = "") -> str:
        return f"model state {format_list(by_rank, format_bytes, 'ranks')}{suffix} by rank (estimated)"

    blocks = zip(summary.blocks, summary.shares, summary.model_state_bytes, strict=True)
    facts += [
        (f"block {number}", f"{contents} | {share:.1%} of the parameters | {model_state(by_rank)}")
        for number, (contents, share, by_rank) in enumerate(blocks)
    ]
    facts += [
        ("BCD", f"maximum over the blocks | {model_state(highest, ratio)}"),
        ("full", f"full-parameter training | 100.0% of the parameters | {model_state(full)}"),
    ]
    return ["Block coordinate descent on Megatron Core", *(f"{label:<11} {text}" for label, text in facts)]
