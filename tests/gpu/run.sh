#!/usr/bin/env bash
# The checks that need a GPU, for one machine with one. Prints everything; results go to docs/gpu.md by hand.
#
#   tests/gpu/run.sh [cuda|hip] [BUILD]     BUILD (default build/gpu): objects that are there are used again, so build
#                                           beforehand with `tests/gpu/run.sh cuda BUILD build` where time on the GPU is short
#
# Under 8 minutes with a finished build; every step has a time limit, and one that fails does not stop the next.
set -uo pipefail
cd "$(dirname "$0")/../.."
kind=${1:-cuda}
build=${2:-build/gpu}
only=${3:-all}
jobs=$(nproc)
python=${PYTHON:-python3} # one with pykvq's dependencies, for the steps on a real model
failed=()

step() { # NAME SECONDS COMMAND...
    local name=$1 limit=$2 start=$SECONDS
    shift 2
    echo "=== $name"
    timeout "$limit" "$@" || failed+=("$name (exit $?)")
    echo "--- $name: $((SECONDS - start)) s"
}

flags=(-DPYKVQ_BUILD_TESTS=ON -DCMAKE_BUILD_TYPE=Release)
targets=(test-kv-ops test-tier-attention bench-attention)
case $kind in
    cuda) flags+=(-DPYKVQ_CUDA=ON -DCMAKE_CUDA_ARCHITECTURES="${CUDA_ARCHITECTURES:-native}" -DGGML_CUDA_NCCL=OFF) ;;
    hip) flags+=(-DPYKVQ_HIP=ON ${GPU_TARGETS:+-DGPU_TARGETS="$GPU_TARGETS"}) ;;
    *) echo "error: '$kind' is neither cuda nor hip" >&2; exit 2 ;;
esac
if "$python" -c 'import cffi, numpy, gguf, jinja2' 2>/dev/null; then
    flags+=(-DPYKVQ_PYTHON=ON)
    targets+=(pykvq _cffi)
else
    flags+=(-DPYKVQ_PYTHON=OFF)
fi
cmake -S . -B "$build" "${flags[@]}" -DPython_EXECUTABLE="$(command -v "$python")" --log-level=WARNING || exit 1
cmake --build "$build" -j "$jobs" --target "${targets[@]}" || exit 1
if [[ " ${targets[*]} " == *" _cffi "* ]]; then
    cmake --install "$build" --prefix "$build/python" >/dev/null && cp -R pykvq "$build/python/" || exit 1
fi
[ "$only" = build ] && exit 0

step "card and versions" 20 bash -c 'nvidia-smi || rocminfo; nvcc --version || hipcc --version; git rev-parse HEAD'
export PYKVQ_TEST_DEVICE=gpu
step "codecs, copies, products: bytes of the reference" 50 "$build/tests/native/test-kv-ops"
step "attention against double precision" 80 "$build/tests/native/test-tier-attention"
unset PYKVQ_TEST_DEVICE
bench=("$build/tools/bench-attention" --device gpu --heads 32 --kv-heads 8 --dim 128 --repeat 5)
step "attention at decode, Llama-3-8B's heads" 50 "${bench[@]}" --depth 4096,32768,131072
step "attention at prefill of 512" 40 "${bench[@]}" --tokens 512 --depth 32768
if [ -d "$build/python" ]; then
    export PYTHONPATH=$PWD/$build/python
    step "logits, CPU against GPU" 80 "$python" tests/gpu/end_to_end.py
    step "speed by depth" 80 "$python" -m pykvq.cli.bench smollm2-135m-instruct --n-gpu-layers -1 \
        --kv f16,q8_0,ultra4,ultra2 --depth 0,8192,32768 --gen 32 --repeat 3
else
    failed+=("real model: $python has not cffi, numpy, gguf and jinja2")
fi
if command -v compute-sanitizer >/dev/null; then
    PYKVQ_TEST_DEVICE=gpu step "compute-sanitizer" 60 compute-sanitizer --error-exitcode 1 "$build/tests/native/test-kv-ops"
else
    echo "left out: no compute-sanitizer"
fi
if [ ${#failed[@]} -gt 0 ]; then
    printf 'failed: %s\n' "${failed[@]}"
    exit 1
fi
echo "all passed in $SECONDS s"
