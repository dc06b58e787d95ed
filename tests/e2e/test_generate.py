"""tools/generate.py as typed."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import tokenizers
import torch
import transformers
from support import fine_tuning
from support import huggingface_models as models
from support.forked_runs import ForkedRuns

from megatron.bcd.huggingface.tokenizer_export import export_files
from megatron.bcd.tokenizer import build_tokenizer


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
