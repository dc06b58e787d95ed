"""Export a run's tokenizer for transformers: tokenizer.json and tokenizer_config.json."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Callable, Iterable
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
    if isinstance(tokenizer, bcd.SentencePieceTokenizer):
        engine, config = _convert_sentencepiece(tokenizer.unique_identifiers["tokenizer_model"])
    elif isinstance(tokenizer, bcd.GPT2BPETokenizer):
        engine = _copy(tokenizer.engine)
    elif isinstance(tokenizer, bcd.ByteLevelTokenizer):
        engine = _byte_level({bytes([i]): i for i in range(256)}, {_END: tokenizer.eod})
    elif isinstance(tokenizer, bcd.HuggingFaceTokenizer):
        engine = getattr(tokenizer.engine, "backend_tokenizer", None)  # a class written in Python has none
        config = dict(tokenizer.special_tokens)
        file = os.path.join(tokenizer.folder, CONFIG)
        if os.path.isfile(file):
            with open(file, encoding="utf-8") as stream:
                config |= json.load(stream)
        config.pop("auto_map", None)  # the code that it names is not exported
        if engine is not None:
            engine = _copy(engine)
            engine.no_truncation()
            engine.no_padding()
            if not adds_special_tokens:
                engine.post_processor = None
                config |= {"add_bos_token": False, "add_eos_token": False}
    else:
        engine = None
    if engine is None:
        return {}
    if isinstance(tokenizer, bcd.SentencePieceTokenizer | bcd.GPT2BPETokenizer | bcd.ByteLevelTokenizer):
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
        readers: dict[str, Callable[[str], list[int]]] = {
            "this program": bcd.HuggingFaceTokenizer(tokenizer_model=folder).tokenize,
            "AutoTokenizer of transformers": lambda text: list(theirs.encode(text, add_special_tokens=False)),
        }
        for name, encode in readers.items():
            wrong = next((line for line in LINES if encode(line) != tokenizer.tokenize(line)), None)
            if wrong is not None:
                return f"{name} reads its tokenizer differently from the run: {wrong!r} has other ids"
    except Exception as error:  # a tokenizer's class may raise anything
        return f"its tokenizer can't be read ({one_line(error)})"
    return None


def _copy(engine: Any) -> Any:
    return type(engine).from_str(engine.to_str())


def _merges(words: Iterable[str]) -> list[tuple[str, str]]:
    """Return the merges: all pairs that form one of `words`, which are sorted by priority."""
    known = dict.fromkeys(words)
    pairs = ((word[:i], word[i:]) for word in known for i in range(1, len(word)))
    return [(left, right) for left, right in pairs if left in known and right in known]


def _byte_level(ids: dict[bytes, int], special: dict[str, int], *, pattern: str | None = None) -> Any:
    """Build a byte-level BPE tokenizer. `pattern` splits the text into words; `ids` are sorted by rank."""
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
    from transformers.convert_slow_tokenizer import bytes_to_unicode

    letters = bytes_to_unicode()
    vocabulary = {"".join(letters[byte] for byte in token): i for token, i in ids.items()}
    engine = Tokenizer(models.BPE(vocabulary | special, _merges(vocabulary), ignore_merges=True))
    words = [pre_tokenizers.Split(Regex(pattern), "isolated")] if pattern else []
    bytes_of = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    engine.pre_tokenizer = pre_tokenizers.Sequence([*words, bytes_of])
    engine.decoder = decoders.ByteLevel()
    engine.add_special_tokens(list(special))
    return engine


def _convert_sentencepiece(path: str) -> tuple[Any, dict[str, Any]]:
    """Return the tokenizers library's form of a model file, and its special tokens; None if it is not unigram or BPE.

    If the model was not trained with the rule "identity", replacements of characters come from its table. For
    characters with combining marks, the library applies the table differently from SentencePiece.
    """
    import sentencepiece
    from sentencepiece import sentencepiece_model_pb2
    from tokenizers import Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers

    with open(path, "rb") as file:
        content = file.read()
    proto: Any = sentencepiece_model_pb2.ModelProto.FromString(content)
    kinds, trainer, rules = proto.SentencePiece, proto.trainer_spec, proto.normalizer_spec
    scores = {piece.piece: piece.score for piece in proto.pieces if piece.type == kinds.NORMAL}
    symbols = sorted((p.piece for p in proto.pieces if p.type == kinds.USER_DEFINED), key=len, reverse=True)
    model = sentencepiece.SentencePieceProcessor(model_proto=content)
    if trainer.model_type == trainer.UNIGRAM:
        highest = max(scores.values())
        scores |= {symbol: len(symbol.encode()) * highest - 0.1 for symbol in symbols}  # SentencePiece's rule
        pieces = [(piece.piece, scores.get(piece.piece, _NEVER)) for piece in proto.pieces]
        engine = Tokenizer(models.Unigram(pieces, model.unk_id(), trainer.byte_fallback))
    elif trainer.model_type == trainer.BPE:
        engine = Tokenizer(
            models.BPE(
                {piece.piece: i for i, piece in enumerate(proto.pieces)},
                _merges(sorted(scores, key=lambda word: -scores[word])),
                unk_token=model.id_to_piece(model.unk_id()),
                fuse_unk=True,
                byte_fallback=trainer.byte_fallback,
                ignore_merges=bool(symbols),
            )
        )
        if symbols:
            engine.pre_tokenizer = pre_tokenizers.Split(Regex("|".join(map(re.escape, symbols))), "isolated")
    else:
        return None, {}
    steps: list[Any] = []
    if rules.precompiled_charsmap:
        ends = model.normalize("a\r\na").strip(_SPACE).replace(_SPACE, " ")[1:-1]
        # the library treats "\r\n" as one character
        steps = [normalizers.Replace("\r\n", ends), normalizers.Precompiled(rules.precompiled_charsmap)]
    if rules.remove_extra_whitespaces:
        steps += [normalizers.Replace(Regex(rf"\A +|[ {_SPACE}]+\z"), ""), normalizers.Replace(Regex(" {2,}"), " ")]
    if rules.add_dummy_prefix:
        steps.append(normalizers.Prepend(_SPACE))
    engine.normalizer = normalizers.Sequence([*steps, normalizers.Replace(" ", _SPACE)])
    leading = 10**6 if rules.remove_extra_whitespaces else int(rules.add_dummy_prefix)
    engine.decoder = decoders.Sequence(
        [decoders.Replace(_SPACE, " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", leading, 0)]
    )
    ids = {f"{name}_token": getattr(model, f"{name}_id")() for name in ("bos", "eos", "unk", "pad")}
    return engine, {name: model.id_to_piece(i) for name, i in ids.items() if i >= 0}
