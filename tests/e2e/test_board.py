"""tools/board.py in a real browser, its refusals, and the pages of --html."""

from __future__ import annotations

import contextlib
import json
import re
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import board
import board_runs
import plan
import psutil
import pytest
import report
import transformers
from support.fine_tuning import CHATML, questions, tokenizer_folder, write_records
from support.processes import ROOT

PLAN = ["--task", "sft", "--gpu", "rtx4090", "--num-gpus", "1", "--seq-length", "64"]
STEPS = 200
WAIT_MS = 280_000  # two busy cores
WIDTHS = (1280, 400)


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    """Headless Chromium. Skips the test without it."""
    playwright = pytest.importorskip("playwright.sync_api", reason="needs pip install playwright")
    path = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
    if path is None:
        pytest.skip("needs a browser: apt-get install chromium")
    with playwright.sync_playwright() as driver:
        started = driver.chromium.launch(executable_path=path, args=["--no-sandbox"])
        yield started
        started.close()


@pytest.fixture
def model(tmp_path: Path) -> str:
    """The folder of a small LLaMA with a tokenizer of bytes."""
    folder = tokenizer_folder(tmp_path / "small", CHATML)
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2}
    config = transformers.LlamaConfig(vocab_size=260, max_position_embeddings=128, **sizes)
    transformers.LlamaForCausalLM(config).save_pretrained(folder)
    write_records(tmp_path / "records.jsonl", questions(60))
    return "small"


@pytest.fixture
def serve(tmp_path: Path) -> Iterator[Callable[[int], tuple[subprocess.Popen[str], str]]]:
    """A function that starts the server in tmp_path. At the end kill it, and the runs that outlive it."""
    pytest.importorskip("flask", reason="needs pip install -e .[board]")
    servers: list[subprocess.Popen[str]] = []

    def start(port: int = 0) -> tuple[subprocess.Popen[str], str]:
        words = [sys.executable, str(ROOT / "tools" / "board.py"), "--port", str(port)]
        servers.append(subprocess.Popen(words, cwd=tmp_path, stdout=subprocess.PIPE, text=True))
        assert servers[-1].stdout
        return servers[-1], servers[-1].stdout.readline().strip()

    yield start
    for server in servers:
        server.kill()
        server.wait()
    for record in tmp_path.rglob(board_runs.RECORD):
        with contextlib.suppress(psutil.NoSuchProcess):
            run = psutil.Process(json.loads(record.read_text())["pid"])
            for process in [*run.children(recursive=True), run]:
                process.kill()


def new_page(browser: Any, asked: list[str], **options: Any) -> Any:
    """Return a page that notes every address that it asks."""
    page = browser.new_page(**options)
    page.set_default_timeout(WAIT_MS)
    page.on("request", lambda request: asked.append(request.url))
    return page


def iterations(path: Path) -> list[int]:
    lines = map(json.loads, path.read_text().splitlines())
    return [line["iteration"] for line in lines if "loss" in line]


@pytest.mark.timeout(900)
def test_plan_run_stop_resume_watch(browser: Any, serve: Any, model: str, tmp_path: Path) -> None:
    """A run that ends with the page or the server, starts twice, loses steps at a stop, or is not the planned command;
    curves or answers that never come; a font or a script from elsewhere."""
    asked: list[str] = []
    server, url = serve()
    page = new_page(browser, asked)
    page.goto(url)
    page.fill("[name=model]", model)
    page.fill("[name=plan_flags]", "--seq-length 64")
    page.click("text=Plan >> nth=-1")
    sentence = page.inner_text(".sentence")
    assert sentence.startswith("small: every layer trained in every step, fits one RTX 4090")
    page.click("nav >> text=Run")
    page.fill("[name='--data-path']", "records.jsonl")
    page.fill("[name=out]", "out/first")
    page.fill("[name='--train-iters']", str(STEPS))
    page.fill("[name=flags]", "--log-interval 1")
    page.click("text=Show the command")
    shown = page.inner_text(".command pre")
    other = new_page(browser, asked)
    other.goto(page.url)
    page.click("text=Start >> nth=-1")
    page.wait_for_selector("#state")
    other.click("text=Start >> nth=-1")
    assert "out/first: a run is going there." in other.inner_text("[role=alert]")
    folder = tmp_path / "out" / "first"
    record = json.loads((folder / board_runs.RECORD).read_text())
    assert record["command"] == shown and f"--train-iters {STEPS}" in shown and "--num-epochs" not in shown
    page.reload()
    server.kill()
    server.wait()
    serve(int(url.rstrip("/").rpartition(":")[2]))
    page.wait_for_selector(".status.running")  # without a reload
    page.click("text=Stop and save")
    other.goto(page.url)
    for each in (page, other):
        each.wait_for_selector(".status.stopped")
    done = iterations(folder / "metrics.jsonl")[-1]
    assert done < STEPS and (folder / "checkpoints" / f"iter_{done:07d}").is_dir()
    page.click("text=Resume")
    for each in (page, other):
        each.wait_for_selector(".status.finished")
    assert f"iteration {STEPS} of {STEPS}" in page.inner_text("#state")
    assert iterations(folder / "metrics.jsonl") == [*range(1, STEPS + 1)]
    page.click("#state >> text=Watch")
    assert page.locator(".chart").count() == 3 and page.locator("path.line.c0").count() == 3
    page.hover(".plot >> nth=0")
    assert "first: " in page.inner_text(".tip")
    page.fill("[name=prompt]", "1:a?")
    page.select_option("[name=as]", "text")
    page.click("text=Answer")
    page.wait_for_selector("blockquote")
    assert {re.sub(r"^(\w+://[^/]*|data:).*", r"\1", address) for address in asked} <= {url.rstrip("/"), "data:"}


@pytest.mark.long
@pytest.mark.timeout(600)
def test_a_run_that_dies(browser: Any, serve: Any, model: str, tmp_path: Path) -> None:
    """A page that waits for ever for a run that has died, or does not say why."""
    _, url = serve()
    fields = {"model": model, "plan_flags": "--seq-length 64", "--data-path": "records.jsonl", "out": "new"}
    page = new_page(browser, [])
    page.goto(f"{url}run")
    page.fill("[name=model]", fields.pop("model"))
    page.click("summary") if not page.is_visible("[name=plan_flags]") else None
    for name, value in (fields | {"flags": "--no-such-flag 1"}).items():
        page.fill(f"[name='{name}']", value)
    page.click("text=Start >> nth=-1")
    page.wait_for_selector(".status.failed")
    said = page.inner_text("#state [role=alert]")
    assert "error: " in said and "--no-such-flag" in said
    assert said.partition(": ")[2] in (tmp_path / "new" / board_runs.LOG).read_text()


def test_refusals(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """A page of another site that starts runs here, an open port without a token, a mistake in other words than on the
    command line."""
    pytest.importorskip("flask", reason="needs pip install -e .[board]")
    monkeypatch.chdir(tmp_path)
    here, there = "http://127.0.0.1:7860", "http://elsewhere.example"
    client = board.make_app().test_client()
    assert client.get("/plan", base_url=here).status_code == 200
    assert client.get("/plan", base_url=there).status_code == 403
    assert client.post("/stop", base_url=here, headers={"Origin": there}).status_code == 403
    guarded = board.make_app("secret").test_client()
    assert guarded.get("/plan", base_url=there).status_code == 403
    assert guarded.get("/plan?token=wrong", base_url=there).status_code == 403
    assert guarded.get("/plan?token=secret", base_url=there).status_code == 302
    assert guarded.get("/plan", base_url=there).status_code == 200
    for words in (["--gpu", "b200"], ["--num-gpus", "0"], ["--model", "G-5B"]):
        form = {"model": "LLaMA-7B", "gpu": "rtx4090", "num_gpus": "1"}
        form |= {words[0][2:].replace("-", "_"): words[1]}
        assert plan.main(["--model", "LLaMA-7B", "--task", "sft", "--gpu", "rtx4090", "--num-gpus", "1", *words]) == 2
        answer = client.get("/plan", base_url=here, query_string=form | {"task": "sft"})
        assert answer.status_code == 400
        assert capsys.readouterr().err.strip() in html_text(answer.text)
    form = {"model": "LLaMA-7B", "gpu": "rtx4090", "num_gpus": "1", "task": "sft", "out": "out/new"}
    for changes, wanted in (
        ({}, "--load-hf: is missing"),
        ({"out": ""}, "the output folder: is missing"),
        ({"--data-path": "x", "flags": "'"}, "No closing quotation"),
        ({"method": "full"}, "does not fit"),
    ):
        answer = client.post("/start", base_url=here, data=form | changes)
        assert answer.status_code == 400 and wanted in html_text(answer.text)
    assert "no run is going there" in html_text(client.post("/stop", base_url=here, data=form).text)
    assert [*tmp_path.rglob("*")] == []


def html_text(page: str) -> str:
    return re.sub(r"&#39;", "'", page)


@pytest.mark.parametrize("gpus", [1, 2])
def test_static_pages(gpus: int, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A page whose numbers are not those of the command line, that needs a server, or that lacks what does not fit."""
    words = ["--model", "LLaMA-7B", "--task", "sft", "--gpu", "rtx4090", "--num-gpus", str(gpus)]
    words += [] if gpus == 1 else ["--method", "full"]
    code = plan.main([*words, "--html", str(tmp_path / "plan.html"), "--json", str(tmp_path / "plan.json")])
    text, data = (tmp_path / "plan.html").read_text(), json.loads((tmp_path / "plan.json").read_text())
    assert code == (gpus == 2) and not re.search(r"(src|href)=\"(?!data:)", text)
    parts = [float(size) for size in re.findall(r"title=\"[^\"]*: ([\d.]+) GiB\"", text.split('class="legend"')[0])]
    assert sum(parts) == pytest.approx(data["memory"]["peak_bytes"] / 2**30, abs=0.05)
    if gpus == 1:
        assert f"{data['time']['tokens_per_second']:,.0f} tokens/s" in text
        assert data["command"] in html_text(text)
    else:
        assert "does not fit" in text and data["what_fits"][0]["command"] in html_text(text)


def test_static_pages_fit_a_telephone(browser: Any, tmp_path: Path) -> None:
    """A page wider than its window, or curves that need a script."""
    step = {"phase": 0, "step_time_ms": 1.0, "tokens_per_second": 1.0, "model_state_bytes": [1]}
    lines = [json.dumps(step | {"iteration": i, "block": i // 20 % 3, "loss": 9 / i}) for i in range(1, 100)]
    lines += ['{"iteration": 99, "validation_loss": 2.0, "validation_perplexity": 7.4}']
    (tmp_path / "run.jsonl").write_text("\n".join(lines))
    assert report.main(["--run", f"bcd={tmp_path / 'run.jsonl'}", "--html", str(tmp_path / "report.html")]) == 0
    words = ["--model", "LLaMA-7B", *PLAN]
    assert plan.main([*words, "--html", str(tmp_path / "plan.html")]) == 0
    for width in WIDTHS:
        page = new_page(browser, [], viewport={"width": width, "height": 800}, java_script_enabled=False)
        for name in ("report", "plan"):
            page.goto(f"file://{tmp_path}/{name}.html")
            size = page.locator("body").bounding_box()
            assert size["width"] <= width and page.locator("main").evaluate("e => e.scrollWidth <= e.clientWidth")
        assert page.locator(".sentence").count() == 1
    page.goto(f"file://{tmp_path}/report.html")
    assert page.locator("rect").count() == 5 and page.locator("path.line").count() >= 2
    assert page.locator("path.line").first.bounding_box()["width"] > 200
