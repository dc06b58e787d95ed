"""Pretrain a LLaMA with block coordinate descent: torchrun --nproc-per-node N pretrain_llama_bcd.py --help."""

from megatron.bcd.arguments import FORMS, parse_run_config
from megatron.bcd.models import build_model
from megatron.bcd.refusal import refusing
from megatron.bcd.train import pretrain

PROG = "pretrain_llama_bcd.py"


def main() -> None:
    with refusing(ValueError, prog=PROG):
        config = parse_run_config(prog=PROG, defaults=FORMS["llama"])
    pretrain(config, build_model, prog=PROG)


if __name__ == "__main__":  # Megatron Core's checkpoint writer starts processes that import this file
    main()
