"""Pretrain a GPT with block coordinate descent: torchrun --nproc-per-node N pretrain_gpt_bcd.py --help."""

from megatron.bcd.runtime.exit import ending_on_signals
from megatron.bcd.runtime.threads import wait_briefly

PROG = "pretrain_gpt_bcd.py"


def main() -> None:
    wait_briefly()
    with ending_on_signals(prog=PROG):  # before the imports, which take seconds
        from megatron.bcd.arguments import read_command_line
        from megatron.bcd.model.builder import build_model
        from megatron.bcd.runtime.exit import exit_on_error
        from megatron.bcd.training.pretrain import pretrain

        with exit_on_error(ValueError, prog=PROG):
            command = read_command_line(prog=PROG)
        pretrain(command.config, build_model, prog=PROG, notes=command.notes)


if __name__ == "__main__":
    main()
