# Every target works from a fresh clone with Python >= 3.11 and make: it creates .venv and installs what it needs, once.

SHELL := /bin/bash
.NOTPARALLEL:
.PHONY: help demo test check lint types contracts docs suite long parity cases mutants recommended bench gpu format clean

BIN := .venv/bin
PIP := $(BIN)/python -m pip install --disable-pip-version-check --quiet -c constraints.txt
NO_PYTHON := Phalanx needs Python 3.11 or newer.\n    try: make PYTHON=/path/to/python3.12 demo
NO_VENV := this Python cannot create a virtual environment.\n    try: sudo apt-get install python3-venv

# The first interpreter that runs and is new enough; `make PYTHON=...` overrides.
PYTHON ?= $(shell for name in python3 python3.11 python3.12 python3.13 python3.14; do \
	if $$name -c 'import sys; sys.exit(sys.version_info < (3, 11))' >/dev/null 2>&1; then echo $$name; break; fi; done)

help:
	@echo 'make demo       install, then train, prove and report a small model on this machine'
	@echo 'make test       the whole suite: lint, types, contracts, docs, tests'
	@echo 'make check      style, types, import contracts and the tests that start no process: about a minute'
	@echo 'make long       further rows of the laws that `make test` holds by some: other models, plans and ranks'
	@echo 'make parity     every plan x model x ranks against one device -> docs/reference/parity.md'
	@echo 'make cases      jobs as people write them x plans: equal, named, or refused before they run -> docs/reference/cases.md'
	@echo 'make mutants    faults put into the code one by one, and what finds each -> docs/reference/mutants.md'
	@echo 'make recommended  what plan recommends for well-known models, run small -> docs/reference/recommended.md'
	@echo 'make bench      the comparisons with peers (about an hour on 2 cores)'
	@echo 'make gpu        the tests that need CUDA devices'
	@echo 'make docs       the documentation as a web site in site/'
	@echo 'make format     let ruff format and fix the code'
	@echo 'make clean      remove .venv and everything built'

demo: .venv/.installed
	@$(BIN)/phalanx demo

# $(1) name, $(2) command: says what runs, and how long it took.
define stage
@echo "== $(1)"; start=$$SECONDS; $(2); status=$$?; \
	if [ $$status -eq 0 ]; then said=passed; else said="FAILED ($$status)"; fi; \
	echo "== $(1): $$said in $$((SECONDS - start)) s"; exit $$status
endef

# For between two edits: what is not about style starts no process. Types take one core, tests the other.
check: lint contracts
	@said=$$(mktemp); $(MAKE) --no-print-directory types >"$$said" 2>&1 & pid=$$!; \
	echo "== quick tests"; $(BIN)/pytest -m quick $$(grep -l 'pytest.mark.quick' tests/unit/*.py); tests=$$?; \
	wait $$pid; types=$$?; cat "$$said"; rm "$$said"; exit $$((tests | types))

# The suite comes last, so that the last line printed is pytest's.
test: lint types contracts docs suite

lint: .venv/.installed-dev
	$(call stage,lint,$(BIN)/ruff format --check . && $(BIN)/ruff check .)

types: .venv/.installed-dev
	$(call stage,types,$(BIN)/pyright)

contracts: .venv/.installed-dev
	$(call stage,contracts,$(BIN)/lint-imports)

docs: .venv/.installed-dev
	$(call stage,docs,NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs --quiet build --strict)

# In two processes where there are two cores: while one waits for workers to start, the other computes.
SIDES ?= $(shell [ "$$(getconf _NPROCESSORS_ONLN)" -gt 1 ] && echo 2 || echo 1)
suite: export PYTHONDONTWRITEBYTECODE :=  # workers and commands load hundreds of modules: compiled once
suite: .venv/.installed-dev
	@echo "== suite"; $(BIN)/pytest $(if $(filter-out 1,$(SIDES)),-n $(SIDES) --dist loadscope --max-worker-restart 2)

long: export PYTHONDONTWRITEBYTECODE :=
long: .venv/.installed-dev
	$(BIN)/pytest -m long $(if $(filter-out 1,$(SIDES)),-n $(SIDES) --dist loadscope --max-worker-restart 2)

gpu: .venv/.installed-dev
	$(BIN)/pytest -m gpu tests/gpu

parity: .venv/.installed-dev
	$(BIN)/python tests/parity/write_page.py docs/reference/parity.md

cases: .venv/.installed-dev
	$(BIN)/python tests/cases/run_cases.py docs/reference/cases.md

mutants: .venv/.installed-dev
	$(BIN)/python tests/mutants/run_mutants.py --page docs/reference/mutants.md

recommended: .venv/.installed-dev
	$(BIN)/python tests/recommended/write_recommended.py docs/reference/recommended.md

bench: .venv/.installed-bench
	$(BIN)/python bench/startup.py
	$(BIN)/python bench/step_time.py
	$(BIN)/python bench/scaling.py
	$(BIN)/python bench/memory.py
	$(BIN)/python bench/bytes_sent.py
	$(BIN)/python bench/split_memory.py
	$(BIN)/python bench/split_limit.py
	$(BIN)/python bench/idle_share.py
	$(BIN)/python bench/split_step.py
	$(BIN)/python bench/together.py
	$(BIN)/python bench/server_transport.py
	$(BIN)/python bench/unequal.py
	$(BIN)/python bench/slow_network.py

format: .venv/.installed-dev
	$(BIN)/ruff check --fix . && $(BIN)/ruff format .

clean:
	rm -rf .venv site dist build .pytest_cache .ruff_cache .hypothesis .import_linter_cache
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

.venv/bin/python:
	@if [ -z "$(PYTHON)" ]; then printf '$(NO_PYTHON)\n' >&2; exit 1; fi
	@echo "creating .venv with $$("$(PYTHON)" --version)"
	@"$(PYTHON)" -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { printf '$(NO_PYTHON)\n' >&2; exit 1; }
	@"$(PYTHON)" -m venv .venv || { rm -rf .venv; printf '$(NO_VENV)\n' >&2; exit 1; }

# torch first and alone: nothing that comes after may choose another build of it.
.venv/.torch: constraints.txt | .venv/bin/python
	@echo 'installing torch (a few minutes the first time)'
	@$(PIP) torch
	@touch $@

.venv/.installed: pyproject.toml .venv/.torch
	@echo 'installing phalanx'
	@$(PIP) -e .
	@touch $@

.venv/.installed-dev: pyproject.toml .venv/.torch
	@echo 'installing phalanx and what tests, types and docs need'
	@$(PIP) -e '.[dev]'
	@touch $@ .venv/.installed

.venv/.installed-bench: .venv/.installed-dev
	@echo 'installing the peers that bench/ compares with'
	@$(PIP) -e '.[bench]'
	@touch $@
