"""Rules of supervised fine-tuning."""

from __future__ import annotations

from megatron.bcd.arguments.rules import Run, flag_name, refuse_unless


def check_fine_tuning(run: Run) -> None:
    if not run.sft:
        refuse_unless(run.num_epochs is None, "--num-epochs needs --sft")
        return
    for flag, is_given, remedy in (
        ("--mock-data", run.mock_data, "give --data-path"),
        ("--dataloader-type cyclic", run.dataloader_type == "cyclic", "every epoch has an order of its own anyway"),
        ("--eod-mask-loss", run.eod_mask_loss, "the end of an answer is learned"),
        (
            f"--context-parallel-size {run.context_parallel_size}",
            run.context_parallel_size > 1,
            "records are short; give data or pipeline parallel ranks",
        ),
    ):
        refuse_unless(not is_given, f"--sft does not go with {flag}: {remedy}")
    for field in ("data_path", "train_data_path", "valid_data_path", "test_data_path"):
        numbers = [word for word in getattr(run, field) or () if _is_number(word)]
        refuse_unless(
            not numbers,
            f"{flag_name(field)} {' '.join(numbers)}: --sft reads every record once an epoch; leave the weights out",
        )
    _check_epochs(run)


def _check_epochs(run: Run) -> None:
    if run.num_epochs is None:
        return
    for field in ("train_iters", "train_samples", "rampup_batch_size"):
        refuse_unless(
            getattr(run, field) is None,
            f"--num-epochs does not go with {flag_name(field)}: leave one of them out",
        )


def _is_number(word: str) -> bool:
    return word.replace(".", "", 1).isdigit()
