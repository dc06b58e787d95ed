"""From text or conversations to an exported model that answers, in transformers and by tools/generate.py."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import sentencepiece
import tokenizers
import torch
import transformers
from support import fine_tuning, huggingface_models
from support import huggingface_models as models
from support.forked_runs import ForkedRuns

from megatron.bcd.huggingface import tokenizer_export
from megatron.bcd.huggingface.tokenizer_export import export_files
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


TALK = [{"role": "user", "content": "Hi!"}, {"role": "assistant", "content": "Hello."}]
LONG = [{"role": "user", "content": "Tell."}, {"role": "assistant", "content": "Yes!"}] * 3


def metrics_of(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def test_conversations_from_model_to_model(runs: ForkedRuns, tmp_path: Path) -> None:
    """Fine-tuning on conversations takes the model's tokenizer and template, reports cut samples, trains whole epochs,
    and exports a model that has learned an answer."""
    model = huggingface_models.write_model("llama_tied", tmp_path / "model")
    fine_tuning.tokenizer_folder(model, fine_tuning.CHATML, special=fine_tuning.SPECIAL[1:])
    records = [{"messages": TALK}] * 30 + [{"messages": LONG}] * 2
    fine_tuning.write_records(tmp_path / "records.jsonl", records)
    flags = "--sft --data-path records.jsonl --load-hf model --save-hf trained --num-epochs 12 --split 75,25,0"
    flags += " --seq-length 64 --micro-batch-size 2 --global-batch-size 4 --lr 1e-2 --lr-warmup-fraction 0.1"
    flags += " --pipeline-model-parallel-size 2 --bcd-num-blocks 2 --bcd-steps-per-block 5 --num-workers 0"
    flags += " --log-interval 1 --eval-interval 8 --metrics-file metrics.jsonl"
    results = runs.run(flags.split(), folder=tmp_path, num_ranks=2, script="pretrain_llama_bcd")
    assert [(rank.code, rank.stderr) for rank in results] == [(0, "")] * 2
    said = results[0].stdout
    assert "--seq-length 64" in said, "two samples are longer"
    lines = metrics_of(tmp_path / "metrics.jsonl")
    steps = [line for line in lines if "grad_norm" in line]
    num_sequences = int(said.split("training 24 samples in ")[1].split()[0])
    assert len(steps) == -(-num_sequences * 12 // 4) and steps[-1]["iteration"] == len(steps)
    assert steps[-1]["loss"] < 0.5 * steps[0]["loss"]
    assert len(list((tmp_path / "cache" / "sft").iterdir())) == 1

    tokenizer = transformers.AutoTokenizer.from_pretrained(tmp_path / "trained")
    trained = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "trained", dtype=torch.float32)
    prompt = tokenizer.apply_chat_template(TALK[:1], add_generation_prompt=True, return_tensors="pt", return_dict=True)
    output = trained.generate(**prompt, max_new_tokens=7, do_sample=False, pad_token_id=0)
    answer = tokenizer.decode(output[0, prompt["input_ids"].size(1) :])
    assert answer == "Hello.<|im_end|>"


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small LLaMA with a tokenizer of bytes."""
    folder = models.write_model("llama2", tmp_path_factory.mktemp("model"))
    for name, content in export_files(build_tokenizer("ByteLevelTokenizer"), adds_special_tokens=True).items():
        (folder / name).write_bytes(content)
    return folder


def run(runs: ForkedRuns, folder: Path, tool: str, *words: object) -> tuple[object, str, str]:
    """Return exit code, stdout and stderr."""
    (result,) = runs.run([str(word) for word in words], folder=folder, num_ranks=1, script=tool)
    return result.code, result.stdout, result.stderr


TEMPLATE = (
    "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}{% if add_generation_prompt %}<a>{% endif %}"
)


def test_chat(runs: ForkedRuns, tmp_path: Path) -> None:
    """--chat puts the prompt into the template, and ends at the template's end token. The answer begins a new line."""
    folder = models.write_model("llama2", tmp_path / "model")
    vocabulary = {chr(code): code - 31 for code in range(32, 127)} | {"</s>": 0}
    engine = tokenizers.Tokenizer(tokenizers.models.WordLevel(vocabulary, unk_token="</s>"))
    engine.pre_tokenizer = tokenizers.pre_tokenizers.Split(tokenizers.Regex("."), "isolated")
    engine.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps({"eos_token": "</s>"}))
    words = ["--model", folder, "--prompt", "hi", "--max-new-tokens", 12, "--json"]
    code, _, error = run(runs, tmp_path, "generate", *words, "--chat")
    assert code == 2 and "--chat" in error
    (folder / "chat_template.jinja").write_text(TEMPLATE)
    answers = []
    for flags in (["--chat"], []):
        code, said, error = run(runs, tmp_path, "generate", *words, *flags)
        assert code == 0, error
        answers.append(json.loads(said)[0]["answer"])
    words[words.index("hi")] = "<user>hi<a>"
    code, said, error = run(runs, tmp_path, "generate", *words)
    assert json.loads(said)[0]["answer"] == answers[0] and len(set(answers)) == 2
    end = answers[0].split()[-1]
    engine.add_tokens([tokenizers.AddedToken(end)])
    engine.save(str(folder / "tokenizer.json"))
    with_end = f"{{% if m.role == 'assistant' %}}{{{{ {json.dumps(end)} }}}}{{% endif %}}{{% endfor"
    (folder / "chat_template.jinja").write_text(TEMPLATE.replace("{% endfor", with_end))
    words[words.index("<user>hi<a>")] = "hi"
    code, said, error = run(runs, tmp_path, "generate", *words, "--chat")
    assert code == 0, error
    ended = json.loads(said)[0]
    assert f"hi\n{ended['answer']}\n" in run(runs, tmp_path, "generate", *words[:-1], "--chat")[1]
    assert ended["is_ended"] and end not in ended["answer"].split() and answers[0].startswith(ended["answer"])


REFUSED = {
    "--prompt": ["--model", "MODEL"],
    "70 tokens": ["--model", "MODEL", "--prompt", "x" * 70],
}


@pytest.mark.parametrize("said", REFUSED)
def test_generate_refuses(runs: ForkedRuns, model: Path, tmp_path: Path, said: str) -> None:
    """A mistake is one line that names it, with exit code 2 and without an answer."""
    words = [str(model) if word == "MODEL" else word for word in REFUSED[said]]
    code, printed, error = run(runs, tmp_path, "generate", *words)
    assert (code, printed) == (2, "") and len(error.splitlines()) == 1 and said in error


def test_another_tokenizer(runs: ForkedRuns, model: Path, tmp_path: Path) -> None:
    """A tokenizer with ids beyond the embedding is refused in one line."""
    large = tmp_path / "large"
    fine_tuning.tokenizer_folder(large, None, special=tuple(f"<{i}>" for i in range(9)) + fine_tuning.SPECIAL)
    for file in model.iterdir():
        if "tokenizer" not in file.name:
            shutil.copy(file, large)
    code, printed, error = run(runs, tmp_path, "generate", "--model", large, "--prompt", "a</s>")
    assert (code, printed) == (2, "") and "tokenizer" in error and len(error.splitlines()) == 1


def test_text_is_that_of_transformers(runs: ForkedRuns, model: Path, tmp_path: Path) -> None:
    """The answer is that of transformers' greedy generation, up to the end token."""
    words = ["--model", model, "--prompt", "The sky", "--max-new-tokens", 16, "--json"]
    code, said, error = run(runs, tmp_path, "generate", *words)
    assert code == 0, error
    tokens = torch.tensor([[*b"The sky"]])
    theirs = transformers.AutoModelForCausalLM.from_pretrained(model)
    expected = theirs.generate(tokens, max_new_tokens=16, do_sample=False, eos_token_id=256, pad_token_id=0)
    new = expected[0, tokens.size(1) :].tolist()
    new = new[: new.index(256)] if 256 in new else new
    (actual,) = json.loads(said)
    assert actual["tokens"] == len(new)
    assert actual["answer"] == bytes(i for i in new if i < 256).decode(errors="replace")
