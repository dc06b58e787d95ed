"""Study files of tools/study.py: what is compared, as YAML (docs/learning.md)."""

from __future__ import annotations

import difflib
import fnmatch
import math
import os
import re
import shlex
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import MISSING, dataclass, fields
from pathlib import Path
from typing import Any

sys.path.insert(0, os.path.dirname(os.path.dirname(os.path.abspath(__file__))))

from megatron.bcd.config.yaml_file import read_yaml
from megatron.bcd.planner.tables import read_clusters

CLUSTERS = str(Path(__file__).resolve().parents[1] / "examples" / "clusters.csv")
METRICS = ("loss", "accuracy")
NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]*")
PLACEHOLDER = re.compile(r"\{(\w+)(?:([*/])(\d+(?:\.\d+)?))?\}")
PLACEHOLDERS = ("lr", "steps", "seed", "data", "folder")


@dataclass(frozen=True, kw_only=True)
class Model:
    """A model and what goes with it, such as its batch; "flags" may hold placeholders, as everywhere."""

    name: str
    flags: str = ""
    program: str | None = None
    """Instead of the study's."""


@dataclass(frozen=True, kw_only=True)
class Data:
    """A text that the study tokenizes (``--data-path`` is added), or flags for a program that reads its own data."""

    name: str
    text: str | None = None
    """A .txt or .jsonl file below the data folder, or "stdlib": the source of Python's standard library."""
    flags: str = ""


@dataclass(frozen=True, kw_only=True)
class Method:
    """One way of training."""

    name: str
    label: str = ""
    """In tables and pictures; default: the name."""
    group: str = ""
    """Methods of a group share a colour."""
    flags: str = ""
    steps: float = 1.0
    """Length of its runs, as a share of the study's steps."""
    budgets: tuple[float, ...] = ()
    """More lengths at the tuned learning rate, as shares of the study's steps, each with its own schedule."""
    models: tuple[str, ...] = ()
    """The only models that it trains; default: all."""
    learning_rates: tuple[float, ...] = ()
    """Instead of the study's."""
    learning_rate_of: str | None = None
    """Use the rate that was tuned for this method, instead of tuning."""
    arithmetic_as: str | None = None
    """A method with the same arithmetic, where flags say nothing about it (another program)."""
    program: str | None = None
    """Instead of the model's; it gets the same flags."""
    description: str = ""


@dataclass(frozen=True, kw_only=True)
class Study:
    """One study file; what each field means: docs/learning.md."""

    name: str
    title: str = ""
    program: str
    flags: str = ""
    checkpoint_flags: str = ""
    """Flags with which a run resumes; "{folder}" is its checkpoint folder. They do not belong to its identity."""
    steps: int
    models: tuple[Model, ...]
    data: tuple[Data, ...]
    methods: tuple[Method, ...]
    baseline: str
    seeds: tuple[int, ...]
    learning_rates: tuple[float, ...]
    tune_on: str | None = None
    """Tune on this text only, and use its rates on the others; without it on every text."""
    extend: int = 1
    """How often the grid grows by a factor of 2 where its best rate is at an edge."""
    metric: str = "loss"
    """"accuracy" is reported as error, so that less is better."""
    gpu: str | None = None
    """What it runs on, a row of examples/clusters.csv, whose price per hour gives dollars."""
    jobs: int = 2
    threads: int = 1
    minutes: float = 5.0
    """Of a run of `steps` steps; a guess until runs have finished."""

    @property
    def usd_per_hour(self) -> float | None:
        """The price of its GPU, where it runs on one."""
        return None if self.gpu is None else read_clusters(CLUSTERS)[self.gpu].usd_per_gpu_hour

    def method(self, name: str) -> Method:
        """By its name, which is known to exist."""
        return next(method for method in self.methods if method.name == name)


def render(template: str, values: Mapping[str, str | float], *, where: str) -> list[str]:
    """Words of a command line, ``{lr}``, ``{steps/10}`` or ``{lr*0.1}`` filled in; a share of an int stays one.

    Raises ValueError naming a placeholder that is none of PLACEHOLDERS, or a quotation that is not closed.
    """

    def fill(found: re.Match[str]) -> str:
        name, operation, operand = found.groups()
        if name not in values:
            raise ValueError(f"{where}: {found[0]}: placeholders are {', '.join(PLACEHOLDERS)}")
        value = values[name]
        if operation is None:
            return format(value, ".6g") if isinstance(value, float) else str(value)
        if isinstance(value, str):
            raise ValueError(f"{where}: {found[0]}: {name} is no number")
        product = value * float(operand) if operation == "*" else value / float(operand)
        return str(max(1, round(product))) if isinstance(value, int) else format(product, ".6g")

    try:
        return [PLACEHOLDER.sub(fill, word) for word in shlex.split(template)]
    except ValueError as error:
        raise ValueError(str(error) if where in str(error) else f"{where}: {error}") from None


def read_study(path: str) -> Study:
    """Raises ValueError, one line with file and key, for anything that does not fit."""
    content = read_yaml(path, instead="give a study file, such as studies/gpt_10_minutes.yaml")
    study = _study(content, path)
    _check(study, path)
    return study


def _study(content: Any, path: str) -> Study:
    entries = {"name": Path(path).stem, **_mapping(content, path)}
    for key, kind in (("models", Model), ("data", Data), ("methods", Method)):
        if key in entries:
            named = _mapping(entries[key], f"{path}: {key}")
            entries[key] = tuple(_named(kind, name, value, f"{path}: {key}: {name}") for name, value in named.items())
    entries.setdefault("models", (Model(name="model"),))
    entries.setdefault("baseline", entries["methods"][0].name if entries.get("methods") else "")
    return _build(Study, entries, path)


def _named(kind: type, name: Any, value: Any, where: str) -> Any:
    if not isinstance(name, str) or not NAME.fullmatch(name):
        raise ValueError(f"{where}: a name has letters, digits, and _ . - between them")
    entries = {"flags": value} if isinstance(value, str) else _mapping(value or {}, where)
    return _build(kind, {**entries, "name": name}, where)


def _mapping(value: Any, where: str) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise ValueError(f"{where}: must be a mapping (key: value)")
    return value


def _build(kind: type, entries: Mapping[str, Any], where: str) -> Any:
    """The dataclass from YAML's values. Raises ValueError for a key too many, missing, or of another type."""
    known = {field.name: field for field in fields(kind)}
    for key in entries:
        if key not in known:
            near = difflib.get_close_matches(str(key), known, n=1)
            hint = f"did you mean {near[0]}?" if near else f"keys are {', '.join(known)}"
            raise ValueError(f"{where}: unknown key {key}; {hint}")
    missing = [name for name, field in known.items() if field.default is MISSING and name not in entries]
    if missing:
        raise ValueError(f"{where}: {missing[0]} is missing")
    values = {key: _CONVERT[str(known[key].type)](value, f"{where}: {key}") for key, value in entries.items()}
    return kind(**values)


def _text(value: Any, where: str) -> str:
    if not isinstance(value, str):
        raise ValueError(f"{where}: {value!r}: must be text; put quotation marks around it")
    return " ".join(value.split())


def _float(value: Any, where: str) -> float:
    try:  # YAML 1.1 takes 3e-3 for text
        number = math.nan if isinstance(value, bool) else float(value)
    except (TypeError, ValueError):
        number = math.nan
    if not (math.isfinite(number) and number > 0):
        raise ValueError(f"{where}: {value!r}: must be a number more than 0")
    return number


def _int(value: Any, where: str) -> int:
    if not isinstance(value, int) or isinstance(value, bool) or value < 0:
        raise ValueError(f"{where}: {value!r}: must be a whole number, 0 or more")
    return value


def _list(convert: Callable[[Any, str], Any]) -> Callable[[Any, str], tuple[Any, ...]]:
    def converted(value: Any, where: str) -> tuple[Any, ...]:
        if not isinstance(value, list):
            raise ValueError(f"{where}: {value!r}: must be a list, such as [1, 2]")
        found = tuple(convert(one, where) for one in value)
        if len(set(found)) < len(found):
            raise ValueError(f"{where}: {value!r}: something stands twice")
        return found

    return converted


def _as_is(value: Any, where: str) -> Any:
    return value


_CONVERT: dict[str, Callable[[Any, str], Any]] = {
    "str": _text,
    "str | None": _text,
    "float": _float,
    "int": _int,
    "tuple[float, ...]": _list(_float),
    "tuple[int, ...]": _list(_int),
    "tuple[str, ...]": _list(_text),
    "tuple[Model, ...]": _as_is,
    "tuple[Data, ...]": _as_is,
    "tuple[Method, ...]": _as_is,
}


def _check(study: Study, path: str) -> None:
    """What one key cannot know of another."""
    for key in ("models", "data", "methods", "seeds", "learning_rates", "steps", "jobs", "threads"):
        if not getattr(study, key):
            raise ValueError(f"{path}: {key}: at least one is needed")
    if study.metric not in METRICS:
        raise ValueError(f"{path}: metric: {study.metric}: must be one of {', '.join(METRICS)}")
    names = [method.name for method in study.methods]
    _check_name(study.baseline, names, f"{path}: baseline")
    if study.gpu is not None:
        _check_name(study.gpu, list(read_clusters(CLUSTERS)), f"{path}: gpu")
    if study.tune_on is not None:
        _check_name(study.tune_on, [data.name for data in study.data], f"{path}: tune_on")
    names_of_models = [model.name for model in study.models]
    for method in study.methods:
        where = f"{path}: methods: {method.name}"
        for key in ("learning_rate_of", "arithmetic_as"):
            if getattr(method, key) is not None:
                _check_name(getattr(method, key), names, f"{where}: {key}")
        for model in method.models:
            _check_name(model, names_of_models, f"{where}: models")
        tuned_with = study.method(method.learning_rate_of or method.name)
        if tuned_with.models and not set(method.models or names_of_models) <= set(tuned_with.models):
            raise ValueError(f"{where}: learning_rate_of: {tuned_with.name} does not train all of its models")
        if method.learning_rate_of and study.method(method.learning_rate_of).learning_rate_of:
            raise ValueError(f"{where}: learning_rate_of: {method.learning_rate_of} is not tuned itself")
    baseline = study.method(study.baseline)
    if baseline.steps != 1:
        raise ValueError(f"{path}: methods: {study.baseline}: steps: the baseline's is 1")
    if baseline.models:
        raise ValueError(f"{path}: methods: {study.baseline}: models: the baseline trains all")
    for data in study.data:
        if data.text is not None and (os.path.isabs(data.text) or ".." in Path(data.text).parts):
            raise ValueError(f"{path}: data: {data.name}: text: {data.text}: give a path below the data folder")
    values = {"lr": 1.0, "steps": 1, "seed": 1, "data": "", "folder": ""}
    for entry in (study, *study.models, *study.data, *study.methods):
        render(entry.flags, values, where=f"{path}: {entry.name}: flags")
    render(study.checkpoint_flags, values, where=f"{path}: checkpoint_flags")


def check_only(patterns: str, study: Study) -> None:
    """Raises ValueError for a pattern of --only that no method matches."""
    names = [method.name for method in study.methods]
    for pattern in patterns.split(","):
        if not fnmatch.filter(names, pattern.strip()):
            raise ValueError(f"--only {patterns}: {pattern.strip() or 'an empty name'} matches no method; there are "
                             f"{', '.join(names)}")  # fmt: skip


def made_folder(path: Path, *, flag: str, given: Path) -> Path:
    """The folder, made where it is missing. Raises ValueError naming the flag and what it was given where nothing can
    be written there."""
    try:
        path.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=path):
            pass
    except OSError as error:
        raise ValueError(f"{flag} {given}: {error.strerror}: {path}; give a folder that can be written") from None
    return path


def _check_name(name: str, names: Sequence[str], where: str) -> None:
    if name not in names:
        raise ValueError(f"{where}: {name or 'nothing'}: must be one of {', '.join(names)}")
