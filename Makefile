# `make` alone lists the targets. Each of them first makes or renews .venv (quick when nothing changed).
.DEFAULT_GOAL := help
SHELL := /bin/bash
.SHELLFLAGS := -euo pipefail -c
MAKEFLAGS += --no-print-directory

BIN := .venv/bin
WORKERS ?= 2
say = @printf '\n== %s\n' "$(1)"

.PHONY: help setup demo test test-slow test-anywhere foreign fuzz zoo format vectors demo-monitor \
        docs docs-pages check-format check-lint check-layers check-bare check-types check-vectors check-docs check-tests

help: ## list the targets
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "  make %-14s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)

setup: ## make or renew .venv: torch, all extras, developer tools
	@scripts/setup.sh

demo: setup ## record a run, audit it, catch a cheat
	$(call say,demo: tally demo)
	@$(BIN)/tally demo

demo-monitor: setup ## eight simulated chips, two cheating owners, from snapshot to verdict
	$(call say,demo: tally monitor demo)
	@$(BIN)/tally monitor demo

# The checks side by side, cheap ones first, each with its words in one piece; then the tests, which take all cores themselves.
IN_PIECES := $(if $(filter output-sync,$(.FEATURES)),--output-sync=target)
test: setup ## every check and all tests but the slow ones
	@$(MAKE) -j$(WORKERS) $(IN_PIECES) check-format check-lint check-layers check-bare check-types check-docs check-vectors
	@$(MAKE) -j1 check-tests

test-slow: setup ## the tests marked slow
	$(call say,slow tests: pytest -m slow)
	@$(BIN)/python -m pytest -m slow

AVX2 := ATEN_CPU_CAPABILITY=avx2 MKL_ENABLE_INSTRUCTIONS=AVX2 ONEDNN_MAX_CPU_ISA=AVX2 DNNL_MAX_CPU_ISA=AVX2 \
    NPY_DISABLE_CPU_FEATURES="X86_V4 AVX512_ICL AVX512_SPR" OPENBLAS_CORETYPE=Haswell \
    GLIBC_TUNABLES=glibc.cpu.hwcaps=-AVX512F
SSE4 := ATEN_CPU_CAPABILITY=default MKL_ENABLE_INSTRUCTIONS=SSE4_2 ONEDNN_MAX_CPU_ISA=SSE41 DNNL_MAX_CPU_ISA=SSE41 \
    NPY_DISABLE_CPU_FEATURES="X86_V3 X86_V4 AVX512_ICL AVX512_SPR" OPENBLAS_CORETYPE=Nehalem \
    GLIBC_TUNABLES=glibc.cpu.hwcaps=-AVX,-AVX2,-FMA,-FMA4,-AVX512F
test-anywhere: setup ## the tests as on other machines: several threads, AVX2, SSE4.2
	$(call say,tests on several threads)
	@OMP_NUM_THREADS=2 $(BIN)/python -m pytest -n $(WORKERS) --dist worksteal
	$(call say,tests under AVX2)
	@env $(AVX2) $(BIN)/python -m pytest -n $(WORKERS) --dist worksteal
	$(call say,tests under SSE4.2)
	@env $(SSE4) $(BIN)/python -m pytest -n $(WORKERS) --dist worksteal

foreign: setup ## record the runs of tests/foreign on this processor, also with fewer of its instructions
	@$(BIN)/python scripts/record_foreign.py
	@env $(AVX2) OMP_NUM_THREADS=1 $(BIN)/python scripts/record_foreign.py
	@env $(SSE4) OMP_NUM_THREADS=1 $(BIN)/python scripts/record_foreign.py

mutants: setup ## break chosen lines one at a time: the tests must notice; ONLY=PATTERN for some of them
	$(call say,mutants: scripts/mutants.py)
	@$(BIN)/python scripts/mutants.py --jobs $(WORKERS) --only "$(ONLY)"

FUZZ_SECONDS ?= 600
fuzz: setup ## fuzz every parser of other parties' bytes, FUZZ_SECONDS each (ten minutes)
	$(call say,fuzz: fuzz/fuzz.py)
	@$(BIN)/python -m pip install -qq -c constraints.txt --group fuzz
	@$(BIN)/python fuzz/fuzz.py --seconds $(FUZZ_SECONDS) --jobs $(WORKERS)

ZOO ?= build/zoo
zoo: setup ## tiny models of transformers, torchvision, timm and diffusers, recorded and followed under SSE4.2, under fp64 what does not match under fp32, into ZOO; ONLY=PATTERN for some
	$(call say,zoo: bench/zoo.py)
	@HF_HUB_OFFLINE=1 OMP_NUM_THREADS=1 $(BIN)/python bench/zoo.py $(ZOO) --then fp64 --only "$(or $(ONLY),.)"

format: setup ## format the code and mend what ruff can mend
	$(call say,format: ruff)
	@$(BIN)/ruff check --fix-only --quiet .
	@$(BIN)/ruff format .

vectors: setup ## make the test vectors again
	$(call say,vectors: scripts/make_vectors.py)
	@$(BIN)/python scripts/make_vectors.py

SPHINX := $(BIN)/python -m sphinx -b html -q -c docs -d build/doctrees
docs: docs-pages ## build the site into build/site; open build/site/index.html, no server and no network needed
	$(call say,site: sphinx)
	@$(SPHINX) . build/site
	@echo build/site/index.html

docs-pages: setup ## make docs/commands.md, docs/api.md and completions/ again from the code
	@$(BIN)/python scripts/make_commands.py
	@$(BIN)/python scripts/make_api.py
	@$(BIN)/python scripts/make_completions.py

check-format: setup
	$(call say,format: ruff format --check)
	@$(BIN)/ruff format --check .

check-lint: setup
	$(call say,lint: ruff check)
	@$(BIN)/ruff check .

check-layers: setup
	$(call say,layers: lint-imports)
	@$(BIN)/lint-imports --no-logo

check-bare: setup
	$(call say,bare package without torch: scripts/check_bare.py)
	@$(BIN)/python scripts/check_bare.py

check-types: setup
	$(call say,types: pyright)
	@$(BIN)/pyright

check-vectors: setup
	$(call say,vectors made again and compared: scripts/check_vectors.sh)
	@scripts/check_vectors.sh

# Strict: a page outside the contents, a link or a heading that is not there, or anything loaded from elsewhere is an error.
check-docs: setup
	$(call say,site: sphinx -W)
	@$(SPHINX) -W --keep-going -E . build/site
	@$(BIN)/python scripts/check_site.py build/site

check-tests: setup
	$(call say,tests: pytest)
	@OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n $(WORKERS) --dist worksteal
