"""Serve a page to plan, start and watch runs (docs/board.md).

    python tools/board.py --port 7860
    python tools/board.py --host 0.0.0.0

Open the printed address: the server refuses requests without its token. Runs go on after this server has ended.
"""

from __future__ import annotations

import argparse
import logging
import os
import re
import secrets
import shlex
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any
from urllib.parse import urlencode, urlsplit

sys.path.insert(0, os.path.dirname(os.path.dirname(os.path.abspath(__file__))))

import board_runs
import plan
import report
from _parser import Parser, command, run_main
from _records import has_tokenizer
from board_views import render

from megatron.bcd.planner.estimate import Estimate
from megatron.bcd.planner.recipe import METHODS
from megatron.bcd.planner.tables import Cluster, Model, read_table

PROG = "tools/board.py"
TOKEN = "BCD_BOARD_TOKEN"
"""The environment variable that gives the token. Without it each start makes a new one."""
FIELDS = ("--data-path", "--num-epochs", "--train-iters", "--lr")
"""The fields of the page that are flags of the training script."""
DEFAULTS = {"task": "sft", "gpu": "rtx4090", "num_gpus": "1"}
_ARGUMENT = re.compile(r"""(--[\w-]+) (?!-)((?:'[^']*'|"[^"]*"|[^\s'"])+)""")
_IN_FOLDER = {"--save": "checkpoints", "--load": "checkpoints", "--save-hf": "hf", "--metrics-file": "metrics.jsonl"}


def planned(form: Any) -> argparse.Namespace:
    """Return the planner's arguments of the form. Raises ValueError as tools/plan.py does."""
    names = ("model", "task", "gpu", "num_gpus", "host_memory_gb", "method")
    words = [f"--{name.replace('_', '-')}={form[name]}" for name in names if form.get(name)]
    if form.get("task") == "sft" and form.get("--data-path") and has_tokenizer(form.get("model", "")):
        words.append(f"--data={form['--data-path']}")
    return plan.parse_arguments([*words, *shlex.split(form.get("plan_flags", ""))])


def training_command(form: Any, *, is_complete: bool = False) -> str:
    """Return the plan's command with the form's folder and flags; an empty text if the plan does not fit. Raises
    ValueError if `is_complete` and something is missing."""
    arguments, values, out, more = planned(form), {}, form.get("out", ""), form.get("flags", "")
    shlex.split(more)  # fails here if a quotation mark is left open
    estimate = Estimate(recipe=plan.recipe_of(arguments), tokens=arguments.tokens)
    text = plan.command_of(estimate) if estimate.fits else ""
    if not text or "$" in text:  # the shell's variables of several nodes
        if is_complete:
            raise ValueError("the plan does not fit, or needs several nodes: it cannot be started here.")
        return text
    text = text.replace("torchrun", "torchrun --standalone", 1)
    text = re.sub(r"pretrain_\w+\.py", lambda m: shlex.quote(os.path.relpath(board_runs.ROOT / m[0])), text, count=1)
    if os.path.exists(model := arguments.model):
        values["--load-hf"] = model if os.path.isdir(model) else os.path.dirname(model) or "."
    if out:
        values |= {flag: os.path.join(out, name) for flag, name in _IN_FOLDER.items()}
        values |= {"--log-interval": "10"} if "--log-interval" not in more else {}
    values |= {flag: form[flag] for flag in FIELDS if form.get(flag)}
    text = text.replace("--mock-data", "--data-path DATA") if "--data-path" in values else text
    text = re.sub(r"--num-epochs \S+ ", "", text) if "--train-iters" in values else text
    words = {flag: f"{flag}{' ='[value.startswith('-')]}{shlex.quote(value)}" for flag, value in values.items()}
    known = dict(_ARGUMENT.findall(text))
    gaps = [flag for flag in known if flag not in words and known[flag] in ("MODEL_DIR", "DATA.jsonl")]
    if is_complete and (gaps or not out):
        raise ValueError(f"{gaps[0] if out else 'the output folder'}: is missing. Fill in its field.")
    text = _ARGUMENT.sub(lambda argument: words.get(argument[1], argument[0]), text)
    added = [words[flag] for flag in words if flag not in {"--load-hf", "--save-hf", *known}]
    more = " ".join([*added, more]).strip()
    return f"{text} \\\n    {more}" if more else text


def choices() -> dict[str, Any]:
    """Return the choices of the fields, and the metrics files in out/ and its folders."""
    files = sorted(path for pattern in ("*.jsonl", "*/*.jsonl") for path in Path("out").glob(pattern))
    return {
        "models": [*read_table(plan.MODELS, Model)],
        "gpus": {row.name: row.gpu for row in read_table(plan.CLUSTERS, Cluster).values()},
        "methods": {name: name for name in METHODS},
        "flags": FIELDS,
        "forms": board_runs.FORMS,
        "runs": report.with_names([path for path in files if report.is_metrics_file(path)]),
    }


def view_of(tab: str, form: Any) -> dict[str, Any]:
    """Return what a tab shows below its form. Raises ValueError for a user's mistake."""
    if tab == "watch":
        if not (names := [name for name in form.getlist("run") if name.strip()]):
            return {}
        runs = report.read_runs(names)
        answers = {name: board_runs.answers(Path(run.file)) for name, run in zip(names, runs, strict=True)}
        return report.report_view(runs, [*map(report.run_figures, runs)]) | {"answers": answers}
    text = training_command(form) if form.get("model") else ""
    if tab == "plan":
        return plan.plan_view(planned(form)) | {"command": text} if form.get("model") else {}
    if not (out := form.get("out")):
        return {"command": text}
    run = report.with_names([os.path.join(out, "metrics.jsonl")])[0]
    return {"command": text, "state": board_runs.state(Path(out)), "run": run}


def make_app(token: str) -> Any:
    """Return the application. Every request needs the token: once as ?token=, then as a cookie."""
    try:
        from flask import Flask, Response, abort, redirect, request
    except ImportError:
        raise ValueError("Flask is missing. Install it with pip install -e .[board].") from None
    app = Flask(__name__, static_folder=None)

    @app.before_request
    def check() -> Any:
        """Refuse requests without the token, and those that pages of other sites send through the user's browser."""
        if urlsplit(request.headers.get("Origin", request.host_url)).netloc != request.host:
            abort(403, "a page of another site sent this request")
        cookie = "token" + re.sub(r"\D", "", request.host.rpartition(":")[2])  # ports of a host share their cookies
        given = request.args.get("token", "") or request.cookies.get(cookie, "")
        if not secrets.compare_digest(given.encode(), token.encode()):
            abort(403, f"open the address with ?token= that {PROG} printed")
        if "token" in request.args:
            response = redirect(request.path)
            response.set_cookie(cookie, given, httponly=True, samesite="Strict")
            return response

    @app.get("/")
    @app.get("/<any(plan, run, watch):tab>")
    def page(tab: str = "plan", form: Any = None, error: str = "") -> Any:
        form, view = form or request.args, {}
        try:
            view = view_of(tab, form)
        except (ValueError, OSError) as mistake:
            error = error or f"tools/{'report' if tab == 'watch' else 'plan'}.py: error: {mistake}"
        nonce, shown = secrets.token_urlsafe(12), DEFAULTS | {name: form[name] for name in form}
        values = {"form": shown, "runs": form.getlist("run"), "query": urlencode([*form.items(multi=True)])}
        text = render(tab=tab, view=view, choices=choices(), error=" ".join(error.split()), nonce=nonce, **values)
        policy = f"default-src 'none'; style-src 'unsafe-inline'; script-src 'nonce-{nonce}'; connect-src 'self'"
        policy += "; form-action 'self'; frame-ancestors 'none'; base-uri 'none'; img-src data:"
        return Response(text, 400 if error else 200, {"Content-Security-Policy": policy}, mimetype="text/html")

    @app.post("/<any(start, resume, stop, ask):action>")
    def post(action: str) -> Any:
        form, tab = request.form, "watch" if action == "ask" else "run"
        out, asked = Path(form.get("out", "")), Path(form.get("of", "").partition("=")[2])
        try:
            if action == "ask":
                board_runs.ask(asked, form.get("prompt", ""), form.get("as", "text"))
            elif action == "stop":
                board_runs.stop(out)
            else:
                board_runs.start(out, training_command(form, is_complete=True) if action == "start" else "")
        except (ValueError, OSError) as mistake:
            return page(tab, form, f"{'' if ': error: ' in str(mistake) else f'{PROG}: error: '}{mistake}")
        return redirect(f"/{tab}?{urlencode([*form.items(multi=True)])}", code=303)

    return app


def parse_arguments(argv: Sequence[str]) -> argparse.Namespace:
    """Return the parsed flags. Raises ValueError for a bad flag."""
    parser = Parser(prog=PROG, description=__doc__)
    parser.add_argument("--port", type=int, default=7860, metavar="N", help="(default: 7860)")
    parser.add_argument("--host", default="127.0.0.1", metavar="ADDRESS", help="(default: 127.0.0.1)")
    return parser.parse_args(argv)


@command(PROG)
def main(argv: Sequence[str]) -> None:
    options = parse_arguments(argv)
    if not 0 <= options.port < 65536:
        raise ValueError(f"--port {options.port}: must be 0 to 65535")
    token = os.environ.pop(TOKEN, "") or secrets.token_urlsafe(16)
    app = make_app(token)
    from werkzeug.serving import make_server

    logging.getLogger("werkzeug").setLevel(logging.ERROR)  # not a line for every look at a run
    server = make_server(options.host, options.port, app, threaded=True)
    print(f"http://{options.host}:{server.server_port}/?{urlencode({'token': token})}", flush=True)
    server.serve_forever()


if __name__ == "__main__":
    run_main(main)
