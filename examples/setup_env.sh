#!/usr/bin/env bash
# The one Python environment of this repository: .venv at its root, with the pins of requirements.txt.
#
#   bash examples/setup_env.sh          set it up, or repair it; at once when there is nothing to do
#   . examples/setup_env.sh             the same, and use it in this shell (tests/run.sh, examples/quickstart.sh)
#   BCD_PYTHON=/path/to/python ...      use that interpreter and what is installed there; nothing is set up.
#                                       For GPU machines that bring their own torch, Apex or Transformer Engine.
#
# Sourced, it sets PYTHON to the interpreter and puts its folder first on PATH.
# Environment: PYTHON3 is the interpreter that .venv is made from (default: the first python3, python3.13, python3.12,
# python3.11 on PATH that is 3.11 to 3.13).

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

# The interpreter of BCD_PYTHON is the user's own: say what it lacks for running, install nothing.
bcd_check_own_python() {
    bcd_version_fits "$BCD_PYTHON" \
        || { bcd_fail "BCD_PYTHON=$BCD_PYTHON is not a Python 3.11 to 3.13 that runs"; return 1; }
    local missing
    missing=$("$BCD_PYTHON" - "$BCD_ROOT/requirements.txt" <<'PYTHON'
import importlib.metadata as metadata
import re
import sys

text = open(sys.argv[1], encoding="utf-8").read().split("# tests/run.sh")[0]
lines = (line.split("#")[0].strip() for line in text.splitlines())
pins = [line.split("==") for line in lines if line]
missing = []
for name, pin in pins:
    try:
        found = metadata.version(name)
    except metadata.PackageNotFoundError:
        missing.append(f"{name}=={pin}")
        continue
    # Other versions usually do, but the patches of megatron/bcd/runtime belong to one minor release of Megatron Core.
    if name == "megatron-core" and re.match(r"\d+\.\d+", found)[0] != re.match(r"\d+\.\d+", pin)[0]:
        missing.append(f"{name}=={pin}")
print(*missing)
PYTHON
    ) || { bcd_fail "BCD_PYTHON=$BCD_PYTHON could not list its packages"; return 1; }
    [ -z "$missing" ] \
        || bcd_fail "BCD_PYTHON=$BCD_PYTHON lacks $missing; install with: $BCD_PYTHON -m pip install $missing"
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
    bcd_say "installing the other pins of requirements.txt"
    "$venv/bin/python" -m pip install --disable-pip-version-check "${quiet[@]}" -r "$BCD_ROOT/requirements.txt" \
        || { bcd_fail "pip could not install requirements.txt (its message is above)"; return 1; }

    bcd_fingerprint "$venv/bin/python" > "$venv/.fingerprint" && rm "$venv/.unfinished" || return 1
    bcd_say "$venv is ready ($((SECONDS - started)) s)"
}

bcd_up_to_date() {
    [ ! -e "$1/.unfinished" ] && [ -s "$1/.fingerprint" ] \
        && [ "$(cat "$1/.fingerprint")" = "$(bcd_fingerprint "$1/bin/python" 2>/dev/null)" ]
}

bcd_setup() {
    local venv=$BCD_ROOT/.venv base
    if [ -n "${BCD_PYTHON:-}" ]; then
        bcd_check_own_python || return 1
        PYTHON=$("$BCD_PYTHON" -c 'import sys; print(sys.executable)')
        bcd_say "using BCD_PYTHON=$PYTHON"
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
