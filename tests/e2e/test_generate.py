"""tools/generate.py and tools/evaluate.py as typed."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import tokenizers
from support import huggingface_models as models
from support.forked_runs import ForkedRuns

BYTES = ["--tokenizer-type", "ByteLevelTokenizer"]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return models.write_model("llama2", tmp_path_factory.mktemp("model"))


def run(runs: ForkedRuns, folder: Path, tool: str, *words: object) -> tuple[object, str, str]:
    """Exit code, stdout and stderr."""
    (result,) = runs.run([str(word) for word in words], folder=folder, num_ranks=1, script=tool)
    return result.code, result.stdout, result.stderr


def test_generate(runs: ForkedRuns, model: Path, tmp_path: Path) -> None:
    """Prompts that are lost, a seed without effect, JSON beside other words."""
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
    assert [one["prompt"] for one in draws[0]] == ["zero", "one", "two"]
    assert all(one["tokens"] <= 9 for one in draws[0])
    assert draws[0] == draws[1] != draws[2]


TEMPLATE = (
    "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}{% if add_generation_prompt %}<a>{% endif %}"
)


def test_chat(runs: ForkedRuns, tmp_path: Path) -> None:
    """A prompt that is not put into the template, or an instruction that is not in the form that was trained."""
    folder = models.write_model("llama2", tmp_path / "model")
    vocabulary = {chr(code): code - 31 for code in range(32, 127)} | {"</s>": 0}
    engine = tokenizers.Tokenizer(tokenizers.models.WordLevel(vocabulary, unk_token="</s>"))
    engine.pre_tokenizer = tokenizers.pre_tokenizers.Split(tokenizers.Regex("."), "isolated")
    engine.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps({"eos_token": "</s>"}))
    words = ["--model", folder, "--prompt", "hi", "--max-new-tokens", 12, "--json"]
    code, _, error = run(runs, tmp_path, "generate", *words, "--chat")
    assert code == 2 and "--chat: the model's tokenizer has no chat template" in error
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
    assert ended["is_ended"] and end not in ended["answer"].split() and answers[1].startswith(ended["answer"])


REFUSED = {
    "nothing to continue": ["--model", "MODEL"],
    "--max-new-tokens 0: must be at least 1": ["--model", "MODEL", "--prompt", "a", "--max-new-tokens", "0"],
    "--top-p 0.5 has no effect": ["--model", "MODEL", "--prompt", "a", "--top-p", "0.5"],
    "--temperature -1: must be": ["--model", "MODEL", "--prompt", "a", "--temperature", "-1"],
    "--seed 18446744073709551616: must be 0 to": ["--model", "MODEL", "--prompt", "a", "--seed", str(2**64)],
    "--system needs --chat": ["--model", "MODEL", "--prompt", "a", "--system", "s"],
    "--prompts absent.txt can't be read": ["--model", "MODEL", "--prompts", "absent.txt"],
    "absent: no such folder": ["--model", "./absent", "--prompt", "a"],
    "holds no checkpoint": ["--model", ".", "--prompt", "a"],
    "give --tokenizer-type": ["--model", "MODEL", "--prompt", "a"],
    "the prompt has 70 tokens, and the model has 64 positions": ["--model", "MODEL", *BYTES, "--prompt", "x" * 70],
}


@pytest.mark.parametrize("said", REFUSED)
def test_generate_refuses(runs: ForkedRuns, model: Path, tmp_path: Path, said: str) -> None:
    """A traceback, or an answer to nothing."""
    words = [str(model) if word == "MODEL" else word for word in REFUSED[said]]
    code, printed, error = run(runs, tmp_path, "generate", *words)
    assert (code, printed) == (2, "") and len(error.splitlines()) == 1
    assert error.startswith("tools/generate.py: error: ") and said in error


def test_evaluate(runs: ForkedRuns, model: Path, tmp_path: Path) -> None:
    """A text or file that is left out, figures that are not those of the table."""
    (tmp_path / "text.txt").write_text("some words " * 20)
    (tmp_path / "mc.jsonl").write_text(json.dumps({"query": "a", "choices": ["b", "c"], "gold": 0}) + "\n")
    words = ["--model", model, *BYTES, "--text", "text.txt", "--multiple-choice", "mc.jsonl", "--stride", 30]
    code, said, error = run(runs, tmp_path, "evaluate", *words, "--json", "out.json")
    assert code == 0, error
    found = json.loads((tmp_path / "out.json").read_text())
    assert found["texts"]["text.txt"]["tokens"] == 220 and found["multiple_choice"]["mc.jsonl"]["questions"] == 1
    assert f"perplexity {found['texts']['text.txt']['perplexity']:.3f} (220 tokens" in said
    assert f"acc {found['multiple_choice']['mc.jsonl']['acc']:.4f}" in said
    (tmp_path / "empty.txt").write_text("")
    for words, expected in (
        (["--text", "empty.txt"], "--text empty.txt: the text is empty"),
        (["--text", "text.txt", "--stride", "65"], "--stride 65: must be 1 to 64"),
        (["--multiple-choice", "text.txt"], "text.txt, line 1"),
        (["--text", "text.txt", "--limit", "2"], "--limit needs --multiple-choice or --lm-eval"),
        (["--multiple-choice", "mc.jsonl", "--stride", "2"], "--stride needs --text"),
        ([], "nothing to evaluate"),
    ):
        code, said, error = run(runs, tmp_path, "evaluate", "--model", model, *BYTES, *words)
        assert (code, said) == (2, "") and expected in error and len(error.splitlines()) == 1


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
    """An adapter that lm-evaluation-harness can't use, or that scores otherwise than --multiple-choice."""
    data = tmp_path / "mc.jsonl"
    questions = [
        {"query": f"{i} and {i} is", "choices": [str(i), str(2 * i), "none"], "gold": i % 3} for i in range(12)
    ]
    data.write_text("\n".join(map(json.dumps, questions)))
    (tmp_path / "tasks").mkdir()
    (tmp_path / "tasks" / "local_choice.yaml").write_text(TASK.format(data=data))
    words = ["--model", str(model), *BYTES, "--multiple-choice", str(data), "--json", "out.json"]
    words += ["--lm-eval", "local_choice", "--lm-eval-include", str(tmp_path / "tasks")]
    done = subprocess.run(
        [sys.executable, str(repo_root / "tools" / "evaluate.py"), *words],
        cwd=tmp_path,
        env=os.environ | {"OMP_NUM_THREADS": "1", "HF_HOME": str(tmp_path), "HF_HUB_OFFLINE": "1"},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    found = json.loads((tmp_path / "out.json").read_text())
    own, theirs = found["multiple_choice"][str(data)], found["lm_eval"]["local_choice"]
    for metric in ("acc", "acc_norm"):
        assert theirs[f"{metric},none"] == pytest.approx(own[metric])
