#!/usr/bin/env python3
"""Continue prompts with a model (docs/generation.md).

    python tools/generate.py --model out/tuned --prompt "The sky is"
    python tools/generate.py --model out/my_run --prompt "The sky is" --max-new-tokens 200 --temperature 0.8 --json
    python tools/generate.py --model out/tuned --chat --prompt "Why is the sky blue?"

Takes the most likely token unless --temperature is given. An answer ends at the model's end token, after
--max-new-tokens, or at the model's last position. Uses transformers' generate.
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
from collections.abc import Sequence
from typing import Any

sys.path.insert(0, os.path.dirname(os.path.dirname(os.path.abspath(__file__))))

from _parser import STDOUT, Parser, add_json, check_writable, command, run_main, write_figures

PROG = "tools/generate.py"


def parse_arguments(argv: Sequence[str] | None = None) -> argparse.Namespace:
    """Return the parsed flags. Raises ValueError if a flag is unknown, out of range or missing."""
    parser = Parser(prog=PROG, description=__doc__)
    add = parser.add_argument
    add("--model", required=True, metavar="DIR", help="a model in Hugging Face's format (--save-hf), a folder of "
        "--save (its newest checkpoint is used), or one checkpoint in it")  # fmt: skip
    add("--prompt", action="append", required=True, metavar="TEXT", help="may be given several times")
    form = parser.add_mutually_exclusive_group()
    form.add_argument("--chat", action="store_true", help="format each prompt as a user's message with the chat "
        "template")  # fmt: skip
    form.add_argument("--instruction", action="store_true", help="format each prompt as an Alpaca instruction, as "
        "--sft does without a chat template")  # fmt: skip
    add("--max-new-tokens", type=int, default=128, metavar="N", help="(default: 128)")
    add("--temperature", type=float, default=0.0, metavar="X", help="draw tokens; 0 takes the most likely (default: 0)")
    add("--device", help="cuda, cuda:1, cpu, ... (default: the first GPU, or else the CPU)")
    add_json(parser)
    options = parser.parse_args(argv)
    if options.max_new_tokens < 1:
        raise ValueError(f"--max-new-tokens {options.max_new_tokens}: must be at least 1")
    if not 0 <= options.temperature < float("inf"):
        raise ValueError(f"--temperature {options.temperature:g}: must be 0 or more")
    return options


def open_model(path: str, device: str) -> tuple[Any, Any]:
    """Return transformers' model and tokenizer of a folder or a checkpoint. Raises ValueError in one line."""
    import transformers

    from megatron.bcd.huggingface import convert, folder, run_network
    from megatron.bcd.huggingface.core_format import CoreCheckpoint
    from megatron.bcd.tokenizer import one_line, open_tokenizer

    if os.path.isdir(path) and not os.path.isfile(os.path.join(path, folder.CONFIG)):
        checkpoint = run_network.checkpoint_folder(path, flag="--model")
        with tempfile.TemporaryDirectory() as exported:
            convert.to_hugging_face(CoreCheckpoint(checkpoint), exported, run_network.describe_checkpoint(checkpoint))
            return open_model(exported, device)
    path = folder.locate(path, flag="--model")
    if not folder.has_tokenizer(path):
        raise ValueError("--model: has no tokenizer that reads text. Give a folder with the tokenizer's files.")
    transformers.utils.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    try:
        model: Any = transformers.AutoModelForCausalLM.from_pretrained(
            path, dtype="auto", use_safetensors=True, local_files_only=True, trust_remote_code=False
        )
    except Exception as error:  # transformers, its models and safetensors can raise many types
        raise ValueError(f"--model {path}: can't be read ({one_line(error)})") from None
    return model.eval().to(device), open_tokenizer(path)


def encode(model: Any, tokenizer: Any, prompt: str, options: argparse.Namespace) -> list[int]:
    """Return the token ids of a prompt, formatted as the flags ask. Raises ValueError if it cannot be continued."""
    from megatron.bcd.data.sft.records import alpaca
    from megatron.bcd.tokenizer import one_line

    if options.chat:
        try:
            prompt = tokenizer.apply_chat_template(
                [{"role": "user", "content": prompt}], tokenize=False, add_generation_prompt=True
            )
        except Exception as error:  # there is no template, or it rejects the message
            raise ValueError(f"--chat: the tokenizer's chat template can't be used ({one_line(error)})") from None
    elif options.instruction:
        prompt = alpaca(prompt)
    ids: list[int] = tokenizer.encode(prompt, add_special_tokens=not options.chat)
    rows, positions = model.get_input_embeddings().num_embeddings, model.config.max_position_embeddings
    if not ids:
        raise ValueError("the prompt has no tokens: give at least a word")
    if max(ids) >= rows:
        raise ValueError(
            f"the tokenizer produced id {max(ids):,}, but the model's ids are 0 to {rows - 1:,}: give a model with the "
            "tokenizer that it was trained with"
        )
    if len(ids) >= positions:
        raise ValueError(
            f"the prompt has {len(ids):,} tokens, but the model has {positions:,} positions: give a shorter one"
        )
    return ids


def end_ids(model: Any, tokenizer: Any) -> list[int]:
    """Return the ids that end an answer: the end tokens of the model, or else of its tokenizer, and the special token
    that the chat template writes after an answer."""
    eos = model.generation_config.eos_token_id
    eos = tokenizer.eos_token_id if eos is None else eos
    ends = {eos} if isinstance(eos, int) else set(eos or ())
    if tokenizer.chat_template:
        try:
            text = tokenizer.apply_chat_template(
                [{"role": "user", "content": "Is it?"}, {"role": "assistant", "content": "Yes."}], tokenize=False
            )
        except Exception:  # `encode` reports a broken template
            return sorted(ends)
        after = tokenizer.encode(text.rpartition("Yes.")[2].lstrip(), add_special_tokens=False)
        ends |= set(after[:1]) & tokenizer.added_tokens_decoder.keys()
    return sorted(ends)


def run(options: argparse.Namespace) -> list[dict[str, Any]]:
    """Continue all prompts and return what --json writes. Raises ValueError if a file is missing or damaged, or a
    prompt is too long."""
    import torch
    from transformers import GenerationConfig

    answers = []
    device = options.device or ("cuda" if torch.cuda.is_available() else "cpu")
    try:
        torch.empty(0, device=device)
    except (RuntimeError, AssertionError) as error:
        raise ValueError(f"--device {device}: {str(error).splitlines()[0]}") from None
    model, tokenizer = open_model(options.model, device)
    encoded = [encode(model, tokenizer, prompt, options) for prompt in options.prompt]
    ends = end_ids(model, tokenizer)
    for prompt, ids in zip(options.prompt, encoded, strict=True):
        draws = {"do_sample": True, "temperature": options.temperature} if options.temperature else {"do_sample": False}
        model.generation_config = GenerationConfig(  # replaces that of the model's folder
            max_new_tokens=min(options.max_new_tokens, model.config.max_position_embeddings - len(ids)),
            eos_token_id=ends or None,
            pad_token_id=ends[0] if ends else 0,
            top_k=0,
            **draws,
        )
        tokens = torch.tensor([ids], device=device)
        new = model.generate(tokens, attention_mask=torch.ones_like(tokens))[0].tolist()[len(ids) :]
        is_ended = bool(new) and new[-1] in ends
        new = new[:-1] if is_ended else new
        # Decode with the prompt: without it, the first token may lose its leading space.
        start = len(tokenizer.decode(ids, skip_special_tokens=True))
        text = tokenizer.decode([*ids, *new], skip_special_tokens=True)[start:]
        answers.append({"prompt": prompt, "answer": text, "tokens": len(new), "is_ended": is_ended})
        if options.json != STDOUT:
            between = "\n" if options.chat or options.instruction else ""
            print(f"{prompt}{between}{text}\n", flush=True)
    return answers


@command(PROG)
def main(argv: Sequence[str]) -> None:
    options = parse_arguments(argv)
    check_writable(options.json, flag="--json")
    try:
        answers = run(options)
    except (MemoryError, RuntimeError) as error:
        if not isinstance(error, MemoryError) and "out of memory" not in str(error):
            raise
        raise ValueError("out of memory: give --device cpu, or fewer tokens") from None
    write_figures(options.json, answers, lambda: None)


if __name__ == "__main__":
    run_main(main)
