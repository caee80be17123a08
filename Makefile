# Every target makes what it needs, in $(VENV), from Python >= 3.11 and a C++ compiler. Variables:
#
#   PYTHON=python3.13      the Python to make $(VENV) from; unless given, the quickest of python3's version
#   VENV=.venv-313         where; one per Python
#   JAX=0.10.2             that version of JAX instead of the newest that the Python can have
#   ARGS=...               further arguments for pytest, examples/train_lm.py, the benchmarks,
#                          tools/test_all.py
#   PRESETS="asan tsan"    of the C++ tests these builds alone
ifeq ($(origin PYTHON),undefined)
PYTHON = $(eval PYTHON := $$(shell python3 tools/quickest_python.py || echo python3))$(PYTHON)
endif
VENV ?= .venv
JAX ?=
ARGS ?=

BIN := $(VENV)/bin
# One worker more than cores, since tests of several processes wait at times; at most 8.
WORKERS := -n $(shell cores=$$(getconf _NPROCESSORS_ONLN); echo $$((cores < 8 ? cores + 1 : 8))) \
  --dist loadfile --no-loadscope-reorder
PYTEST := $(BIN)/pytest $(WORKERS)
# What `make test-fallback` runs on jax.lax, too, or never depends on the path.
NOT_ON_LAX := diagnosis docs examples gpu model nccl parallel processes repo seeds test_bench.py test_config.py \
  test_extras.py test_info.py test_processes.py test_programs_of_their_own.py test_unknown_jax.py \
  collectives/test_unavailable.py
CXX_FILES = $(shell find csrc tests/cpp -name '*.h' -o -name '*.cc')
BUILD_INPUTS = pyproject.toml CMakeLists.txt $(shell find csrc -type f)
JOBS := $(shell getconf _NPROCESSORS_ONLN)

.PHONY: help demo test test-native test-processes test-fallback test-gpu test-all bench bench-processes bench-door bench-matmul bench-tensor bench-zero bench-plan bench-gpu bench-recorder lint format ctest wheel release-test docs env build stubs signatures clean
.DEFAULT_GOAL := help

help:  ## show this list
	@grep -E '^[a-z-]+: .*## ' Makefile | sed -E 's/^([a-z-]+):.*## (.*)/make \1\t\2/' | expand -t 18

demo: $(VENV)/.dev$(JAX)  ## train a language model on 8 simulated devices (5 minutes)
	$(BIN)/python examples/train_lm.py $(ARGS)

test: test-native  ## the test suite, on the native path and then on jax.lax (ten to twenty minutes on 2 cores)
	JAXCOLL_BACKEND=lax $(PYTEST) $(addprefix --ignore tests/,$(NOT_ON_LAX)) $(ARGS)

test-native: $(VENV)/.dev$(JAX)  ## the same on the native path alone
	$(PYTEST) $(ARGS)

test-processes: $(VENV)/.dev$(JAX)  ## all tests of several processes, whole products (12 minutes)
	$(BIN)/pytest tests/processes --full $(ARGS)

# Not editable: the wheel without the extension, as it is installed where there is no compiler.
test-fallback: $(VENV)/.tools  ## the test suite on a wheel without the native extension
	rm -rf build/fallback .venv-fallback
	JAXCOLL_NATIVE=OFF $(BIN)/python -m build --wheel --outdir build/fallback
	$(PYTHON) -m venv .venv-fallback
	.venv-fallback/bin/pip install --quiet --upgrade "pip>=25.1"
	.venv-fallback/bin/pip install --quiet "$$(ls build/fallback/*-py3-none-any.whl)[demo]" --group test \
	  $(if $(JAX),"jax==$(JAX)" "jaxlib==$(JAX)")
	PYTHONSAFEPATH=1 JAXCOLL_TESTS_WITHOUT_NATIVE=1 .venv-fallback/bin/pytest $(WORKERS) --ignore tests/repo $(ARGS)

test-gpu: $(VENV)/.dev$(JAX)  ## the engine for GPUs, on those that are here (with pip install 'jax[cuda13]' in $(VENV))
	$(BIN)/pytest tests/gpu/test_gpu.py -rs --durations 0 --durations-min 1 $(ARGS)

test-all: $(VENV)/.tools  ## everything, on the oldest and the newest JAX, into tests/RESULTS.md
	PATH="$(abspath $(BIN)):$$PATH" $(BIN)/python tools/test_all.py $(ARGS)

bench: $(VENV)/.dev$(JAX)  ## measure against jax.lax; table, JSON and plot in benchmarks/results
	$(BIN)/python benchmarks/run.py $(ARGS)

bench-processes: $(VENV)/.dev$(JAX)  ## the same across processes, against jax.lax on Gloo and mpi4jax
	$(BIN)/python benchmarks/processes.py $(ARGS)

bench-door: $(VENV)/.dev$(JAX)  ## XLA's own collectives on jaxcoll's engine, against the same on Gloo
	$(BIN)/python benchmarks/door.py $(ARGS)

bench-matmul: $(VENV)/.dev$(JAX)  ## collective matmuls, against a collective and a matmul on jax.lax
	$(BIN)/python benchmarks/matmul.py $(ARGS)

bench-tensor: $(VENV)/.dev$(JAX)  ## tensor-parallel training steps, against the same on jax.lax
	$(BIN)/python benchmarks/tensor_step.py $(ARGS)

bench-zero: $(VENV)/.dev$(JAX)  ## data-parallel and fully sharded steps, against jax.lax and jit with shardings
	$(BIN)/python benchmarks/zero_step.py $(ARGS)

bench-plan: $(VENV)/.dev$(JAX)  ## products of strategies, and pipelines, against jax.lax, jit and an ideal
	$(BIN)/python benchmarks/plan_step.py $(ARGS)

bench-gpu: $(VENV)/.dev$(JAX)  ## on GPUs, also processes that share one: against jax.lax, or NCCL alone (4 minutes)
	$(BIN)/python benchmarks/gpu.py $(ARGS)

bench-recorder: $(VENV)/.dev$(JAX) $(VENV)/.tools  ## what it costs to record a call
	PATH="$(abspath $(BIN)):$$PATH" $(BIN)/python benchmarks/recorder.py $(ARGS)

lint: $(VENV)/.dev$(JAX) $(VENV)/.tools  ## formatting, style, types, spelling, clang-tidy
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	$(BIN)/codespell
	$(BIN)/clang-format --dry-run --Werror $(CXX_FILES)
	$(BIN)/pyright --pythonpath $(BIN)/python
	PATH="$(abspath $(BIN)):$$PATH" cmake --preset lint -DPython_EXECUTABLE="$(abspath $(BIN))/python" \
	  -Dnanobind_DIR="$$($(BIN)/python -m nanobind --cmake_dir)" > /dev/null
	# But for what needs NVIDIA's headers. It has nothing to say but its progress, of which each run's is
	# collected: two at once write into each other's lines.
	{ find csrc tests/cpp -name '*.cc' ! -name cuda_abi_test.cc -print0 | xargs -0 -n 4 -P $(JOBS) sh -c \
	  'said=$$($(BIN)/clang-tidy -p build/lint --quiet "$$@" 2>&1) || echo "clang-tidy failed"; \
	   echo "$$said" | grep -v -e " Processing file " -e "^$$"; true' clang-tidy; } | { ! grep .; }

docs: $(VENV)/.dev$(JAX) $(VENV)/.tools  ## the pages, as HTML in build/docs; a warning is an error
	$(BIN)/sphinx-build -W --keep-going -q -b html docs build/docs

format: $(VENV)/.tools  ## rewrite what `make lint` can mend by itself
	$(BIN)/ruff check --fix --exit-zero
	$(BIN)/ruff format
	$(BIN)/clang-format -i $(CXX_FILES)

PRESETS := release asan tsan
ctest: $(VENV)/.tools  ## the C++ layers below FFI: release, ASAN + UBSAN, TSAN
	set -e; for preset in $(PRESETS); do \
	  PATH="$(abspath $(BIN)):$$PATH" cmake --workflow --preset $$preset; \
	done

wheel: $(VENV)/.tools  ## in dist/: the sources, and a portable wheel of these
	rm -rf build/wheel dist
	$(BIN)/python -m build --outdir build/wheel
	PATH="$(abspath $(BIN)):$$PATH" auditwheel repair --wheel-dir dist build/wheel/*.whl
	mv build/wheel/*.tar.gz dist

release-test: $(VENV)/.dev$(JAX) $(VENV)/.tools  ## try the wheel and the sources in empty environments
	JAXCOLL_WHEEL="$$(ls -t "$$PWD"/dist/*.whl 2> /dev/null | head -n 1)" \
	  $(BIN)/pytest tests/repo -m release -rP $(ARGS)

env: $(VENV)/.dev$(JAX)  ## the environment alone, $(VENV)

stubs: $(VENV)/.dev$(JAX)  ## regenerate jaxcoll/_core.pyi from the extension
	$(BIN)/python -m nanobind.stubgen -q -m jaxcoll._core -o jaxcoll/_core.pyi

signatures: $(VENV)/.dev$(JAX)  ## regenerate tests/repo/signatures.txt from the package
	$(BIN)/python tools/signatures.py > tests/repo/signatures.tmp
	mv tests/repo/signatures.tmp tests/repo/signatures.txt

build: $(VENV)/.tools  ## after an edit of csrc: rebuild the extension against the installed JAX, quickly
	$(BIN)/pip install --quiet --no-build-isolation --no-deps -e .
	@test -n "$$JAXCOLL_NATIVE" || $(BIN)/python -c 'import jaxcoll._core' || \
	  { echo 'the extension does not compile: $(BIN)/pip install --no-build-isolation --no-deps -v -e .'; exit 1; }
	@touch $(VENV)/.dev$(JAX)

clean:  ## remove everything that make made
	rm -rf .venv* build dist

# ---- Environments --------------------------------------------------------------------------------

$(VENV)/.python:
	@$(PYTHON) tools/check_toolchain.py
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet --upgrade "pip>=25.1"  # for --group
	@touch $@

# An editable install, so that Python edits count at once. Built in isolation, as wheels are: against
# the oldest FFI headers, whichever JAX is installed here.
$(VENV)/.dev$(JAX): $(VENV)/.python $(BUILD_INPUTS)
	@rm -f $(VENV)/.dev*
	$(BIN)/pip install --quiet -e ".[demo]" --group test $(if $(JAX),"jax==$(JAX)" "jaxlib==$(JAX)")
	@touch $@

$(VENV)/.tools: $(VENV)/.python pyproject.toml
	$(BIN)/pip install --quiet --group lint --group docs
	@touch $@
