"""Collect the training text of studies/gpu_hour_inputs.py: documentation, books and source code of Debian packages.

`collect` downloads the packages with apt-get and converts HTML, DocBook and manual pages to text. Simple rules drop
text of little value: other languages, lists and tables, licences, navigation, and paragraphs that occurred before.
"""

from __future__ import annotations

import gzip
import html
import random
import re
import subprocess
import tarfile
import zlib
from collections import Counter
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

PROSE = """
    anarchism dict-gcide dict-foldoc dict-jargon fortunes debian-history debian-handbook debian-policy
    debian-reference-en developers-reference harden-doc debmake-doc installation-guide-amd64 freedombox-doc-en
    gnome-user-docs khelpcenter kate5-data gimp-help-en libreoffice-help-en-us linux-doc-6.1 python3.11-doc perl-doc
    postgresql-doc-15 r-doc-html octave-doc maxima-doc vim-runtime sqlite3-doc git-doc apache2-doc
    ada-reference-manual-2012 c++-annotations-html haskell98-report gnu-standards xorg-docs manpages manpages-dev
    freebsd-manpages git-man zsh-doc krb5-doc bind9-doc kea-doc exim4-doc-html postfix-doc shorewall-doc
    lemonldap-ng-doc ntpsec-doc nut-doc varnish-doc rsyslog-doc slurm-wlm-doc openafs-doc wireshark-doc buildbot-doc
    snakemake-doc nova-doc neutron-doc keystone-doc heat-doc glance-doc swift-doc python-django-doc
    python-djangorestframework-doc twisted-doc sphinx-doc docutils-doc python-sklearn-doc python-scipy-doc
    python-statsmodels-doc python-sympy-doc python-pandas-doc python-astropy-doc python-xarray-doc python-dask-doc
    python-biopython-doc numba-doc racket-doc erlang-doc rust-doc ghc-doc llvm-19-doc clang-19-doc cmake-data
    db5.3-doc gap-doc singular-doc povray-doc renpy-doc imagemagick-6-doc swi-prolog-doc sbcl-doc mit-scheme-doc
    chezscheme-doc tcl8.6-doc tk8.6-doc scons-doc nodejs-doc dpdk-doc grass-doc mame-doc systemtap-doc openmpi-doc
    gnutls-doc xapian-doc postgis-doc libboost1.81-doc weechat-doc kitty-doc tomcat10-docs abs-guide nim-doc
    crystal-doc gnome-devel-docs mh-book solfege-doc fontforge-doc topcat-doc fp-docs-3.2.2 ffmpeg-doc mplayer-doc
    derby-doc ant-doc uima-doc stilts-doc doxygen-doc evolver-doc
"""
SOURCE_CODE = "golang-1.19-src rust-src libpython3.11-stdlib perl-modules-5.36"
PACKAGES = tuple(f"{PROSE} {SOURCE_CODE}".split())
"""Packages of Debian 12. If several have a paragraph, the first keeps it."""
ENGLISH = "anarchism"
"""The package of the held-out English prose."""
ENGLISH_BYTES = 100_000
MAX_PROSE, MAX_CODE, MAX_READ = 16_000_000, 8_000_000, 100_000_000
"""Limits per package: characters of prose and of code that it contributes, and bytes that are read."""
PIECE = 100_000
"""Longer documents are split near this many characters."""
SAMPLE = 20
"""Every 20th document is tokenized to estimate the number of tokens."""

LANGUAGES = (
    "ar|ast|be|bg|bn|bs|ca|cn|cs|da|de|eo|es|et|eu|fa|fi|fr|gl|gu|he|hi|hr|hu|id|it|ja|jp|ka|ko|ky|lt|lv|mk|ml|mr|nb|"
    "nds|nl|nn|no|oc|pa|pl|pt|ro|ru|si|sk|sl|sr|sv|ta|te|th|tr|ug|uk|vi|zh"
)
FOREIGN = re.compile(rf"[/._-](?:{LANGUAGES})(?:[_@-][A-Za-z]+)?(?=[/.]|$)")
SKIPPED = re.compile(
    r"_sources/|_modules/|/markdown/|members\.html|_8h|/man3/.*3perl|relnotes|whatsnew|releases?[-_]?notes|/changes?/|"
    r"/(?:changelog|copyright|copying|licen[cs]e|legal|news|genindex|index-all|search|thanks|authors|todo|gpl|fdl)[^/]*$",
    re.IGNORECASE,
)
KINDS = {
    "markup": re.compile(r"\.(?:html?|xhtml|page|docbook)(?:\.gz)?$"),
    "dictionary": re.compile(r"\.dict\.dz$"),
    "plain": re.compile(r"\.(?:txt|rst|md|pod|adoc)(?:\.gz)?$|/fortunes/[a-z-]+$|\.info(?:-\d+)?\.gz$"),
    "manual": re.compile(r"/man\d/.*\.\d\w*\.gz$"),
    "code": re.compile(r"\.(?:go|rs|py|pm)(?:\.gz)?$"),
}
"""Kinds of files by their paths; other files are not read."""
MAIN = (re.compile(r"<main\b[^>]*>"), re.compile(r'role="main"[^>]*>'), re.compile(r"<body\b[^>]*>"))
MAIN_END = re.compile(r'</main>|<div class="(?:sphinxsidebar|bottomnav|related)')
REMOVED = re.compile(
    r"<!--.*?-->|<\?.*?\?>|<(script|style|head|nav|footer|header|select|svg|form|template|button|info|articleinfo|"
    r"bookinfo)\b.*?</\1\s*>",
    re.IGNORECASE | re.DOTALL,
)
VERBATIM = re.compile(r"(<(?:pre|programlisting|screen)\b.*?</(?:pre|programlisting|screen)>)", re.I | re.DOTALL)
BLOCK = re.compile(
    r"</?(?:p|h\d|table|[udo]l|dl|blockquote|section|article|para|title|sect\d|div|figure|dd|dt|example|itemizedlist|"
    r"chapter|item|listitem|variablelist|varlistentry|note)\b[^>]*>",
    re.IGNORECASE,
)
BREAK = re.compile(r"</?(?:br|li|tr)\b[^>]*>", re.IGNORECASE)
LEGAL_WORDS = ("copyright", "(c) ", "rights reserved", "software foundation", "licen", "permission", "warrant", "spdx")
LEGAL = re.compile(
    r"copyright\b.{0,40}\d{4}|\(c\) \d{4}|all rights reserved|free software foundation|gnu (?:general|free|lesser)|"
    r"permission is (?:hereby )?granted|without warranty|spdx-|warrant(?:y|ies) of"
)
COMMON = frozenset(
    re.findall(r"\w+", "the of and to a in is that for it as with be are this on or by an not from if can you at")
)


@dataclass(frozen=True)
class Document:
    """The clean text of a file."""

    package: str
    kind: str
    text: str


@dataclass(frozen=True)
class Corpus:
    """Texts for training and validation, with a list of their sources."""

    train: list[str]
    valid: list[str]
    english: list[str]
    manifest: dict[str, Any]


def markup_text(text: str) -> str:
    """Return the text of HTML, DocBook or Mallard, with an empty line between paragraphs."""
    start = next(filter(None, (pattern.search(text) for pattern in MAIN)), None)
    if start is not None:
        text = text[start.end() :]
    text = REMOVED.sub(" ", MAIN_END.split(text, maxsplit=1)[0])
    pieces = VERBATIM.split(text)
    for i in range(0, len(pieces), 2):
        pieces[i] = re.sub(r"\n +", "\n", BREAK.sub("\n", BLOCK.sub("\n\n", re.sub(r"\s+", " ", pieces[i]))))
    text = html.unescape(re.sub(r"<[^<>]*>", "", "\n\n".join(pieces)))
    return text.replace("\u00b6", "").replace("\u00a0", " ").replace("\u200b", "")


def manual_text(text: str) -> str:
    """Return the text of a manual page, without most of its macros."""
    lines = []
    for line in text.splitlines():
        words = line.split()
        if re.match(r"\.S[HShs] ", line):
            lines += ["", " ".join(words[1:]).strip('"'), ""]
        elif re.match(r"\.(?:PP|P|TP|IP|Pp|LP|sp|It)\b", line):
            lines += ["", *(words[1:2] if words[0] == ".IP" else [])]
        elif re.match(r"\.(?:B|I|BR|IR|RB|RI|BI|IB|Nm|Fl|Ar|Xr|Pa|Dv|Va|Fn|Em|Sy|Ic|Cm) ", line):
            lines.append(" ".join(words[1:]).replace('"', ""))
        elif not line.startswith((".", "'")):
            lines.append(line)
    text = re.sub(r"\\f(?:\(..|\[.*?\]|.)|\\s[+-]?\d|\\[&/,|]|\\c$", "", "\n".join(lines))
    for escape, character in (("aq|cq|oq", "'"), ("lq|rq|dq", '"'), ("em|en|hy|mi", "-")):
        text = re.sub(rf"\\[(\[](?:{escape})\]?", character, text)
    text = re.sub(r"\\(?:\(..|\[.*?\]|\*\(..|\*.)", " ", text)
    return text.replace("\\-", "-").replace("\\e", "\\").replace("\\ ", " ")


def read_files(package: Path) -> Iterator[tuple[str, str]]:
    """Yield the kind and the text of the files of a package that may be English text or source code."""
    with subprocess.Popen(["dpkg-deb", "--fsys-tarfile", package], stdout=subprocess.PIPE) as process:
        size = 0
        with tarfile.open(fileobj=process.stdout, mode="r|") as archive:
            for member in archive:
                kind = next((kind for kind, pattern in KINDS.items() if pattern.search(member.name)), None)
                skipped = FOREIGN.search(member.name) or SKIPPED.search(member.name)
                if kind is None or skipped or not member.isfile() or not 400 <= member.size <= 60_000_000:
                    continue
                file = archive.extractfile(member)
                data = file.read() if file is not None else b""
                data = gzip.decompress(data) if data[:2] == b"\x1f\x8b" else data
                text = {"markup": markup_text, "manual": manual_text}.get(kind, str)(decoded(data))
                yield from ((kind, part) for part in (pieces(text) if kind == "dictionary" else (text,)))
                size += len(data)
                if size > MAX_READ:
                    break
        process.kill()


def decoded(data: bytes) -> str:
    """Decode bytes as UTF-8, or as Latin-1 if they are not valid UTF-8."""
    try:
        return data.decode()
    except UnicodeDecodeError:
        return data.decode("latin1")


def paragraphs(text: str, kind: str, frequent: Collection[str], seen: set[int]) -> str:
    """Return `text` without frequent lines, legal paragraphs and long paragraphs that occurred before, or nothing if
    that removes most of it. Digits and punctuation do not make a paragraph new."""
    text = re.sub(r"[\x00-\x08\x0b-\x1f\x7f]", "", text)
    if frequent:
        text = "\n".join(line for line in text.split("\n") if line.strip() not in frequent)
    kept, total = [], 0
    for paragraph in re.split(r"\n\s*\n", text):
        lowered = paragraph.lower()
        if not lowered.strip() or (any(word in lowered for word in LEGAL_WORDS) and LEGAL.search(lowered)):
            continue
        total += len(paragraph)
        if len(paragraph) >= 80:
            key = hash(re.sub(r"[^a-z]+", "", lowered))
            if key in seen:
                continue
            seen.add(key)
        kept.append(paragraph.strip("\n").rstrip() if kind != "markup" else paragraph.strip())
    text = "\n\n".join(kept)
    return text if len(text) >= 0.6 * total else ""


def is_worth_reading(text: str, kind: str) -> bool:
    """Return whether a document is long enough, does not repeat itself, and is English prose or source code."""
    if len(text) < 600:
        return False
    words, start = text.split(maxsplit=5000)[:5000], text[:20000]
    is_code, is_dictionary = kind == "code", kind == "dictionary"
    letters = sum(map(str.isalpha, start)) / len(start)
    if letters < (0.5 if is_code or is_dictionary else 0.68) or len(text) > 5 * len(zlib.compress(text.encode(), 1)):
        return False
    if sum(map(len, words)) > (14 if is_code else 8.5) * len(words):
        return False
    if is_code:
        return True
    common = sum(word.lower() in COMMON for word in words)
    prose = sum(len(line) for line in text.split("\n") if len(line.split()) >= 7)
    return is_dictionary or (common >= 0.2 * len(words) and prose >= 0.55 * len(text))


def pieces(text: str) -> Iterator[str]:
    """Split a long text between paragraphs."""
    start = 0
    while len(text) - start > 1.5 * PIECE:
        end = text.find("\n\n", start + PIECE)
        if end < 0:
            break
        yield text[start:end]
        start = end + 2
    yield text[start:]


def documents(package: Path, seen: set[int]) -> list[Document]:
    """Return the clean documents of a package. Lines that many of its pages have are navigation."""
    files = list(read_files(package))
    counts = Counter(line for kind, text in files if kind == "markup" for line in {*map(str.strip, text.split("\n"))})
    frequent = {line for line, count in counts.items() if count > max(4, 0.01 * len(files)) and len(line) > 2}
    kept, name, size = [], package.name.split("_")[0], 0
    random.Random(name).shuffle(files)
    for kind, raw in files:
        text = paragraphs(raw, kind, frequent if kind == "markup" else (), seen)
        if is_worth_reading(text, kind):
            kept.append(Document(name, kind, text))
            size += len(text)
        if size > (MAX_CODE if kind == "code" else MAX_PROSE):
            break
    return kept


def collect(scratch: Path, tokenizer: Path, valid_tokens: int, train_tokens: int) -> Corpus:
    """Download the packages to `scratch` and return the corpus. `tokenizer` holds GPT-2's vocab.json and merges.txt."""
    from tokenizers import ByteLevelBPETokenizer

    download = subprocess.run(["apt-get", "download", "--quiet=2", *PACKAGES], cwd=scratch, check=False)
    if download.returncode:
        raise ValueError("apt-get download failed. Run apt-get update on Debian 12 first.")
    bpe = ByteLevelBPETokenizer(str(tokenizer / "vocab.json"), str(tokenizer / "merges.txt"))
    seen: set[int] = set()
    collected, versions = [], {}
    for name in PACKAGES:
        package = next(scratch.glob(f"{name}_*.deb"))
        versions[name] = package.name.split("_")[1].replace("%3a", ":")
        collected += documents(package, seen)
        print(
            f"{name}: {len(collected)} documents, {sum(len(document.text) for document in collected) / 1e6:.0f} MB",
            flush=True,
        )
    return divide(collected, versions, bpe, valid_tokens, train_tokens)


def divide(
    collected: Sequence[Document], versions: dict[str, str], bpe: Any, valid_tokens: int, train_tokens: int
) -> Corpus:
    """Shuffle the documents and divide them. Every document is whole in document part; long ones are for training."""
    order = random.Random(0)
    english: list[str] = []
    valid: list[str] = []
    train: list[tuple[str, str]] = []
    tokens: Counter[str] = Counter()
    for document in order.sample(collected, len(collected)):
        if (
            document.package == ENGLISH
            and sum(map(len, english)) < ENGLISH_BYTES
            and len(document.text) < ENGLISH_BYTES
        ):
            english.append(document.text)
        elif tokens["validation"] < valid_tokens and len(document.text) <= 2 * PIECE:
            valid.append(document.text)
            tokens["validation"] += len(bpe.encode(document.text).ids)
        else:
            train += ((document.package, piece) for piece in pieces(document.text))
    order.shuffle(train)
    characters: Counter[str] = Counter()
    sampled: Counter[str] = Counter()
    count, chosen = 0.0, []
    for index, (package, text) in enumerate(train):
        if index % SAMPLE == 0:
            sampled += Counter(characters=len(text), tokens=len(bpe.encode(text).ids))
        count += len(text) * sampled["tokens"] / sampled["characters"]
        characters[package] += len(text)
        chosen.append(text)
        if count >= train_tokens:
            break
    by_package = {name: {"version": version, "characters": characters[name]} for name, version in versions.items()}
    manifest = {
        "train_documents": len(chosen), "train_characters": sum(characters.values()), "train_tokens": round(count),
        "valid_documents": len(valid), "valid_tokens": tokens["validation"], "packages": by_package,
    }  # fmt: skip
    return Corpus(train=chosen, valid=valid, english=english, manifest=manifest)
