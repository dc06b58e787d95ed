"""tools/board.py in a real browser, its refusals, and the pages of --html."""

from __future__ import annotations

import contextlib
import json
import os
import re
import shlex
import shutil
import subprocess
import sys
import urllib.error
import urllib.request
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
STEPS = 120
WAIT_MS = 280_000  # two busy cores


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
def serve(tmp_path: Path) -> Iterator[Callable[..., tuple[subprocess.Popen[str], str]]]:
    """A function that starts the server in tmp_path and returns its printed address. At the end kill it, and the runs
    that outlive it."""
    pytest.importorskip("flask", reason="needs pip install -e .[board]")
    servers: list[subprocess.Popen[str]] = []

    def start(port: int = 0, token: str = "") -> tuple[subprocess.Popen[str], str]:
        words = [sys.executable, str(ROOT / "tools" / "board.py"), "--port", str(port)]
        environment = os.environ | {board.TOKEN: token}
        servers.append(subprocess.Popen(words, cwd=tmp_path, env=environment, stdout=subprocess.PIPE, text=True))
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
    """A run survives the page and the server, starts once, loses no step at a stop, and is the planned command. Curves
    and answers come, nothing comes from elsewhere, and a page whose token is old says that its server has ended."""
    asked: list[str] = []
    server, address = serve()
    url, token = address.split("?token=")
    page = new_page(browser.new_context(), asked)
    page.goto(address)
    page.fill("[name=model]", model)
    page.fill("[name=plan_flags]", "--seq-length 64")
    page.click("text=Plan >> nth=-1")
    sentence = page.inner_text(".sentence")
    assert sentence.startswith("small: every layer trained in every step, fits one RTX 4090")
    page.click("nav >> text=Run")
    page.fill("[name='--data-path']", "records.jsonl")
    page.fill("[name=out]", "out/first")
    page.fill("[name='--train-iters']", str(STEPS))
    page.fill("[name=flags]", "--log-interval 1 --global-batch-size 2 --num-workers 0")  # workers import for seconds
    page.click("text=Show the command")
    shown = page.inner_text(".command pre")
    other = new_page(page.context, asked)
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
    port = int(url.rstrip("/").rpartition(":")[2])
    server, _ = serve(port, token)
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
    server.kill()
    server.wait()
    serve(port)
    with page.expect_response(lambda answer: answer.status == 403):
        pass
    page.wait_for_selector("body.offline")
    assert {re.sub(r"^(\w+://[^/]*|data:).*", r"\1", address) for address in asked} <= {url.rstrip("/"), "data:"}


HERE, THERE = "http://127.0.0.1:7860", "http://elsewhere.example"


def signed_in() -> Any:
    """Return a client that has opened the printed address."""
    pytest.importorskip("flask", reason="needs pip install -e .[board]")
    client = board.make_app("secret").test_client()
    assert client.get("/?token=secret", base_url=HERE).status_code == 302
    return client


def test_every_request_needs_the_token(serve: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Another user of the machine, or a page of another site, gets nothing. Two boards can be open in one browser."""
    monkeypatch.chdir(tmp_path)
    _, address = serve()
    with pytest.raises(urllib.error.HTTPError, match="403"):
        urllib.request.urlopen(address.partition("?token=")[0])
    client = signed_in()
    for url in ("/", "/run", "/watch?run=a=b", "/?token=wrong", "/?token=%E4"):
        assert board.make_app("secret").test_client().get(url, base_url=HERE).status_code == 403
    for action in ("start", "resume", "stop", "ask"):
        assert board.make_app("secret").test_client().post(f"/{action}", base_url=HERE).status_code == 403
        assert client.post(f"/{action}", base_url=HERE, headers={"Origin": THERE}).status_code == 403
    assert client.get("/plan", base_url=THERE).status_code == 403
    assert client.get("/plan", base_url=HERE).status_code == 200
    apps = {port: board.make_app(f"of {port}").test_client(use_cookies=False) for port in (7860, 7861)}
    urls = {port: f"http://127.0.0.1:{port}" for port in apps}
    answers = [apps[port].get(f"/?token=of {port}", base_url=url) for port, url in urls.items()]
    cookies = "; ".join(answer.headers["Set-Cookie"].partition(";")[0] for answer in answers)
    for port, url in urls.items():
        assert apps[port].get("/plan", base_url=url, headers={"Cookie": cookies}).status_code == 200


def test_values_of_a_form_are_never_flags(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A start takes the page's fields only, and each value stays the value of its flag, in the planner, in the command
    and in tools/generate.py."""
    monkeypatch.chdir(tmp_path)
    started: list[str] = []
    monkeypatch.setattr(board_runs, "start", lambda out, command: started.append(command))
    client = signed_in()
    form = {"model": "G-0.15B", "gpu": "rtx4090", "num_gpus": "1", "task": "pretrain", "method": "full"}
    form |= {"out": "--save-x=y", "--standalone=evil.py": "x", "--(": "x", "--seed": "7"}
    form |= {"--data-path": "a --lr 9 ' --train-iters 9", "--train-iters": "--spec=evil", "--lr": "1e-4"}
    assert client.post("/start", base_url=HERE, data=form).status_code == 303
    assert client.get("/run", base_url=HERE, query_string=form).status_code == 200
    words = shlex.split(started[0].replace("\\\n", " "))
    assert words[:4] == ["torchrun", "--standalone", "--nproc-per-node", "1"]
    assert {"--save=--save-x=y/checkpoints", "--train-iters=--spec=evil"} <= {*words}
    for flag, value in (("--data-path", form["--data-path"]), ("--lr", "1e-4")):
        assert [words[i + 1] for i, word in enumerate(words) if word == flag] == [value]
    assert not [word for word in words if "evil.py" in word or word in ("--(", "--seed")]
    answer = client.get("/plan", base_url=HERE, query_string=form | {"model": "--models=evil"})
    assert "--model --models=evil: " in html_text(answer.text)
    (tmp_path / "hf").mkdir()
    (tmp_path / "hf" / "config.json").write_text("{}")
    form = {"of": "a=metrics.jsonl", "prompt": "x", "as": f"json={tmp_path / 'new'}"}
    answer = client.post("/ask", base_url=HERE, data=form)
    assert answer.status_code == 400 and f"Form {form['as']}: is unknown." in html_text(answer.text)


def test_watch_lists_metrics_files_only(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """The page offers the metrics files in out/ and its folders, and shows them all together."""
    monkeypatch.chdir(tmp_path)
    step = {"iteration": 1, "phase": 0, "block": 0, "loss": 2.0, "step_time_ms": 1.0, "tokens_per_second": 1.0}
    metrics = json.dumps(step | {"model_state_bytes": [1]}) + "\n"
    wanted = ["out/a/metrics.jsonl", "out/a.jsonl", "out/c=1/metrics.jsonl", "out/quickstart/full.jsonl"]
    others = {"out/data.jsonl": '{"text": "loss"}\n', "out/a.samples.jsonl": '{"prompt": "x"}\n', "out/new.jsonl": ""}
    others |= {"out/list.jsonl": "[1]\n", "out/latin.jsonl": "\udce4\n"}
    for name, text in (dict.fromkeys(wanted, metrics) | others).items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_bytes(text.encode(errors="surrogateescape"))
    os.mkfifo(tmp_path / "out" / "pipe.jsonl")
    client = signed_in()
    runs = re.findall(r'type="checkbox" name="run" value="([^"]*)"', client.get("/watch", base_url=HERE).text)
    assert runs == [
        f"{name}={file}" for name, file in zip(("out/a/metrics", "out/a", "c 1", "full"), wanted, strict=True)
    ]
    answer = client.get("/watch", base_url=HERE, query_string=[("run", run) for run in runs])
    assert answer.status_code == 200 and answer.text.count('<path class="line c') == 3 * len(runs)


def test_the_command_of_a_model_whose_folder_has_blanks(tmp_path: Path) -> None:
    """The name of a folder is one word of the plan's command."""
    folder = tmp_path / "a --standalone=evil.py"
    folder.mkdir()
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2}
    config = {"model_type": "llama", "vocab_size": 260, "max_position_embeddings": 128, "rms_norm_eps": 1e-5}
    (folder / "config.json").write_text(json.dumps(config | sizes))
    form = {"model": str(folder), "gpu": "rtx4090", "num_gpus": "1", "task": "sft", "--data-path": "x", "out": "y"}
    words = shlex.split(board.training_command(form, is_complete=True).replace("\\\n", " "))
    places = {flag: words[words.index(flag) + 1] for flag in ("--load-hf", "--save", "--load", "--data-path")}
    assert [*places.values()] == [str(folder), "y/checkpoints", "y/checkpoints", "x"]
    assert not any(word.startswith("--standalone=evil") for word in words)
    del form["out"]
    assert any(word.startswith(f"out/{folder.name}-") for word in shlex.split(board.training_command(form)))


def test_refusals(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """A mistake gets the words of the command line, and writes no file."""
    monkeypatch.chdir(tmp_path)
    client = signed_in()
    for words in (["--gpu", "b200"], ["--num-gpus", "0"], ["--model", "G-5B"]):
        form = {"model": "L-1.5B", "gpu": "rtx4090", "num_gpus": "1"}
        form |= {words[0][2:].replace("-", "_"): words[1]}
        assert plan.main(["--model", "L-1.5B", "--task", "sft", "--gpu", "rtx4090", "--num-gpus", "1", *words]) == 2
        answer = client.get("/plan", base_url=HERE, query_string=form | {"task": "sft"})
        assert answer.status_code == 400
        assert capsys.readouterr().err.strip() in html_text(answer.text)
    form = {"model": "L-1.5B", "gpu": "rtx4090", "num_gpus": "1", "task": "sft", "out": "out/new"}
    for changes, wanted in (
        ({}, "--load-hf: is missing"),
        ({"out": ""}, "the output folder: is missing"),
        ({"--data-path": "x", "flags": "'"}, "No closing quotation"),
        ({"method": "full"}, "does not fit"),
    ):
        answer = client.post("/start", base_url=HERE, data=form | changes)
        assert answer.status_code == 400 and wanted in html_text(answer.text)
    assert "no run is going there" in html_text(client.post("/stop", base_url=HERE, data=form).text)
    assert [*tmp_path.rglob("*")] == []


def test_a_plan_of_the_data_file(model: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The plan's page takes the records of its data file in place of Alpaca's."""
    monkeypatch.chdir(tmp_path)
    client, form = signed_in(), {"model": model, "gpu": "rtx4090", "num_gpus": "1", "task": "sft"}
    for changes, wanted in (
        ({}, "for three epochs of Alpaca."),
        ({"--data-path": "records.jsonl"}, "for three epochs of records.jsonl. It has 60 examples, "),
    ):
        answer = client.get("/plan", base_url=HERE, query_string=form | changes)
        assert answer.status_code == 200 and wanted in html_text(answer.text)


def html_text(page: str) -> str:
    return re.sub(r"&#39;", "'", page)


@pytest.mark.parametrize("method", ["finetune", "full"])
def test_static_pages(method: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A static page has the numbers and the command of the command line, loads nothing, and says what does not fit."""
    words = ["--model", "L-1.5B", "--task", "sft", "--gpu", "rtx4090", "--num-gpus", "1", "--method", method]
    code = plan.main([*words, "--html", str(tmp_path / "plan.html"), "--json", str(tmp_path / "plan.json")])
    text, data = (tmp_path / "plan.html").read_text(), json.loads((tmp_path / "plan.json").read_text())
    assert code == (method == "full") and not re.search(r"(src|href)=\"(?!data:)", text)
    parts = [float(size) for size in re.findall(r"title=\"[^\"]*: ([\d.]+) GiB\"", text.split('class="legend"')[0])]
    assert sum(parts) == pytest.approx(data["memory"]["peak_bytes"] / 2**30, abs=0.05)
    if method == "finetune":
        assert f"{data['time']['tokens_per_second']:,.0f} tokens/s" in text
        assert data["command"] in html_text(text)
    else:
        assert "does not fit" in text and data["what_fits"][0]["command"] in html_text(text)


def test_static_pages_fit_a_telephone(browser: Any, tmp_path: Path) -> None:
    """Static pages are no wider than their window, and show curves without a script."""
    step = {"phase": 0, "step_time_ms": 1.0, "tokens_per_second": 1.0, "model_state_bytes": [1]}
    lines = [json.dumps(step | {"iteration": i, "block": i // 20 % 3, "loss": 9 / i}) for i in range(1, 100)]
    lines += ['{"iteration": 99, "validation_loss": 2.0, "validation_perplexity": 7.4}']
    (tmp_path / "run.jsonl").write_text("\n".join(lines))
    assert report.main(["--run", f"bcd={tmp_path / 'run.jsonl'}", "--html", str(tmp_path / "report.html")]) == 0
    words = ["--model", "L-1.5B", *PLAN]
    assert plan.main([*words, "--html", str(tmp_path / "plan.html")]) == 0
    for width in (1280, 400):
        page = new_page(browser, [], viewport={"width": width, "height": 800}, java_script_enabled=False)
        for name in ("report", "plan"):
            page.goto(f"file://{tmp_path}/{name}.html")
            size = page.locator("body").bounding_box()
            assert size["width"] <= width and page.locator("main").evaluate("e => e.scrollWidth <= e.clientWidth")
        assert page.locator(".sentence").count() == 1
    page.goto(f"file://{tmp_path}/report.html")
    assert page.locator("rect").count() == 5 and page.locator("path.line").count() >= 2
    assert page.locator("path.line").first.bounding_box()["width"] > 200
