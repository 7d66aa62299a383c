# Everything happens in .venv at the repository root. Two targets do all a newcomer needs: make run, make test.

VENV   := .venv
BIN    := $(VENV)/bin
PYTHON ?= python3
ARGS   ?=

INSTALLED := $(VENV)/.installed
TOOLS     := $(VENV)/.tools
GPU_TOOLS := $(VENV)/.gpu-tools
NATIVE    := $(shell find native ggml_patches cmake -type f -not -name '*.md' -not -path '*/__pycache__/*')

# How test-simd builds for other processors than this one
SIMD_avx2    := -DGGML_NATIVE=OFF
SIMD_generic := -DGGML_NATIVE=OFF $(foreach set,SSE42 AVX AVX2 BMI2 F16C FMA,-DGGML_$(set)=OFF)
SIMD_aarch64 := -DCMAKE_TOOLCHAIN_FILE=$(abspath cmake/aarch64-linux.cmake) -DGGML_NATIVE=OFF

.PHONY: run desktop test test-all test-native test-sanitize test-simd test-gpu-compile fidelity sanitized lint format check-patches clean

run: $(INSTALLED)
	@$(BIN)/pykvq-run $(ARGS)

desktop: $(INSTALLED)
	@$(BIN)/pykvq-desktop $(ARGS)

test: $(INSTALLED) test-native
	$(BIN)/python -m pytest -m "not slow"

test-all: $(INSTALLED) $(TOOLS) test-native test-simd
	$(BIN)/python -m pytest

# What KV formats cost on the demo model, as in the table of docs/fidelity.md with ARGS='--text wiki.test.raw'.
fidelity: $(INSTALLED)
	@$(BIN)/pykvq-fidelity "$$($(BIN)/python -c 'from pykvq import catalog; print(catalog.fetch(catalog.default_model()))')" \
	    --float-weights --kv f16,q8_0,q4_0,ultra4,f16:128+q2_t@auto $(ARGS)

# The KV types' own tests, under AddressSanitizer and UndefinedBehaviorSanitizer.
test-native: sanitized
	$(BIN)/cmake --build build/sanitize --target native-tests
	$(BIN)/ctest --test-dir build/sanitize --output-on-failure

# The kernels and codecs as other processors run them: AVX2, plain C++, 64-bit ARM. The last needs g++-aarch64-linux-gnu
# and qemu-user, and is left out without them.
test-simd: $(INSTALLED)
	for target in avx2 generic $$(command -v qemu-aarch64 >/dev/null && echo aarch64); do $(MAKE) test-simd-$$target || exit 1; done

test-simd-%:
	$(BIN)/cmake -S . -B build/simd-$* -G Ninja -DPYKVQ_BUILD_TESTS=ON -DPYKVQ_PYTHON=OFF $(SIMD_$*) \
	    -DCMAKE_MAKE_PROGRAM=$(abspath $(BIN))/ninja --log-level=WARNING
	$(BIN)/cmake --build build/simd-$* --target kernel-tests
	$(BIN)/ctest --test-dir build/simd-$* -L kernels --output-on-failure

# The GPU kernels for the targets of docs/gpu.md, with nvcc and clang++-19: no GPU needed. Needs apt's clang-19; what is
# missing is left out, unless ARGS=--require.
LLAMA_CPP := build/gpu-compile/llama.cpp
test-gpu-compile: $(GPU_TOOLS)
	$(BIN)/python cmake/llama_source.py prepare --dest $(LLAMA_CPP)
	$(BIN)/python tests/gpu/compile_kernels.py --tree $(LLAMA_CPP) $(ARGS)

# The tests of the tiered cache on tiny models, with the Python extension under both sanitizers. Python's own
# allocations leak by design. -S leaves the package installed in .venv out: pykvq comes from build/sanitize/python.
SANITIZED_TESTS := $(wildcard tests/model/test_tiers_*.py)
test-sanitize: sanitized
	$(BIN)/cmake --build build/sanitize --target pykvq _cffi
	$(BIN)/cmake --install build/sanitize --prefix build/sanitize/python >/dev/null
	cp -R pykvq build/sanitize/python/
	LD_PRELOAD="$$($(CXX) -print-file-name=libasan.so) $$($(CXX) -print-file-name=libstdc++.so)" \
	    ASAN_OPTIONS=detect_leaks=0 PYTHONPATH=build/sanitize/python:$$(echo $(VENV)/lib/python*/site-packages) \
	    $(BIN)/python -S $(BIN)/pytest -m "not slow" -k "not smollm2" $(SANITIZED_TESTS)

sanitized: $(INSTALLED)
	$(BIN)/cmake -S . -B build/sanitize -G Ninja -DPYKVQ_SANITIZE=ON -DPYKVQ_BUILD_TESTS=ON -DPYKVQ_PYTHON=ON \
	    -DCMAKE_BUILD_TYPE=None -DPython_EXECUTABLE=$(abspath $(BIN))/python -DCMAKE_MAKE_PROGRAM=$(abspath $(BIN))/ninja --log-level=WARNING

lint: $(INSTALLED)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/clang-format --dry-run -Werror $$(git ls-files 'native/*.c' 'native/*.h' 'native/*.cpp' 'native/*.cu' 'tests/*.cpp' 'tests/*.h' 'tests/*.cu' 'tools/*.cpp')

format: $(INSTALLED)
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .
	$(BIN)/clang-format -i $$(git ls-files 'native/*.c' 'native/*.h' 'native/*.cpp' 'native/*.cu' 'tests/*.cpp' 'tests/*.h' 'tests/*.cu' 'tools/*.cpp')

# Do all patches apply to the pinned source? Prints every conflict at once.
check-patches:
	$(PYTHON) cmake/llama_source.py check-patches

clean:
	rm -rf build $(VENV)

$(VENV)/bin/python:
	$(PYTHON) -m venv $(VENV)

# The build needs are installed first and used without isolation, so that a rebuild is incremental.
$(INSTALLED): $(VENV)/bin/python pyproject.toml CMakeLists.txt models/catalog.toml $(NATIVE)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check 'scikit-build-core>=0.10' 'setuptools>=70.1' 'cffi>=1.17' 'cmake>=3.21' ninja 'pip>=23'
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-build-isolation --editable '.[dev]'
	@touch $@

# What pykvq-convert and plots need: torch is some gigabytes.
$(TOOLS): $(INSTALLED)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-build-isolation --editable '.[dev,tools]'
	@touch $@

# CUDA's compiler and headers: no driver, no toolkit.
CUDA_WHEELS := nvidia-cuda-nvcc nvidia-cuda-crt nvidia-nvvm nvidia-cuda-runtime nvidia-cuda-cccl nvidia-cublas
$(GPU_TOOLS): $(VENV)/bin/python
	$(BIN)/python -m pip install --quiet --disable-pip-version-check $(CUDA_WHEELS:%='%==13.0.*')
	@touch $@
