"""Export a run's tokenizer for transformers: tokenizer.json and tokenizer_config.json."""

from __future__ import annotations

import copy
import json
import os
import re
from typing import Any

from megatron.bcd import tokenizer as bcd
from megatron.bcd.tokenizer import CONFIG, TOKENIZER_JSON, one_line

_END = "<|endoftext|>"
_SPACE = "\u2581"
_NEVER = -1000.0
"""Score of a piece that no text may be split into. It is below any path of other pieces through its characters."""
LINES = (
    "The planner, and don't 1234",
    "=======     aaaaaaaaaaa",
    "  spaces   inside,\tbehind  ",
    "\r\n\n lines\r\n",
    "na\u00efve \u0441\u043b\u043e\u0432\u043e \u65e5\u672c\u8a9e \u0939\u093f\u0928\u094d\u0926\u0940",
    "\U0001f600\u200d\u2581\u00a0\u3000x",
    "e\u0323\u0302 \u0308 marks",
    "<s> </s> <unk> <0x0A> <|endoftext|>",
)
"""Texts to compare tokenizers on: white space, scripts, combining marks, spelled-out special tokens."""


def export_files(tokenizer: bcd.Tokenizer, *, adds_special_tokens: bool) -> dict[str, bytes]:
    """Return tokenizer.json and tokenizer_config.json by name, or nothing if the tokenizers library has no equivalent.

    Set `adds_special_tokens` if the model was trained with the special tokens that a Hugging Face tokenizer adds.
    """
    config: dict[str, Any] = {"eos_token": _END}
    if isinstance(tokenizer, bcd.HuggingFaceTokenizer):
        engine = getattr(tokenizer.engine, "backend_tokenizer", None)  # a class written in Python has none
        if engine is None:
            return {}
        engine = copy.deepcopy(engine)
        engine.no_truncation()
        engine.no_padding()
        config = dict(tokenizer.special_tokens)
        file = os.path.join(tokenizer.folder, CONFIG)
        if os.path.isfile(file):
            with open(file, encoding="utf-8") as stream:
                config |= json.load(stream)
        config.pop("auto_map", None)  # the code that it names is not exported
        if not adds_special_tokens:
            engine.post_processor = None
            config |= {"add_bos_token": False, "add_eos_token": False}
    elif isinstance(tokenizer, bcd.NullTokenizer):
        return {}
    else:
        if isinstance(tokenizer, bcd.SentencePieceTokenizer):
            engine, config = _convert_sentencepiece(tokenizer.unique_identifiers["tokenizer_model"])
        elif isinstance(tokenizer, bcd.GPT2BPETokenizer):
            engine = copy.deepcopy(tokenizer.engine)
        else:
            engine = _byte_level()
        engine.add_special_tokens([token for token in config.values() if token])
        # special tokens that a text spells out are text, as in training
        config |= {"split_special_tokens": True, "clean_up_tokenization_spaces": False}
    # the model families' own classes would rebuild parts of tokenizer.json
    config["tokenizer_class"] = "PreTrainedTokenizerFast"
    return {
        TOKENIZER_JSON: engine.to_str().encode(),
        CONFIG: f"{json.dumps(config, indent=2, ensure_ascii=False)}\n".encode(),
    }


def find_difference(tokenizer: bcd.Tokenizer, folder: str) -> str | None:
    """Return how the exported tokenizer differs from the run's, as part of a line; None if they agree.

    Compare the ids of `LINES` as tokenized by this package and by transformers.
    """
    if isinstance(tokenizer, bcd.NullTokenizer):
        return "NullTokenizer has no text to read: the model is written without a tokenizer"
    from transformers import AutoTokenizer

    try:
        theirs = AutoTokenizer.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
        for line in LINES:
            if theirs.encode(line, add_special_tokens=False) != tokenizer.tokenize(line):
                return f"transformers reads its tokenizer differently from the run: {line!r} has other ids"
    except Exception as error:  # a tokenizer's class may raise anything
        return f"its tokenizer can't be read ({one_line(error)})"
    return None


def _byte_level() -> Any:
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers.convert_slow_tokenizer import bytes_to_unicode

    vocabulary = {letter: byte for byte, letter in bytes_to_unicode().items()} | {_END: 256}
    engine = Tokenizer(models.BPE(vocabulary, []))
    engine.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    engine.decoder = decoders.ByteLevel()
    return engine


def _convert_sentencepiece(path: str) -> tuple[Any, dict[str, Any]]:
    """Return the tokenizers library's form of a model file, unigram or BPE, and its special tokens.

    transformers converts the model, but leaves out SentencePiece's rules for spaces, and reads special tokens that a
    text spells out. Replacements of characters come from the model's table. For characters with combining marks and
    for "\\r\\n", the library applies it differently from SentencePiece.
    """
    from tokenizers import Regex, decoders, normalizers, pre_tokenizers
    from transformers.convert_slow_tokenizer import SentencePieceExtractor, SpmConverter, generate_merges

    proto: Any = SentencePieceExtractor(path).proto
    kinds, trainer, rules = proto.SentencePiece, proto.trainer_spec, proto.normalizer_spec
    if trainer.model_type == trainer.UNIGRAM:
        readable = (kinds.NORMAL, kinds.USER_DEFINED)
        scores = [(piece.piece, piece.score if piece.type in readable else _NEVER) for piece in proto.pieces]
        engine = SpmConverter.build_tokenizer_from_spm_proto(proto, scores)
    else:
        of_text = {piece.piece: i for i, piece in enumerate(proto.pieces) if piece.type == kinds.NORMAL}
        vocabulary = {piece.piece: i for i, piece in enumerate(proto.pieces)}
        engine = SpmConverter.build_tokenizer_from_spm_proto(proto, vocabulary, generate_merges(of_text, None))
        symbols = [piece.piece for piece in proto.pieces if piece.type == kinds.USER_DEFINED]
        if symbols:
            longest_first = sorted(map(re.escape, symbols), key=len, reverse=True)
            engine.pre_tokenizer = pre_tokenizers.Split(Regex("|".join(longest_first)), "isolated")
            engine.model.ignore_merges = True
    steps = [engine.normalizer]
    if rules.remove_extra_whitespaces:
        ends, inside = Regex(rf"\A{_SPACE}+|{_SPACE}+\z"), Regex(f"{_SPACE}{{2,}}")
        steps += [normalizers.Replace(ends, ""), normalizers.Replace(inside, _SPACE)]
    if rules.add_dummy_prefix:
        steps.append(normalizers.Prepend(_SPACE))
    engine.normalizer = normalizers.Sequence(steps)
    strip = decoders.Strip(" ", int(rules.add_dummy_prefix), 0)
    engine.decoder = decoders.Sequence([engine.decoder, decoders.Fuse(), strip])
    names = [name for name in ("bos", "eos", "unk", "pad") if getattr(trainer, f"{name}_id") >= 0]
    return engine, {f"{name}_token": getattr(trainer, f"{name}_piece") for name in names}
