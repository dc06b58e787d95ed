"""Pretrain a LLaMA with block coordinate descent: torchrun --nproc-per-node N pretrain_llama_bcd.py --help."""

import signal
import sys

from megatron.bcd.runtime.compat.imports import skip_unused_imports
from megatron.bcd.runtime.exit import exit_on_error
from megatron.bcd.runtime.threads import limit_openmp_spin

PROG = "pretrain_llama_bcd.py"


def main() -> None:
    limit_openmp_spin()
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # outside of training it ends the process, without a traceback
    skip_unused_imports(sys.argv[1:])
    from megatron.bcd.arguments import FAMILY_DEFAULTS, read_command_line

    with exit_on_error(ValueError, prog=PROG):
        config, notes = read_command_line(prog=PROG, defaults=FAMILY_DEFAULTS["llama"])
    # imported after the flags are checked, and not in a dry run
    from megatron.bcd.model.builder import build_model
    from megatron.bcd.training.pretrain import pretrain

    pretrain(config, build_model, prog=PROG, notes=notes)


if __name__ == "__main__":
    main()
