# Everything happens in .venv at the repository root. Two targets do all a newcomer needs: make run, make test.

VENV   := .venv
BIN    := $(VENV)/bin
PYTHON ?= python3
ARGS   ?=

INSTALLED := $(VENV)/.installed
TOOLS     := $(VENV)/.tools
NATIVE    := $(shell find native ggml_patches cmake -type f -not -name '*.md' -not -path '*/__pycache__/*')

.PHONY: run test test-all test-native lint format check-patches clean

run: $(INSTALLED)
	@$(BIN)/pykvq-run $(ARGS)

test: $(INSTALLED) test-native
	$(BIN)/python -m pytest -m "not slow"

test-all: $(INSTALLED) $(TOOLS) test-native
	$(BIN)/python -m pytest

# The KV types' own tests, under AddressSanitizer and UndefinedBehaviorSanitizer.
test-native: $(INSTALLED)
	$(BIN)/cmake -S . -B build/sanitize -G Ninja -DPYKVQ_SANITIZE=ON -DPYKVQ_BUILD_TESTS=ON -DPYKVQ_PYTHON=OFF \
	    -DCMAKE_BUILD_TYPE=None -DCMAKE_MAKE_PROGRAM=$(abspath $(BIN))/ninja --log-level=WARNING
	$(BIN)/cmake --build build/sanitize --target native-tests
	$(BIN)/ctest --test-dir build/sanitize --output-on-failure

lint: $(INSTALLED)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/clang-format --dry-run -Werror $$(git ls-files 'native/*.c' 'native/*.h' 'native/*.cpp' 'tests/*.cpp')

format: $(INSTALLED)
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .
	$(BIN)/clang-format -i $$(git ls-files 'native/*.c' 'native/*.h' 'native/*.cpp' 'tests/*.cpp')

# Do all patches apply to the pinned source? Prints every conflict at once.
check-patches:
	$(PYTHON) cmake/llama_source.py check-patches

clean:
	rm -rf build $(VENV)

$(VENV)/bin/python:
	$(PYTHON) -m venv $(VENV)

# The build needs are installed first and used without isolation, so that a rebuild is incremental.
$(INSTALLED): $(VENV)/bin/python pyproject.toml CMakeLists.txt models/catalog.toml $(NATIVE)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check 'scikit-build-core>=0.10' 'cffi>=1.17' 'cmake>=3.21' ninja 'pip>=23'
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-build-isolation --editable '.[dev]'
	@touch $@

# What pykvq-convert and plots need: torch is some gigabytes.
$(TOOLS): $(INSTALLED)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-build-isolation --editable '.[dev,tools]'
	@touch $@
