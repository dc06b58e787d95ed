#!/usr/bin/env python3
"""Continue prompts with a model (docs/generation.md).

    python tools/generate.py --model out/tuned --prompt "The sky is"
    python tools/generate.py --model out/tuned --prompts prompts.txt --temperature 0.8 --top-p 0.95 --seed 1
    python tools/generate.py --model out/my_run --prompt "The sky is" --max-new-tokens 200 --json
    python tools/generate.py --model out/tuned --chat --prompt "Why is the sky blue?"

The most likely token is taken unless a temperature is given. An answer ends at the model's end token, after
--max-new-tokens, or at the model's last position. One process, one device; keys and values are cached.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

sys.path.insert(0, os.path.dirname(os.path.dirname(os.path.abspath(__file__))))

from _loaded_model import add_model_flags, loaded_model
from _long_work import check_json_file, naming_memory, write_json_file
from _parser import STDOUT, Parser, add_json, bad_input, leave_with

if TYPE_CHECKING:
    from megatron.bcd.generation.load import LoadedModel

PROG = "tools/generate.py"


def _parser() -> Parser:
    parser = Parser(prog=PROG, description=__doc__)
    add_model_flags(parser)
    group = parser.add_argument_group("prompts")
    group.add_argument("--prompt", action="append", default=[], metavar="TEXT", help="may be given several times")
    group.add_argument("--prompts", metavar="FILE", help="a prompt on every line; empty lines are skipped")
    form = group.add_mutually_exclusive_group()
    form.add_argument(
        "--chat", action="store_true", help="a prompt is a user's message, in the tokenizer's chat template"
    )
    form.add_argument(
        "--instruction",
        action="store_true",
        help="a prompt is an instruction in Alpaca's form, as --sft has it without one",
    )
    group.add_argument("--system", metavar="TEXT", help="with --chat: the system's message before it")
    group = parser.add_argument_group("answers")
    group.add_argument("--max-new-tokens", type=int, default=128, metavar="N", help="(default: 128)")
    group.add_argument(
        "--temperature", type=float, default=0.0, metavar="X", help="0 takes the most likely token (default)"
    )
    group.add_argument(
        "--top-p",
        type=float,
        default=1.0,
        metavar="P",
        help="draw among the most likely tokens that have this much of the probability (default: 1)",
    )
    group.add_argument("--seed", type=int, default=0, metavar="N", help="of what is drawn (default: 0)")
    add_json(parser)
    return parser


def parse_arguments(argv: Sequence[str] | None = None) -> argparse.Namespace:
    """The checked command line.

    Raises:
        ValueError: a flag is unknown, out of range or missing.
    """
    options = _parser().parse_args(argv)
    if not options.prompt and options.prompts is None:
        raise ValueError("nothing to continue: give --prompt TEXT or --prompts FILE")
    if options.system is not None and not options.chat:
        raise ValueError("--system needs --chat")
    if options.max_new_tokens < 1:
        raise ValueError(f"--max-new-tokens {options.max_new_tokens}: must be at least 1")
    if not 0 <= options.seed < 2**63:
        raise ValueError(f"--seed {options.seed}: must be 0 to 2^63 - 1")
    if options.top_p != 1 and options.temperature == 0:
        raise ValueError(f"--top-p {options.top_p:g} has no effect on the most likely token: give --temperature too")
    return options


def encode(loaded: LoadedModel, prompt: str, options: argparse.Namespace) -> list[int]:
    """Ids of a prompt in the form that the flags ask for.

    Raises:
        ValueError: there is no tokenizer, or it is another model's; or no chat template, or it refuses the prompt.
    """
    from megatron.bcd.data.sft.chat_template import chat_template_of
    from megatron.bcd.data.sft.records import Record
    from megatron.bcd.data.sft.render import Renderer

    tokenizer = loaded.known_tokenizer()
    if options.instruction:
        return loaded.tokenize(Renderer(tokenizer, "text").prompt(Record(prompt=prompt, is_instruction=True)))
    if not options.chat:
        return loaded.encode(prompt)
    template = chat_template_of(tokenizer)
    if template is None:
        raise ValueError(
            "--chat: the model's tokenizer has no chat template (chat_template.jinja, or chat_template in its "
            "tokenizer_config.json); leave --chat out, or give --instruction"
        )
    system = [] if options.system is None else [{"role": "system", "content": options.system}]
    try:
        text = template.render([*system, {"role": "user", "content": prompt}], for_answer=True)
    except ValueError as error:
        raise ValueError(f"--prompt {prompt[:40]!r} {error}") from None
    return loaded.tokenize(text)


def run(options: argparse.Namespace) -> list[dict[str, Any]]:
    """Continue all prompts; what --json writes.

    Raises:
        ValueError: a file is missing or damaged, or a prompt is too long.
    """
    from megatron.bcd.data.prompts import read_prompts
    from megatron.bcd.generation.generate import check_prompt, continuation, text_of
    from megatron.bcd.generation.sampling import Sampling

    sampling = Sampling(temperature=options.temperature, top_p=options.top_p)
    prompts = [*options.prompt, *(read_prompts(options.prompts, flag="--prompts") if options.prompts else [])]
    check_json_file(options.json)
    answers = []
    remedy = "give --precision bf16, a shorter prompt or fewer --max-new-tokens"
    with naming_memory(remedy), loaded_model(options) as loaded:
        encoded = [encode(loaded, prompt, options) for prompt in prompts]
        for ids in encoded:
            check_prompt(loaded, ids)
        for number, (prompt, ids) in enumerate(zip(prompts, encoded, strict=True)):
            found = continuation(
                loaded, ids, max_new_tokens=options.max_new_tokens, sampling=sampling, seed=options.seed + number
            )
            text = text_of(loaded, ids, found.tokens)
            answers.append({"prompt": prompt, "answer": text, "tokens": len(found.tokens), "is_ended": found.is_ended})
            if options.json != STDOUT:
                between = "\n" if options.chat or options.instruction else ""  # an answer, or the text's continuation
                print(f"{prompt}{between}{text}\n", flush=True)
    return answers


def main(argv: Sequence[str] | None = None) -> int:
    try:
        options = parse_arguments(argv)
        answers = run(options)
        if options.json == STDOUT:
            print(json.dumps(answers, indent=1, ensure_ascii=False))
        elif options.json:
            write_json_file(options.json, json.dumps(answers, indent=1, ensure_ascii=False))
            print(f"wrote {options.json}")
    except (ValueError, OSError) as error:
        return bad_input(PROG, error)
    return 0


if __name__ == "__main__":
    leave_with(main)
