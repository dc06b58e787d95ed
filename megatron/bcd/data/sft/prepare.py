"""Tokenized samples of the files of a run: made by rank 0, kept on disk, read by all."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable, Iterator, Sequence

from rich.console import Console
from rich.progress import Progress

from megatron.bcd.config import RunConfig
from megatron.bcd.data.sft import store
from megatron.bcd.data.sft.records import read_records
from megatron.bcd.data.sft.render import Renderer
from megatron.bcd.data.sft.store import Samples
from megatron.bcd.data.sft.tokens import Tokens, tokens_of
from megatron.bcd.runtime import collectives
from megatron.bcd.tokenizer import Tokenizer

_ROUND_SECONDS = 5.0
"""Between collectives while rank 0 prepares: the other ranks must not wait longer than their timeout."""

Files = Sequence[tuple[str, str]]
"""The flag that names a file, and its path."""


def tokenized_samples(
    config: RunConfig, tokenizer: Tokenizer, files: Files, *, check: Callable[[Samples], object]
) -> Samples:
    """The samples of all files, from the disk where an earlier run has kept them. A collective.

    `check` may refuse new ones, by a ValueError, before they are kept.

    Raises:
        ValueError: a file can't be read, or a record is none; or the samples can't be kept. One line; nothing is left
            on the disk then.
    """
    for flag, path in files:
        _check_readable(flag, path)
    prompt_format = config.data.sft_prompt_format
    digest = collectives.on_rank_0(lambda: _digest_of(files, tokenizer, prompt_format))
    beside = os.path.join(os.path.dirname(os.path.abspath(files[0][1])), "cache")
    roots = [config.data.data_cache_path or beside]
    if config.data.data_cache_path is None:  # data are often read-only
        cache = os.environ.get("XDG_CACHE_HOME") or os.path.join(os.path.expanduser("~"), ".cache")
        roots.append(os.path.join(cache, "megatron-bcd"))
    roots = [os.path.join(root, "sft") for root in roots]
    for root in roots:
        if collectives.on_rank_0(lambda: store.open_samples(root, digest) is not None):  # noqa: B023
            return _open_everywhere(root, digest)
    errors = []
    for root in roots:
        try:
            _in_rounds(lambda: _build((root, digest), prompt_format, tokenizer, files, check))  # noqa: B023
            return _open_everywhere(root, digest)
        except OSError as error:
            errors.append(f"{root}: {error.strerror}")
    raise ValueError(
        f"--data-cache-path: the tokenized records can't be written ({', '.join(errors)}); give a folder that can"
    )


def _check_readable(flag: str, path: str) -> None:
    if not os.path.isfile(path):
        what = "is a folder" if os.path.isdir(path) else "does not exist"
        raise ValueError(f"{flag} {path} {what}: with --sft give files of records, .jsonl or .json")


def _digest_of(files: Files, tokenizer: Tokenizer, prompt_format: str) -> str:
    try:
        return store.digest_of([path for _, path in files], tokenizer, prompt_format)
    except OSError as error:
        flags = {path: flag for flag, path in files}
        flag = flags.get(error.filename, "--sft: the tokenizer's file")
        raise ValueError(f"{flag} {error.filename} can't be read ({error.strerror})") from None


def _open_everywhere(root: str, digest: str) -> Samples:
    found = store.open_samples(root, digest)
    hosts = collectives.gather_objects(None if found is not None else os.uname().nodename)
    blind = sorted({host for host in hosts if host is not None})
    if blind:
        raise ValueError(
            f"--data-cache-path: {', '.join(blind)} can't see the tokenized records in {root}; give a folder on a disk "
            "that all nodes share"
        )
    assert found is not None
    return found


def _in_rounds(start: Callable[[], Iterator[None]]) -> None:
    """Run a generator on rank 0 to its end. A collective every few seconds."""
    steps: list[Iterator[None]] = []

    def go_on() -> bool:
        steps[:] = steps or [start()]
        deadline = time.monotonic() + _ROUND_SECONDS
        return not any(time.monotonic() > deadline for _ in steps[0])

    while not collectives.on_rank_0(go_on):
        pass


def _build(
    folder_of: tuple[str, str],
    prompt_format: str,
    tokenizer: Tokenizer,
    files: Files,
    check: Callable[[Samples], object],
) -> Iterator[None]:
    """Tokenize into a new folder, of a root and a name, with a progress bar on a terminal."""
    renderer = Renderer(tokenizer, prompt_format)
    with (
        store.new_folder(*folder_of) as folder,
        Progress(console=Console(stderr=True), disable=not sys.stderr.isatty(), transient=True) as progress,
    ):
        yield from store.write(folder, _tokenized(files, renderer, tokenizer, progress))
        written = store.open_samples(*os.path.split(folder))
        assert written is not None
        check(written)


def _tokenized(
    files: Files, renderer: Renderer, tokenizer: Tokenizer, progress: Progress
) -> Iterator[tuple[tuple[int, int, int], Tokens]]:
    for number, (flag, path) in enumerate(files):
        task = progress.add_task(f"tokenizing {os.path.basename(path)}", total=os.path.getsize(path))
        try:
            for place in read_records(path):
                try:
                    samples = tokens_of(place.record, renderer, tokenizer)
                except ValueError as error:
                    raise ValueError(f"{place.name} {error}") from error
                for tokens in samples:
                    yield (number, place.number, int(place.is_line)), tokens
                progress.update(task, completed=place.bytes_read)
        except ValueError as error:
            separator = "" if str(error).startswith(("is ", "can't ")) else ","
            raise ValueError(f"{flag} {path}{separator} {error}") from error
