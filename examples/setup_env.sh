#!/usr/bin/env bash
# Set up the Python environment of this repository: .venv at its root, with the pins of requirements.txt.
#
#   bash examples/setup_env.sh          set it up or repair it; returns at once if nothing is to do
#   . examples/setup_env.sh             the same, and use it in this shell (tests/run.sh, examples/quickstart.sh)
#   BCD_PYTHON=/path/to/python ...      use that interpreter and what is installed there; nothing is set up.
#                                       For GPU machines that bring their own torch, Apex or Transformer Engine.
#
# An active virtual environment or conda environment that has all pins is used instead of .venv, and nothing is set up.
# Sourced, it sets PYTHON to the interpreter and puts its folder first on PATH.
# Environment: PYTHON3 is the interpreter that .venv is made from (default: the newest of python3.14 to python3.11 on PATH,
# else python3, else one that uv brings). BCD_TESTS=1 (tests/run.sh) installs what tests need too.

BCD_ROOT=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)

bcd_say() { printf 'setup: %s\n' "$*"; }

bcd_fail() {
    printf 'setup: error: %s\n' "$*" >&2
    return 1
}

# bcd_missing PYTHON exact|close [tests]: print the pins that this interpreter does not have, on one line. "close" accepts
# other versions, which usually work, except of Megatron Core, whose minor release must match the patches of
# megatron/bcd/runtime. Without "tests", packages that only tests need are left out. Fails unless Python is 3.11 to 3.14.
bcd_missing() {
    "$1" - "$BCD_ROOT/requirements.txt" "${@:2}" 2>/dev/null <<'PYTHON'
import importlib.metadata as metadata
import sys

path, how, *tests = sys.argv[1:]
if not (3, 11) <= sys.version_info[:2] <= (3, 14):
    sys.exit(1)
text = open(path, encoding="utf-8").read()
text = text if tests else text.split("# tests/run.sh")[0]
pins = [line.split("#")[0].replace(";", "==").split("==") for line in text.splitlines() if "==" in line.split("#")[0]]
cores = [pin.strip().split(".")[:2] for name, pin, *_ in pins if name == "megatron-core"]
for name, pin, *marker in pins:  # the marker: python_version < "3.12" or python_version >= "3.12"
    pin = pin.strip()
    if marker and ("<" in marker[0]) != (sys.version_info < (3, 12)):
        continue
    try:
        found = metadata.version(name).split("+")[0]  # without torch's build
    except metadata.PackageNotFoundError:
        found = "0.0"
    fits = found != "0.0" and (name != "megatron-core" or found.split(".")[:2] in cores)
    if not (fits and how == "close" or found == pin):
        print(f"{name}=={pin}", end=" ")
PYTHON
}

# Print the interpreter from which .venv is created. Without one, uv brings it.
bcd_base_python() {
    local candidate names=${PYTHON3:-python3.14 python3.13 python3.12 python3.11 python3}
    for candidate in $names; do
        "$candidate" -c 'import sys; sys.exit(not (3, 11) <= sys.version_info[:2] <= (3, 14))' 2>/dev/null || continue
        # Debian and Ubuntu ship ensurepip, without which a venv has no pip, in a separate package.
        if command -v uv >/dev/null || "$candidate" -c 'import ensurepip, venv' 2>/dev/null; then
            echo "$candidate"
            return 0
        fi
        bcd_fail "$candidate cannot make a virtual environment; install python3-venv (Debian, Ubuntu) or uv"
        return 1
    done
    [ -z "${PYTHON3:-}" ] && command -v uv >/dev/null && { echo 3.13; return 0; }
    bcd_fail "no Python 3.11 to 3.14 among: $names; install one, or name one with PYTHON3=/path/to/python3"
}

# Print the interpreter of the active environment if it is not .venv and has every pin; otherwise say why not.
bcd_active_python() {
    local folder=${VIRTUAL_ENV:-${CONDA_PREFIX:-}} missing
    [ -n "$folder" ] && [ -x "$folder/bin/python" ] && ! [ "$folder" -ef "$BCD_ROOT/.venv" ] || return 1
    missing=$(bcd_missing "$folder/bin/python" exact ${BCD_TESTS:+tests}) || return 1
    [ -n "$missing" ] || { echo "$folder/bin/python"; return 0; }
    bcd_say "the active environment $folder lacks $missing, so .venv is used;" \
        "BCD_PYTHON=$folder/bin/python takes it all the same" >&2
    return 1
}

# .venv is up to date if the pins, and the way they are installed, have not changed.
bcd_fingerprint() { cat "$BCD_ROOT/requirements.txt" "$BCD_ROOT/examples/setup_env.sh" | cksum; }

bcd_up_to_date() {
    local stamp=$1/.fingerprint${BCD_TESTS:+.tests}
    [ -x "$1/bin/python" ] && [ ! -e "$1/.unfinished" ] && [ "$(cat "$stamp" 2>/dev/null)" = "$(bcd_fingerprint)" ]
}

bcd_install() {
    local venv=$1 base=$2 pins=$BCD_ROOT/requirements.txt torch pip
    if [ -e "$venv/.unfinished" ] || ! "$venv/bin/python" -m pip --version >/dev/null 2>&1; then
        bcd_say "making $venv with $base ($("$base" --version 2>/dev/null || echo "Python from uv"))"
        local make=("$base" -m venv --clear)
        ! command -v uv >/dev/null || make=(uv venv --quiet --clear --seed --python "$base")
        "${make[@]}" "$venv" || { bcd_fail "could not make $venv with ${make[*]}"; return 1; }
    fi
    # From here a killed pip may leave half-written packages that look installed.
    touch "$venv/.unfinished"
    if [ -z "${BCD_TESTS:-}" ] && [ ! -e "$venv/.fingerprint.tests" ]; then
        pins=$venv/requirements.txt
        sed '/^# tests\/run.sh/,$d' "$BCD_ROOT/requirements.txt" > "$pins"
    fi
    pip=("$venv/bin/python" -m pip install --disable-pip-version-check)
    [ -t 1 ] || pip+=(--quiet)
    torch=$(grep -m 1 '^torch==' "$pins")
    bcd_say "installing $torch, then the other pins of requirements.txt"
    "${pip[@]}" "$torch" && "${pip[@]}" -r "$pins" \
        || { bcd_fail "pip could not install $torch and the pins of $pins (its message is above)"; return 1; }
    bcd_fingerprint > "$venv/.fingerprint"
    [ "$pins" != "$BCD_ROOT/requirements.txt" ] || cp "$venv/.fingerprint" "$venv/.fingerprint.tests"
    rm "$venv/.unfinished"
}

bcd_setup() {
    local venv=$BCD_ROOT/.venv base missing
    if [ -n "${BCD_PYTHON:-}" ]; then  # the user's own: say what it lacks for running, install nothing
        missing=$(bcd_missing "$BCD_PYTHON" close) \
            || { bcd_fail "BCD_PYTHON=$BCD_PYTHON is not a Python 3.11 to 3.14 that runs"; return 1; }
        [ -z "$missing" ] || { bcd_fail "install what it lacks: $BCD_PYTHON -m pip install $missing"; return 1; }
        PYTHON=$("$BCD_PYTHON" -c 'import sys; print(sys.executable)')
        bcd_say "using BCD_PYTHON=$PYTHON"
    elif PYTHON=$(bcd_active_python); then
        bcd_say "using the active environment: $PYTHON"
    else
        if ! bcd_up_to_date "$venv"; then
            base=$(bcd_base_python) || return 1
            # Two commands must not install into one folder at the same time.
            ( ! command -v flock >/dev/null || flock 9; bcd_up_to_date "$venv" || bcd_install "$venv" "$base" ) \
                9>"$venv.lock" || return 1
        fi
        PYTHON=$venv/bin/python
    fi
    export PYTHON PATH="$(dirname "$PYTHON"):$PATH"
}

if ! bcd_setup; then
    # Sourced by a script: end the script. Sourced in a terminal: keep the terminal.
    case $- in *i*) return 1 ;; *) exit 1 ;; esac
fi
