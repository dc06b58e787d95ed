"""Train a tokenizer and a model with it, and export both: transformers and the tools read the same ids."""

from __future__ import annotations

import json
from pathlib import Path

import sentencepiece
import transformers
from support.forked_runs import ForkedRuns

from megatron.bcd.huggingface import tokenizer_export
from megatron.bcd.tokenizer import build_tokenizer

TEXT = [f"The planner has {n} layers,  and\tthe model has {n * n} of them. \u00dcber \u65e5\u672c" for n in range(300)]
SIZES = "--num-layers 4 --hidden-size 32 --num-attention-heads 4 --seq-length 64 --max-position-embeddings 64"
RUN = "--micro-batch-size 2 --train-iters 2 --lr 1e-2 --bcd-num-blocks 2 --bcd-steps-per-block 1 --eval-iters 0"
ROWS = "--make-vocab-size-divisible-by 400"  # the softmax of a checkpoint includes padding rows, which are not exported


def test_from_text_to_transformers(runs: ForkedRuns, tmp_path: Path) -> None:
    """transformers and generate.py read an exported folder with the checkpoint's ids and end token, and a run that
    starts from it exports them again."""

    def run(script: str, words: str) -> str:
        [result] = runs.run(words.split(), folder=tmp_path, num_ranks=1, script=script)
        assert result.code == 0, result.stderr
        return result.stdout

    (tmp_path / "text.txt").write_text("\n".join(TEXT), encoding="utf-8")
    rules = {"byte_fallback": True, "normalization_rule_name": "identity", "remove_extra_whitespaces": False}
    rules |= {"vocab_size": 400, "model_type": "bpe", "allow_whitespace_only_pieces": True, "minloglevel": 2}
    prefix = str(tmp_path / "sp")
    sentencepiece.SentencePieceTrainer.train(input=str(tmp_path / "text.txt"), model_prefix=prefix, **rules)
    tokenizer = "--tokenizer-type SentencePieceTokenizer --tokenizer-model sp.model"
    run("preprocess_data", f"--input text.txt --output-prefix data --workers 1 --append-eod {tokenizer}")
    flags = f"{SIZES} {ROWS} {RUN} {tokenizer} --data-path data_text_document --split 1,0,0 --num-workers 0"
    run("pretrain_llama_bcd", f"{flags} --save run --save-hf out")
    said = run("convert_checkpoint", "--input run --output back")
    assert len(said.splitlines()) == 1, "no warning"
    ours = build_tokenizer("SentencePieceTokenizer", tokenizer_model=str(tmp_path / "sp.model"))
    for folder in ("out", "back"):
        assert tokenizer_export.find_difference(ours, str(tmp_path / folder)) is None
        theirs = transformers.AutoTokenizer.from_pretrained(tmp_path / folder)
        assert [theirs(text)["input_ids"] for text in TEXT] == [ours.tokenize(text) for text in TEXT]
        assert json.loads((tmp_path / folder / "config.json").read_text())["eos_token_id"] == ours.eod
    words = "--prompt planner --max-new-tokens 12 --json"
    assert len({run("generate", f"--model {model} {words}") for model in ("run", "out")}) == 1
    again = f"{RUN} --seq-length 64 --data-path data_text_document --split 1,0,0 --num-workers 0 --load-hf out"
    run("pretrain_llama_bcd", f"{again} --save-hf again")
    theirs = transformers.AutoTokenizer.from_pretrained(tmp_path / "again")
    assert [theirs(text)["input_ids"] for text in TEXT] == [ours.tokenize(text) for text in TEXT]
