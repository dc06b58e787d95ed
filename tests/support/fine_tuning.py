"""Records for fine-tuning, and helpers that split a run's batches into records again."""

from __future__ import annotations

import json
import random
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import tokenizers
import torch
from tokenizers import decoders, models, pre_tokenizers, processors

from megatron.bcd.config import RunConfig
from support import worlds

END = 256
"""ByteLevelTokenizer's end-of-document token."""
SEQUENCE = 48
SPECIAL = ("<s>", "</s>", "<|im_start|>", "<|im_end|>")
CHATML = (
    "{% for message in messages %}\n{{ '<|im_start|>' + message['role'] + '\n' + message['content'] | trim }}"
    "{{ '<|im_end|>' + '\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)


def questions(count: int, *, seed: int = 1) -> list[dict[str, str]]:
    """Return prompts and completions of 4 to 40 bytes together, all different."""
    draw = random.Random(seed)
    records = []
    for number in range(count):
        prompt = f"{number}:" + "".join(draw.choices("abc ", k=draw.randint(1, 16))) + "?"
        completion = "".join(draw.choices("xyz ", k=draw.randint(1, 20)))
        records.append({"prompt": prompt, "completion": completion if completion.strip() else "x" * len(completion)})
    return records


def write_records(path: Path, records: Iterable[Mapping[str, Any]]) -> str:
    path.write_text("".join(json.dumps(record) + "\n" for record in records), encoding="utf-8")
    return str(path)


def config_of(path: str, **flags: Any) -> RunConfig:
    """Return the configuration of a small run that fine-tunes on the file."""
    return worlds.run_config(
        **{"sft": True, "data_path": path, "seq_length": SEQUENCE, "max_position_embeddings": SEQUENCE} | flags
    )


def samples_of(batch: Mapping[str, torch.Tensor]) -> list[dict[str, list[Any]]]:
    """Return the samples of a microbatch of byte-level tokens, separated by position_ids and without padding.

    Each has the `ids` of all its tokens, and `learned` for each token after the first.
    """
    results = []
    for row in range(len(batch["tokens"])):
        starts = [*torch.nonzero(batch["position_ids"][row] == 0).flatten().tolist(), batch["tokens"].size(1)]
        for start, end in zip(starts, starts[1:], strict=False):
            ids = [int(batch["tokens"][row, start]), *batch["labels"][row, start:end].tolist()]
            learned = batch["loss_mask"][row, start:end].tolist()
            if not all(token == END for token in ids):
                length = ids.index(END)  # without packing, the last sample of a sequence is padded
                results.append({"ids": ids[: length + 1], "learned": learned[:length]})
    return results


def text_of(ids: list[int]) -> str:
    return bytes(token for token in ids if token != END).decode()


def tokenizer_folder(
    folder: Path,
    template: str | None,
    *,
    where: str = "chat_template.jinja",
    bos: bool = False,
    special: tuple[str, ...] = SPECIAL,
) -> str:
    """Write a byte-level BPE tokenizer without merges but with special tokens, as in a model's folder."""
    folder.mkdir(parents=True, exist_ok=True)
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    engine = tokenizers.Tokenizer(models.BPE({letter: i for i, letter in enumerate(letters)}, []))
    engine.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    engine.decoder = decoders.ByteLevel()
    engine.add_special_tokens([*special])
    if bos:
        engine.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 256)])
    engine.save(str(folder / "tokenizer.json"))
    config: dict[str, Any] = {"eos_token": "</s>", "tokenizer_class": "PreTrainedTokenizerFast"}
    config |= {"bos_token": "<s>"} if "<s>" in special else {}
    if template is not None and where.endswith(".jinja"):
        (folder / where).write_text(template)
    elif template is not None:
        config["chat_template"] = template if where == "text" else [{"name": "default", "template": template}]
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    return str(folder)
