"""tools/generate.py and tools/evaluate.py as typed."""

from __future__ import annotations

import importlib.util
import json
import math
import os
import subprocess
import sys
from pathlib import Path
from unittest import mock

import evaluate
import pytest
import tokenizers
import torch
import transformers
from support import fine_tuning
from support import huggingface_models as models
from support.forked_runs import ForkedRuns

BYTES = ["--tokenizer-type", "ByteLevelTokenizer"]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return models.write_model("llama2", tmp_path_factory.mktemp("model"))


def run(runs: ForkedRuns, folder: Path, tool: str, *words: object) -> tuple[object, str, str]:
    """Return exit code, stdout and stderr."""
    (result,) = runs.run([str(word) for word in words], folder=folder, num_ranks=1, script=tool)
    return result.code, result.stdout, result.stderr


def test_generate(runs: ForkedRuns, model: Path, tmp_path: Path) -> None:
    """Each prompt has an answer, draws depend on the seed alone, and --json prints JSON only."""
    (tmp_path / "prompts.txt").write_text("one\n\ntwo\n")
    words = ["--model", model, *BYTES, "--prompt", "zero", "--prompts", "prompts.txt", "--max-new-tokens", 9]
    code, said, _ = run(runs, tmp_path, "generate", *words)
    assert code == 0 and [line for line in said.split("\n\n") if line[:3] in ("zer", "one", "two")]
    draws = []
    for seed in (1, 1, 2):
        drawn = [*words, "--temperature", 1.5, "--top-p", 0.9, "--seed", seed, "--json"]
        code, said, error = run(runs, tmp_path, "generate", *drawn)
        assert code == 0, error
        draws.append(json.loads(said))
    assert [item["prompt"] for item in draws[0]] == ["zero", "one", "two"]
    assert all(entry["tokens"] <= 9 for entry in draws[0])
    assert draws[0] == draws[1] != draws[2]


TEMPLATE = (
    "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}{% if add_generation_prompt %}<a>{% endif %}"
)


def test_chat(runs: ForkedRuns, tmp_path: Path) -> None:
    """--chat puts the prompt and the system message into the template, and ends at the template's end token. The answer
    begins a line of its own."""
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
    for flags in (["--chat", "--system", "s"], ["--chat"], []):
        code, said, error = run(runs, tmp_path, "generate", *words, *flags)
        assert code == 0, error
        answers.append(json.loads(said)[0]["answer"])
    words[words.index("hi")] = "<system>s<user>hi<a>"
    code, said, error = run(runs, tmp_path, "generate", *words)
    assert json.loads(said)[0]["answer"] == answers[0] and len(set(answers)) == 3
    end = answers[1].split()[-1]
    engine.add_tokens([tokenizers.AddedToken(end)])
    engine.save(str(folder / "tokenizer.json"))
    with_end = f"{{% if m.role == 'assistant' %}}{{{{ {json.dumps(end)} }}}}{{% endif %}}{{% endfor"
    (folder / "chat_template.jinja").write_text(TEMPLATE.replace("{% endfor", with_end))
    words[words.index("<system>s<user>hi<a>")] = "hi"
    code, said, error = run(runs, tmp_path, "generate", *words, "--chat")
    assert code == 0, error
    ended = json.loads(said)[0]
    assert f"hi\n{ended['answer']}\n" in run(runs, tmp_path, "generate", *words[:-1], "--chat")[1]
    assert ended["is_ended"] and end not in ended["answer"].split() and answers[1].startswith(ended["answer"])


REFUSED = {
    "--prompt": ["--model", "MODEL"],
    "--max-new-tokens 0": ["--model", "MODEL", "--prompt", "a", "--max-new-tokens", "0"],
    "--prompts absent.txt": ["--model", "MODEL", "--prompts", "absent.txt"],
    "absent": ["--model", "./absent", "--prompt", "a"],
    "--tokenizer-type": ["--model", "MODEL", "--prompt", "a"],
    "70 tokens": ["--model", "MODEL", *BYTES, "--prompt", "x" * 70],
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
    words = ["--model", model, "--tokenizer-type", "HuggingFaceTokenizer", "--tokenizer-model", large]
    code, printed, error = run(runs, tmp_path, "generate", *words, "--prompt", "a</s>")
    assert (code, printed) == (2, "") and "--tokenizer-type" in error and len(error.splitlines()) == 1


def test_text_is_that_of_transformers(runs: ForkedRuns, model: Path, tmp_path: Path) -> None:
    """The answer is that of transformers' greedy generation, up to the end token."""
    words = ["--model", model, *BYTES, "--prompt", "The sky", "--max-new-tokens", 16, "--json"]
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


TASK = """
task: local_choice
dataset_path: json
dataset_kwargs: {{data_files: {{test: {data}}}}}
test_split: test
output_type: multiple_choice
doc_to_text: "{{{{query}}}}"
doc_to_choice: choices
doc_to_target: gold
metric_list: [{{metric: acc}}, {{metric: acc_norm}}]
"""


@pytest.mark.skipif(
    importlib.util.find_spec("lm_eval") is None, reason="needs lm-evaluation-harness: pip install lm_eval"
)
def test_lm_evaluation_harness(repo_root: Path, model: Path, tmp_path: Path) -> None:
    """lm-evaluation-harness runs with the model and the tokenizer, and a file has the results of the same task."""
    data = tmp_path / "mc.jsonl"
    questions = [
        {"query": f"{i} and {i} is", "choices": [str(i), str(2 * i), "none"], "gold": i % 3} for i in range(12)
    ]
    data.write_text("\n".join(map(json.dumps, questions)))
    letters = [
        {"ctx": question["query"], "endings": question["choices"], "label": "ABC"[question["gold"]]}
        for question in questions
    ]
    (tmp_path / "letters.jsonl").write_text("\n".join(map(json.dumps, letters)))
    (tmp_path / "tasks").mkdir()
    (tmp_path / "tasks" / "local_choice.yaml").write_text(TASK.format(data=data))
    (tmp_path / "text.txt").write_text("some words " * 40)
    words = ["--model", str(model), *BYTES, "--multiple-choice", str(data), "letters.jsonl", "--text", "text.txt"]
    words += ["--json", "out.json", "--lm-eval", "local_choice", "--lm-eval-include", str(tmp_path / "tasks")]
    done = subprocess.run(
        [sys.executable, str(repo_root / "tools" / "evaluate.py"), *words],
        cwd=tmp_path,
        env=os.environ | {"OMP_NUM_THREADS": "1", "HF_HOME": str(tmp_path), "HF_HUB_OFFLINE": "1"},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    result = json.loads((tmp_path / "out.json").read_text())
    ours, theirs = result["results"][str(data)], result["results"]["local_choice"]
    for metric in ("acc", "acc_stderr", "acc_norm", "acc_norm_stderr"):
        assert (
            theirs[f"{metric},none"] == ours[f"{metric},none"] == result["results"]["letters.jsonl"][f"{metric},none"]
        )
    text = result["results"]["text.txt"]
    assert 4 < text["bits_per_byte,none"] < 20
    assert text["bits_per_byte,none"] == pytest.approx(math.log2(text["byte_perplexity,none"]))


@pytest.mark.parametrize(("words", "said"), [([], "--text"), (["--text", "text.txt"], "lm_eval")])
def test_evaluate_refuses(words: list[str], said: str, capsys: pytest.CaptureFixture[str]) -> None:
    """A mistake or a missing package is one line that names it."""
    with mock.patch("importlib.util.find_spec", lambda name: None):
        assert evaluate.main(["--model", "absent", *words]) == 2
    [line] = capsys.readouterr().err.splitlines()
    assert said in line
