#!/usr/bin/env bash
# The GPU path on a machine without a GPU: sets up emulated GPUs (docs/gpu.md), and runs the tests that need a GPU on them.
#
#   bash tests/emulated_gpu.sh                     the lane
#   bash tests/emulated_gpu.sh tests/gpu -k memory -x      arguments go to pytest
#   bash tests/emulated_gpu.sh --run COMMAND...    any command on emulated GPUs: torchrun --nproc-per-node 2 pretrain_gpt_bcd.py ...
#
# The first time it downloads 3 GB (the CUDA build of torch, and the pins of requirements.txt) into a folder of its own of
# 6 GB: 5 to 12 minutes. .venv is not touched. Needs python3 with venv, cmake, a C and a C++ compiler.
# Environment:
#   BCD_EMULATED_GPU   the folder (default: .emulated_gpu at the repository's root)
#   FAKEGPU            FakeGPU's source (default: ../shared/emulated_gpu/fakegpu_native)
#   PYTHON3            the interpreter (default: one from 3.12 on, which has the newer Megatron Core of requirements.txt,
#                      if newer_python.sh finds or builds it and it can be set up; else python3)
#   NGPU, GPU          how many (default: 4), and which: rtx4090 (default), a100, h100, ...
#   EMU_LATE, EMU_TRACE   see tests/emulated_gpu/nccl.cpp and emulated_order.py
set -euo pipefail
case ${1:-} in -h | --help) sed -n '2,/^[^#]/s/^# \{0,1\}//p' "${BASH_SOURCE[0]}"; exit 0 ;; esac
ROOT=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
FOLDER=${BCD_EMULATED_GPU:-$ROOT/.emulated_gpu}
FAKEGPU=${FAKEGPU:-$ROOT/../shared/emulated_gpu/fakegpu_native}
SOURCE=$ROOT/tests/emulated_gpu
export BCD_EMULATED_GPU=$FOLDER
say() { printf 'emulated_gpu: %s\n' "$*"; }
fail() { printf 'emulated_gpu: error: %s\n' "$*" >&2; exit 2; }

[ -f "$FAKEGPU/CMakeLists.txt" ] || fail "FakeGPU is not in $FAKEGPU: clone github.com/FanBB2333/FakeGPU (MIT), check out" \
    "commit 7d5cf83, and name its folder that holds CMakeLists.txt and src in FAKEGPU"
for need in cmake gcc g++; do
    command -v "$need" >/dev/null || fail "$need is missing (Debian, Ubuntu: apt-get install cmake g++)"
done

# Set up the emulation for the interpreter $PYTHON in $VENV, unless it is there already.
setup() {
    local stamp mark=$FOLDER/stamp${VENV#"$FOLDER/venv"}
    stamp=$(cat "$ROOT/requirements.txt" "$ROOT/tests/emulated_gpu.sh" "$SOURCE"/*.cpp "$SOURCE"/*.h | sha256sum)
    mkdir -p "$FOLDER"
    [ "$(cat "$mark" 2>/dev/null)" != "$stamp" ] || return 0
    say "setting up $VENV: up to 3 GB to download, 6 GB on disk"
    [ -x "$VENV/bin/torchrun" ] || {
        "$PYTHON" -m venv --clear "$VENV"
        # "===" takes the CUDA build where a +cpu build of the version is offered too
        "$VENV/bin/pip" install -q "$(sed -n 's/^torch==/torch===/p' "$ROOT/requirements.txt")"
    }
    grep -v '^torch==' "$ROOT/requirements.txt" > "$FOLDER/requirements.txt"
    "$VENV/bin/pip" install -q -r "$FOLDER/requirements.txt"
    cmake -S "$FAKEGPU" -B "$FOLDER/build" -DCMAKE_BUILD_TYPE=Release > "$FOLDER/cmake.log"
    cmake --build "$FOLDER/build" -j 2 --target fake_gpu fake_cuda fake_cudart fake_cublas >> "$FOLDER/cmake.log"
    mkdir -p "$FOLDER/lib"
    g++ -std=c++20 -O2 -fPIC -shared -isystem "$VENV"/lib/python3*/site-packages/torch/include \
        -Wl,-soname,libnccl.so.2 "$SOURCE/nccl.cpp" -o "$FOLDER/lib/new" -ldl -lpthread
    mv "$FOLDER/lib/new" "$FOLDER/lib/libnccl.so.2"
    local torch
    torch=$(echo "$VENV"/lib/python3*/site-packages/torch)
    g++ -std=c++20 -O1 -fPIC -shared -isystem "$torch/include" -isystem "$torch/include/torch/csrc/api/include" \
        -L"$torch/lib" "$SOURCE/plain_kernels.cpp" -o "$FOLDER/lib/new" -ltorch_cpu -lc10
    mv "$FOLDER/lib/new" "$FOLDER/lib/plain_kernels.so"
    mkdir -p "$FOLDER/lib/emulated-1.dist-info"
    printf '[torch.backends]\nemulated = emulated_kernels:install\n' > "$FOLDER/lib/emulated-1.dist-info/entry_points.txt"
    echo "$stamp" > "$mark"
}

NEWER=
[ -n "${PYTHON3:-}" ] || NEWER=$(timeout 900 bash "$ROOT/tests/newer_python.sh" "$FOLDER/python") || \
    say "no Python 3.12 or later was found, nor could one be built: $FOLDER/python.log"
for PYTHON in ${PYTHON3:-$NEWER python3}; do
    VENV=$FOLDER/venv-$("$PYTHON" -c 'import sys; print("%d.%d" % sys.version_info[:2])')
    set +e # as a condition, setup would go on after an error
    (set -e; setup)
    code=$?
    set -e
    [ $code -ne 0 ] || break
    say "could not set up $VENV with $PYTHON"
done
[ $code -eq 0 ] || exit $code
export FAKEGPU_MODE=simulate FAKEGPU_DEVICE_COUNT=${NGPU:-4} FAKEGPU_PROFILE=${GPU:-rtx4090}
export FAKEGPU_TERMINAL_REPORT=0 FAKEGPU_REPORT_PATH=/dev/null
export LD_LIBRARY_PATH="$FOLDER/build${LD_LIBRARY_PATH:+:$LD_LIBRARY_PATH}" PATH="$VENV/bin:$PATH"
export PYTHONPATH="$FOLDER/lib:$SOURCE:$ROOT${PYTHONPATH:+:$PYTHONPATH}" OMP_NUM_THREADS=${OMP_NUM_THREADS:-1}
export EMU_PLAIN_KERNELS=$FOLDER/lib/plain_kernels.so
export TORCHDYNAMO_DISABLE=1 # compiled kernels are not emulated
export PYTORCH_CUDA_ALLOC_CONF=expandable_segments:False # nor is virtual memory
libraries=$FOLDER/lib/libnccl.so.2
for library in libcublas.so.12 libcudart.so.12 libcuda.so.1 libnvidia-ml.so.1; do
    libraries=$libraries:$FOLDER/build/$library
done
if [ "${1:-}" = --run ]; then
    shift
    LD_PRELOAD=$libraries exec "$@"
fi
cd "$ROOT"
say "$("$VENV/bin/python" -c 'import importlib.metadata as m, platform
print("Python", platform.python_version(), *(f"{name} {m.version(name)}" for name in ("megatron-core", "torch")))')"
[ $# -gt 0 ] || set -- tests/gpu/test_gpus.py tests/emulated_gpu tests/gpu tests/distributed/test_{huggingface,fine_tuning}.py
LD_PRELOAD=$libraries exec python -m pytest --backend nccl -n 2 --dist loadfile --no-loadscope-reorder "$@"
