#!/usr/bin/env python3
"""Continue prompts with a model (docs/generation.md).

    python tools/generate.py --model out/tuned --prompt "The sky is"
    python tools/generate.py --model out/tuned --prompts prompts.txt --temperature 0.8 --top-p 0.95 --seed 1
    python tools/generate.py --model out/my_run --prompt "The sky is" --max-new-tokens 200 --json
    python tools/generate.py --model out/tuned --chat --prompt "Why is the sky blue?"

Takes the most likely token unless --temperature is given. An answer ends at the model's end token, after
--max-new-tokens, or at the model's last position. Uses transformers' generate.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

sys.path.insert(0, os.path.dirname(os.path.dirname(os.path.abspath(__file__))))

from _parser import STDOUT, Parser, add_json, check_writable, command, run_main, write_figures

if TYPE_CHECKING:
    from megatron.bcd.huggingface.in_memory import LoadedModel

PROG = "tools/generate.py"


def parse_arguments(argv: Sequence[str] | None = None) -> argparse.Namespace:
    """Return the parsed flags. Raises ValueError if a flag is unknown, out of range or missing."""
    parser = Parser(prog=PROG, description=__doc__)
    add = parser.add_argument
    add("--model", required=True, metavar="DIR", help="a model in Hugging Face's format (--save-hf), a folder of "
        "--save (its newest checkpoint is used), or one checkpoint in it")  # fmt: skip
    add("--precision", choices=("fp32", "bf16", "fp16"), help="precision of weights and arithmetic (default: that of "
        "the weights)")  # fmt: skip
    add("--device", help="cuda, cuda:1, cpu, ... (default: the first GPU, or else the CPU)")
    group = parser.add_argument_group("prompts")
    group.add_argument("--prompt", action="append", default=[], metavar="TEXT", help="may be given several times")
    group.add_argument("--prompts", metavar="FILE", help="one prompt per line; empty lines are skipped")
    add = group.add_mutually_exclusive_group().add_argument
    add("--chat", action="store_true", help="format each prompt as a user's message with the chat template")
    add("--instruction", action="store_true", help="format each prompt as an Alpaca instruction, as --sft does without "
        "a chat template")  # fmt: skip
    group.add_argument("--system", metavar="TEXT", help="with --chat: a system message before the prompt")
    add = parser.add_argument_group("answers").add_argument
    add("--max-new-tokens", type=int, default=128, metavar="N", help="(default: 128)")
    add("--temperature", type=float, default=0.0, metavar="X", help="0 takes the most likely token (default: 0)")
    add("--top-k", type=int, default=0, metavar="K", help="sample from the K most likely tokens (default: all)")
    add("--top-p", type=float, default=1.0, metavar="P", help="sample from the most likely tokens whose probabilities "
        "add up to P (default: 1)")  # fmt: skip
    add("--seed", type=int, default=0, metavar="N", help="seed of the sampling (default: 0)")
    add_json(parser)
    options = parser.parse_args(argv)
    if not options.prompt and options.prompts is None:
        raise ValueError("nothing to continue: give --prompt TEXT or --prompts FILE")
    if options.system is not None and not options.chat:
        raise ValueError("--system needs --chat")
    for flag, value, is_valid, wanted in (
        ("--max-new-tokens", options.max_new_tokens, options.max_new_tokens >= 1, "at least 1"),
        ("--temperature", options.temperature, 0 <= options.temperature < float("inf"), "0 or more"),
        ("--top-k", options.top_k, options.top_k >= 0, "0 (all) or more"),
        ("--top-p", options.top_p, 0 < options.top_p <= 1, "more than 0, and at most 1"),
        ("--seed", options.seed, 0 <= options.seed < 2**32, "0 to 2^32 - 1"),
    ):
        if not is_valid:
            raise ValueError(f"{flag} {value:g}: must be {wanted}")
    if options.temperature == 0 and (options.top_p != 1 or options.top_k):
        raise ValueError("--top-k and --top-p have no effect on the most likely token: give --temperature too")
    return options


def read_prompts(path: str) -> list[str]:
    """Return the lines of a file that are not empty. Raises ValueError if there are none."""
    try:
        lines = Path(path).read_text(encoding="utf-8").split("\n")
    except (OSError, UnicodeDecodeError) as error:
        raise ValueError(f"--prompts {path}: can't be read ({error})") from None
    prompts = [line for line in lines if line.strip()]
    if not prompts:
        raise ValueError(f"--prompts {path}: is empty. Write one prompt per line.")
    return prompts


def encode(loaded: LoadedModel, prompt: str, options: argparse.Namespace) -> list[int]:
    """Return the token ids of a prompt, formatted as the flags ask. Raises ValueError if it cannot be continued."""
    from megatron.bcd.data.sft.records import alpaca

    tokenizer = loaded.tokenizer
    if options.chat:
        system = [] if options.system is None else [{"role": "system", "content": options.system}]
        messages = [*system, {"role": "user", "content": prompt}]
        try:
            prompt = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
        except Exception as error:  # there is no template, or it rejects the messages
            reason = " ".join(str(error).split())[:200]
            raise ValueError(f"--chat: the tokenizer's chat template can't be used ({reason})") from None
    elif options.instruction:
        prompt = alpaca(prompt)
    ids: list[int] = tokenizer.encode(prompt, add_special_tokens=not options.chat)
    rows = loaded.model.get_input_embeddings().num_embeddings
    if not ids:
        raise ValueError("the prompt has no tokens: give at least a word")
    if max(ids) >= rows:
        raise ValueError(
            f"the tokenizer produced id {max(ids):,}, but the model's ids are 0 to {rows - 1:,}: give a model with the "
            "tokenizer that it was trained with"
        )
    if len(ids) >= loaded.positions:
        raise ValueError(
            f"the prompt has {len(ids):,} tokens, but the model has {loaded.positions:,} positions: give a shorter one"
        )
    return ids


def end_ids(loaded: LoadedModel) -> list[int]:
    """Return the ids that end an answer: the end tokens of the model, or else of its tokenizer, and the special token
    that the chat template writes after an answer."""
    eos = loaded.model.generation_config.eos_token_id
    eos = loaded.tokenizer.eos_token_id if eos is None else eos
    ends = {eos} if isinstance(eos, int) else set(eos or ())
    if loaded.tokenizer.chat_template:
        try:
            text = loaded.tokenizer.apply_chat_template(
                [{"role": "user", "content": "Is it?"}, {"role": "assistant", "content": "Yes."}], tokenize=False
            )
        except Exception:  # `encode` reports a broken template
            return sorted(ends)
        after = loaded.tokenizer.encode(text.rpartition("Yes.")[2].lstrip(), add_special_tokens=False)
        ends |= set(after[:1]) & loaded.tokenizer.added_tokens_decoder.keys()
    return sorted(ends)


def run(options: argparse.Namespace) -> list[dict[str, Any]]:
    """Continue all prompts and return what --json writes. Raises ValueError if a file is missing or damaged, or a
    prompt is too long."""
    import torch

    from megatron.bcd.huggingface.in_memory import open_model

    prompts = [*options.prompt, *(read_prompts(options.prompts) if options.prompts else [])]
    answers = []
    device = options.device or ("cuda" if torch.cuda.is_available() else "cpu")
    try:
        torch.empty(0, device=device)
    except (RuntimeError, AssertionError) as error:
        raise ValueError(f"--device {device}: {str(error).splitlines()[0]}") from None
    loaded = open_model(options.model, precision=options.precision, device=device)
    encoded = [encode(loaded, prompt, options) for prompt in prompts]
    ends = end_ids(loaded)
    for number, (prompt, ids) in enumerate(zip(prompts, encoded, strict=True)):
        new = continuation(loaded, ids, ends, options, seed=options.seed + number)
        is_ended = bool(new) and new[-1] in ends
        new = new[:-1] if is_ended else new
        # Decode with the prompt: without it, the first token may lose its leading space.
        start = len(loaded.tokenizer.decode(ids, skip_special_tokens=True))
        text = loaded.tokenizer.decode([*ids, *new], skip_special_tokens=True)[start:]
        answers.append({"prompt": prompt, "answer": text, "tokens": len(new), "is_ended": is_ended})
        if options.json != STDOUT:
            between = "\n" if options.chat or options.instruction else ""
            print(f"{prompt}{between}{text}\n", flush=True)
    return answers


def continuation(
    loaded: LoadedModel, prompt: list[int], ends: list[int], options: argparse.Namespace, *, seed: int
) -> list[int]:
    """Return the new tokens after `prompt`, including the end token if there is one."""
    import torch
    from transformers import GenerationConfig, set_seed

    draws: dict[str, Any] = {"do_sample": False}
    if options.temperature:
        draws = {name: getattr(options, name) for name in ("temperature", "top_k", "top_p")} | {"do_sample": True}
    loaded.model.generation_config = GenerationConfig(  # replaces that of the model's folder
        max_new_tokens=min(options.max_new_tokens, loaded.positions - len(prompt)),
        eos_token_id=ends or None,
        pad_token_id=ends[0] if ends else 0,
        **draws,
    )
    set_seed(seed)
    tokens = torch.tensor([prompt], device=loaded.model.device)
    output: list[int] = loaded.model.generate(tokens, attention_mask=torch.ones_like(tokens))[0].tolist()
    return output[len(prompt) :]


@command(PROG)
def main(argv: Sequence[str]) -> None:
    options = parse_arguments(argv)
    check_writable(options.json, flag="--json")
    try:
        answers = run(options)
    except (MemoryError, RuntimeError) as error:
        if not isinstance(error, MemoryError) and "out of memory" not in str(error):
            raise
        raise ValueError("out of memory: give --precision bf16, or shorter or fewer texts at a time") from None
    write_figures(options.json, answers, lambda: None)


if __name__ == "__main__":
    run_main(main)
