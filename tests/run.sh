#!/usr/bin/env bash
# Lint, types, import direction and all tests; stops at the first step that fails.
#
#   bash tests/run.sh                       the default suite
#   bash tests/run.sh --long                with the tests marked long: full products of options, hours
#   bash tests/run.sh -k blocks -x          arguments go to pytest
#   bash tests/run.sh -m "not e2e"          the markers are unit, distributed, e2e
#   bash tests/run.sh -n 0                  one file after another, in this process (the default is two at once)
#
# What the tests prove: docs/testing.md.
# Environment: BCD_PYTHON is an interpreter of your own (examples/setup_env.sh). Otherwise Python 3.11 if it is there:
# newer ones, with the Megatron Core that they have, run tests/emulated_gpu.sh.
set -euo pipefail
export BCD_TESTS=1 PYTHON3=${PYTHON3:-python3.11 python3 python3.12 python3.13 python3.14}
. "$(dirname "${BASH_SOURCE[0]}")/../examples/setup_env.sh"
cd "$BCD_ROOT"

step() {
    printf '\n== %s\n' "$1"
    shift
    "$@"
}

# import-linter has no "python -m"; its script may be missing from PATH with BCD_PYTHON.
lint_imports() {
    PYTHONPATH="$BCD_ROOT${PYTHONPATH:+:$PYTHONPATH}" "$PYTHON" -c \
        'import sys; from importlinter.cli import lint_imports; sys.exit(lint_imports(no_logo=True))'
}

step "lint: ruff check" "$PYTHON" -m ruff check .
step "types: mypy" "$PYTHON" -m mypy
step "import direction: import-linter" lint_imports
# Files in the order of conftest.py: the long ones would else be left for one worker at the end. With exec, a signal
# reaches pytest, which then ends all that its tests have started.
step "tests: pytest" exec "$PYTHON" -m pytest -n 2 --dist loadfile --no-loadscope-reorder "$@"
