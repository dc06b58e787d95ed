"""What the run tells: StepRecord -> console, metrics file, TensorBoard, Weights & Biases (DESIGN section 3).

A terminal gets a panel, a live progress line and the log lines above it; anything else gets the same
content as plain single lines without control characters. Only one rank (rank 0) owns a Reporter.
"""

from megatron.bcd.report.lines import format_bytes
from megatron.bcd.report.records import BlockSummary, EvalRecord, RunSummary, StepRecord
from megatron.bcd.report.reporter import Reporter

__all__ = ["BlockSummary", "EvalRecord", "Reporter", "RunSummary", "StepRecord", "format_bytes"]
