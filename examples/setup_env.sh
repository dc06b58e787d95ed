#!/usr/bin/env bash
# The one Python environment of this repository: .venv at its root, with the pins of requirements.txt.
#
#   bash examples/setup_env.sh          set it up, or repair it; at once when there is nothing to do
#   . examples/setup_env.sh             the same, and use it in this shell (tests/run.sh, examples/quickstart.sh)
#   BCD_PYTHON=/path/to/python ...      use that interpreter and what is installed there; nothing is set up.
#                                       For GPU machines that bring their own torch, Apex or Transformer Engine.
#
# An active virtual environment or conda environment that has all pins is used instead of .venv, and nothing is set up.
# Sourced, it sets PYTHON to the interpreter and puts its folder first on PATH.
# Environment: PYTHON3 is the interpreter that .venv is made from (default: the first python3, python3.13, python3.12,
# python3.11 on PATH that is 3.11 to 3.13). BCD_TESTS=1 (tests/run.sh) installs what tests need too.

BCD_ROOT=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)

bcd_say() { printf 'setup: %s\n' "$*"; }

bcd_fail() {
    printf 'setup: error: %s\n' "$*" >&2
    return 1
}

# What decides whether an environment is up to date: the pins, and how they are installed.
bcd_fingerprint() {
    cat "$BCD_ROOT/requirements.txt" "$BCD_ROOT/examples/setup_env.sh" | "$1" -c \
        'import hashlib, sys; print(hashlib.sha256(sys.stdin.buffer.read()).hexdigest())'
}

bcd_version_fits() {
    "$1" -c 'import sys; sys.exit(not (3, 11) <= sys.version_info[:2] <= (3, 13))' 2>/dev/null
}

# Prints the interpreter to make .venv from.
bcd_base_python() {
    local candidate
    for candidate in ${PYTHON3:-python3 python3.13 python3.12 python3.11}; do
        if bcd_version_fits "$candidate"; then
            # Debian and Ubuntu ship ensurepip, without which a venv has no pip, in a package of its own.
            "$candidate" -c 'import ensurepip, venv' 2>/dev/null && { echo "$candidate"; return 0; }
            bcd_fail "$candidate cannot make a virtual environment; install python3-venv" \
                "(Debian, Ubuntu: apt-get install python3-venv)"
            return 1
        fi
    done
    bcd_fail "no Python 3.11 to 3.13 among: ${PYTHON3:-python3 python3.13 python3.12 python3.11};" \
        "install one, or name one with PYTHON3=/path/to/python3"
}

# bcd_differences PYTHON exact|close [tests]: the pins that this interpreter does not have, on one line. "close" takes other
# versions, which usually do, but the patches of megatron/bcd/runtime belong to one minor release of Megatron Core.
# Without "tests" those that only tests need are left out.
bcd_differences() {
    "$1" - "$BCD_ROOT/requirements.txt" "${@:2}" <<'PYTHON'
import importlib.metadata as metadata
import re
import sys

path, how, *tests = sys.argv[1:]
text = open(path, encoding="utf-8").read()
text = text if tests else text.split("# tests/run.sh")[0]
lines = (line.split("#")[0].strip() for line in text.splitlines())
missing = []
for name, pin in (line.split("==") for line in lines if line):
    try:
        found = metadata.version(name).split("+")[0]  # torch's build
    except metadata.PackageNotFoundError:
        missing.append(f"{name}=={pin}")
        continue
    minor = [re.match(r"\d+\.\d+", version)[0] for version in (found, pin)] if name == "megatron-core" else []
    if found != pin if how == "exact" else minor[:1] != minor[1:]:
        missing.append(f"{name}=={pin}")
print(*missing)
PYTHON
}

# The interpreter of BCD_PYTHON is the user's own: say what it lacks for running, install nothing.
bcd_check_own_python() {
    bcd_version_fits "$BCD_PYTHON" \
        || { bcd_fail "BCD_PYTHON=$BCD_PYTHON is not a Python 3.11 to 3.13 that runs"; return 1; }
    local missing
    missing=$(bcd_differences "$BCD_PYTHON" close) \
        || { bcd_fail "BCD_PYTHON=$BCD_PYTHON could not list its packages"; return 1; }
    [ -z "$missing" ] \
        || bcd_fail "BCD_PYTHON=$BCD_PYTHON lacks $missing; install with: $BCD_PYTHON -m pip install $missing"
}

# Prints the interpreter of the active environment, if it is another one than .venv and has every pin; says why not.
bcd_active_python() {
    local folder=${VIRTUAL_ENV:-${CONDA_PREFIX:-}} missing
    [ -n "$folder" ] && [ -x "$folder/bin/python" ] && ! [ "$folder" -ef "$BCD_ROOT/.venv" ] || return 1
    bcd_version_fits "$folder/bin/python" || return 1
    missing=$(bcd_differences "$folder/bin/python" exact ${BCD_TESTS:+tests}) || return 1
    if [ -n "$missing" ]; then
        set -- $missing
        bcd_say "the active environment $folder lacks $# pin(s) ($1${2:+, $2}${3:+, ...}), so .venv is used;" \
            "BCD_PYTHON=$folder/bin/python takes it all the same" >&2
        return 1
    fi
    echo "$folder/bin/python"
}

bcd_install() {
    local venv=$1 base=$2 started=$SECONDS quiet=()
    [ -t 1 ] || quiet=(--quiet)

    if [ -e "$venv/.unfinished" ] || ! "$venv/bin/python" -m pip --version >/dev/null 2>&1; then
        [ ! -e "$venv" ] || bcd_say "$venv is broken or was never finished; starting it afresh"
        bcd_say "making $venv from $("$base" -c 'import sys; print(sys.executable, sys.version.split()[0])')"
        "$base" -m venv --clear "$venv" || { bcd_fail "could not make $venv with $base -m venv"; return 1; }
    fi
    # From here a killed pip may leave half-written packages that look installed.
    touch "$venv/.unfinished"

    local torch
    torch=$(grep -m 1 '^torch==' "$BCD_ROOT/requirements.txt") || torch=
    if [ -n "$torch" ]; then
        bcd_say "installing $torch"
        "$venv/bin/python" -m pip install --disable-pip-version-check "${quiet[@]}" "$torch" \
            || { bcd_fail "pip could not install $torch (its message is above)"; return 1; }
    fi
    local pins=$BCD_ROOT/requirements.txt
    if [ -z "${BCD_TESTS:-}" ] && [ ! -e "$venv/.fingerprint.tests" ]; then
        pins=$venv/requirements.txt
        sed '/^# tests\/run.sh/,$d' "$BCD_ROOT/requirements.txt" > "$pins"
    fi
    bcd_say "installing the other pins of requirements.txt"
    "$venv/bin/python" -m pip install --disable-pip-version-check "${quiet[@]}" -r "$pins" \
        || { bcd_fail "pip could not install requirements.txt (its message is above)"; return 1; }

    bcd_fingerprint "$venv/bin/python" > "$venv/.fingerprint" || return 1
    [ "$pins" != "$BCD_ROOT/requirements.txt" ] || cp "$venv/.fingerprint" "$venv/.fingerprint.tests" || return 1
    rm "$venv/.unfinished"
    bcd_say "$venv is ready ($((SECONDS - started)) s)"
}

bcd_up_to_date() {
    local stamp=$1/.fingerprint${BCD_TESTS:+.tests}
    [ ! -e "$1/.unfinished" ] && [ -s "$stamp" ] \
        && [ "$(cat "$stamp")" = "$(bcd_fingerprint "$1/bin/python" 2>/dev/null)" ]
}

bcd_setup() {
    local venv=$BCD_ROOT/.venv base
    if [ -n "${BCD_PYTHON:-}" ]; then
        bcd_check_own_python || return 1
        PYTHON=$("$BCD_PYTHON" -c 'import sys; print(sys.executable)')
        bcd_say "using BCD_PYTHON=$PYTHON"
    elif PYTHON=$(bcd_active_python); then
        bcd_say "using the active environment: $PYTHON"
    else
        if ! bcd_up_to_date "$venv"; then
            base=$(bcd_base_python) || return 1
            # Two commands started together must not install into one folder at once.
            if command -v flock >/dev/null 2>&1; then
                ( flock 9 && { bcd_up_to_date "$venv" || bcd_install "$venv" "$base"; } ) 9>"$venv.lock" || return 1
            else
                bcd_install "$venv" "$base" || return 1
            fi
        fi
        PYTHON=$venv/bin/python
    fi
    export PYTHON PATH="$(dirname "$PYTHON"):$PATH"
}

if ! bcd_setup; then
    # Sourced by a script: end the script. Sourced in a terminal: keep the terminal.
    case $- in *i*) return 1 ;; *) exit 1 ;; esac
fi
