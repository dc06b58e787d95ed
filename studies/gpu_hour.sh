#!/usr/bin/env bash
# Measure on a GPU machine, without a network, what this project wants to know next. The parts run in order of worth:
# speed, peers, sanity, learning, fine_tuning (docs/gpu.md has results).
#
#   bash studies/gpu_hour.sh                     all parts
#   bash studies/gpu_hour.sh speed peers         these parts
#   SCALE=tiny bash studies/gpu_hour.sh          every part with tiny models, also on a CPU; the numbers mean nothing
#
# A call ends within MINUTES minutes (default: 9). Each measurement is written when it ends, and the next call skips it, so
# repeat the call until it says that nothing is left. `python studies/gpu_hour.py --report` makes tables and pictures.
# Environment:
#   INPUTS       portions made by studies/gpu_hour_inputs.py (default: .gpu_inputs; with SCALE=tiny they are made here)
#   OUTPUT       results and work files (default: out/gpu_hour; with SCALE=tiny out/gpu_hour_tiny)
#   BCD_PYTHON   the interpreter (default: python3 if it has torch, else the environment of examples/setup_env.sh)
#   MEGATRON_LM  folder of Megatron-LM's source, core_v0.16.1, one of the peers (default: none)
#   BCD_COMMIT   the commit, where the copy on this machine has no git history or another one's
set -euo pipefail
case ${1:-} in -h | --help) sed -n '2,/^[^#]/s/^# \{0,1\}//p' "${BASH_SOURCE[0]}"; exit 0 ;; esac
cd "$(dirname "${BASH_SOURCE[0]}")/.."
START=$SECONDS
SCALE=${SCALE:-full}
if [ "$SCALE" = tiny ]; then suffix=_tiny; else suffix=; fi
OUTPUT=${OUTPUT:-out/gpu_hour$suffix}
INPUTS=${INPUTS:-$([ "$SCALE" = tiny ] && echo "$OUTPUT/inputs" || echo .gpu_inputs)}
PYTHON=${BCD_PYTHON:-$(command -v python3)}
if ! "$PYTHON" -c 'import torch' 2>/dev/null; then
    . examples/setup_env.sh
fi
export PATH="$(dirname "$PYTHON"):$PATH"
PACKAGES=$PWD/$OUTPUT/packages
if [ "$SCALE" = tiny ]; then
    "$PYTHON" studies/gpu_hour_inputs.py --tiny --output "$INPUTS"
elif ! "$PYTHON" -c 'import importlib.metadata as m; m.version("megatron-core")' 2>/dev/null; then
    WHEELS=("$INPUTS"/*/wheels/*.whl)
    [ "$(cat "$PACKAGES/.complete" 2>/dev/null)" = "${WHEELS[*]}" ] || {
        "$PYTHON" -m pip install -q --no-index --no-deps --no-compile --upgrade --target "$PACKAGES" "${WHEELS[@]}"
        echo "${WHEELS[*]}" > "$PACKAGES/.complete"
    }
    export PYTHONPATH="$PACKAGES${PYTHONPATH:+:$PYTHONPATH}" PATH="$PACKAGES/bin:$PATH"
fi
"$PYTHON" studies/gpu_hour_inputs.py --unpack "$INPUTS" --output "$OUTPUT/inputs_unpacked"
exec "$PYTHON" studies/gpu_hour.py --scale "$SCALE" --output "$OUTPUT" --inputs "$OUTPUT/inputs_unpacked" \
    --minutes "$(echo "${MINUTES:-9} $((SECONDS - START))" | awk '{print $1 - $2 / 60}')" "$@"
