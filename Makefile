# Every target works from a fresh clone with Python >= 3.11 and make: it creates .venv and installs what it needs, once.

SHELL := /bin/bash
.NOTPARALLEL:
.PHONY: help demo test check quick style lint types contracts docs suite long engines parity resumed cases zoo mutants hangs recommended chaos scale bench gpu \
	gpu-pack gpu-record pins audit format clean

BIN := .venv/bin
PIP := $(BIN)/python -m pip install --disable-pip-version-check --quiet
# Only what is listed, and only files of the listed hashes; no code of a package runs while it is installed.
PINNED := $(PIP) --require-hashes --only-binary :all:
HAS_PINS := $(BIN)/python -c 'import sys; sys.exit(sys.version_info >= (3, 15))'
NO_PINS := echo 'no pins for this Python (pins/ has 3.11 to 3.14): installing within constraints.txt, without hashes'
NO_PYTHON := Phalanx needs Python 3.11 or newer.\n    try: make PYTHON=/path/to/python3.12 demo
NO_VENV := this Python cannot create a virtual environment.\n    try: sudo apt-get install python3-venv

# The first interpreter that runs and is new enough; `make PYTHON=...` overrides.
PYTHON ?= $(shell for name in python3 python3.11 python3.12 python3.13 python3.14; do \
	if $$name -c 'import sys; sys.exit(sys.version_info < (3, 11))' >/dev/null 2>&1; then echo $$name; break; fi; done)

help:
	@echo 'make demo       install, then train, prove and report a small model on this machine'
	@echo 'make test       the whole suite: lint, types, contracts, docs, tests'
	@echo 'make check      style, types, import contracts and the tests that start no process: about a minute once its tools are installed'
	@echo 'make long       further rows of the laws that `make test` holds by some (PART=1/4 for every fourth)'
	@echo 'make engines    tests on Slurm, Ray, SSH, and stand-ins of Kubernetes and SageMaker; `make test` runs the first of each file'
	@echo 'make parity     every plan x model x ranks against one device -> docs/reference/parity.md'
	@echo 'make resumed    every plan that saved x every plan that goes on, against one device -> docs/reference/resumed.md'
	@echo 'make cases      jobs as people write them x plans: equal, named, or refused before they run -> docs/reference/cases.md'
	@echo 'make zoo        jobs with everything a job can say x 14 plans: equal, or refused before they run -> docs/reference/zoo.md'
	@echo 'make mutants    faults put into the code one by one, and what finds each -> docs/project/mutants.md'
	@echo 'make hangs      hangs planted into runs, and who is named for each -> docs/reference/hangs.md'
	@echo 'make recommended  what plan recommends for well-known models, run small -> docs/reference/recommended.md'
	@echo 'make chaos      200 random kills of whole runs, and damaged checkpoints -> docs/reference/chaos.md'
	@echo 'make scale      what grows with the ranks, counted up to 131,072 and measured up to 64 -> docs/explanation/scale.md'
	@echo 'make bench      the comparisons with peers (about an hour on 2 cores)'
	@echo 'make gpu        the tests that need CUDA devices'
	@echo 'make gpu-pack   wheels for a Linux GPU machine with torch and no network (PACK_PYTHON=3.12) -> gpu_pack/'
	@echo 'make gpu-record measure Phalanx on this machine'"'"'s GPU, in 9 minutes and without a network -> gpu_record.json'
	@echo 'make pins       renew the exact versions and hashes of pins/'
	@echo 'make audit      ask for known vulnerabilities of what pins/ lists'
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

# $(1) on one core, types on the other.
define beside_types
@said=$$(mktemp); $(MAKE) --no-print-directory types >"$$said" 2>&1 & pid=$$!; \
	$(1); here=$$?; wait $$pid; types=$$?; cat "$$said"; rm "$$said"; exit $$((here | types))
endef

# For between two edits: what is not about style starts no process. A stage that fails stops none after it.
check: .venv/.installed-dev
	$(call beside_types,failed=0; for one in lint contracts quick; do $(MAKE) --no-print-directory $$one || failed=1; done; (exit $$failed))

quick: .venv/.installed-dev
	$(call stage,quick tests,$(BIN)/pytest -m quick $$(grep -l 'pytest.mark.quick' tests/unit/*.py))

# The suite comes last, so that the last line printed is pytest's.
test: style suite

style: .venv/.installed-dev
	$(call beside_types,$(MAKE) --no-print-directory lint contracts docs)

lint: .venv/.installed-dev
	$(call stage,lint,$(BIN)/ruff format --check . && $(BIN)/ruff check . || { echo 'try: make format'; false; })

types: .venv/.installed-dev
	$(call stage,types,$(BIN)/pyrefly check)

contracts: .venv/.installed-dev
	$(call stage,contracts,$(BIN)/lint-imports)

docs: .venv/.installed-dev
	$(call stage,docs,NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs --quiet build --strict)

# In two processes where there are two cores: while one waits for workers to start, the other computes.
SIDES ?= $(shell [ "$$(getconf _NPROCESSORS_ONLN)" -gt 1 ] && echo 2 || echo 1)
suite: export PYTHONDONTWRITEBYTECODE :=  # workers and commands load hundreds of modules: compiled once
suite: .venv/.installed-dev
	@echo "== suite"; $(BIN)/pytest $(if $(filter-out 1,$(SIDES)),-n $(SIDES) --dist loadscope --max-worker-restart 2)

PART ?= 0/1
long: export PYTHONDONTWRITEBYTECODE :=
long: .venv/.installed-dev
	@echo "== long, part $(PART)"; \
	$(BIN)/pytest -m long --part $(PART) $(if $(filter-out 1,$(SIDES)),-n $(SIDES) --dist loadscope --max-worker-restart 2)

engines: export PYTHONDONTWRITEBYTECODE :=
engines: .venv/.installed-dev
	@echo "== engines"; \
	$(BIN)/pytest -m 'engine and not long' tests/launch $(if $(filter-out 1,$(SIDES)),-n $(SIDES) --dist loadscope --max-worker-restart 2)

gpu: .venv/.installed-dev
	$(BIN)/pytest -m gpu tests/gpu

PACK_PYTHON ?= 3.12
gpu-pack: .venv/.installed-dev
	$(BIN)/python tools/gpu_record/pack.py --python $(PACK_PYTHON)

# Needs neither .venv nor a network: that of .venv if its torch sees a device, else the machine's own Python.
SEES_CUDA := -c 'import sys, torch; sys.exit(not torch.cuda.is_available())' >/dev/null 2>&1
GPU_PYTHON ?= $(shell if $(BIN)/python $(SEES_CUDA); then echo $(BIN)/python; else echo python3; fi)
gpu-record:
	$(GPU_PYTHON) tools/gpu_record/run.py --minutes 9 --out gpu_record.json

parity: .venv/.installed-dev
	$(BIN)/python tests/parity/write_page.py docs/reference/parity.md

resumed: .venv/.installed-dev
	$(BIN)/python tests/parity/write_resumed.py docs/reference/resumed.md

cases: .venv/.installed-dev
	$(BIN)/python tests/cases/run_grid.py cases docs/reference/cases.md

zoo: .venv/.installed-zoo
	PYTHONPATH=$(CURDIR)/.venv/zoo $(BIN)/python tests/cases/run_grid.py zoo docs/reference/zoo.md

mutants: .venv/.installed-dev
	$(BIN)/python tests/mutants/run_mutants.py --page docs/project/mutants.md

hangs: .venv/.installed-dev
	$(BIN)/python tests/faults/hangs.py docs/reference/hangs.md

recommended: .venv/.installed-dev
	$(BIN)/python tests/recommended/write_recommended.py docs/reference/recommended.md

chaos: .venv/.installed-dev
	PYTHONPATH=tools $(BIN)/python bench/chaos_kills.py --write

scale: .venv/.installed-dev
	$(BIN)/python tools/scale.py

bench: .venv/.installed-bench
	$(BIN)/python bench/startup.py
	$(BIN)/python bench/step_time.py
	PYTHONPATH=tools $(BIN)/python bench/launch_hosts.py
	PYTHONPATH=tools $(BIN)/python bench/check_eight.py
	$(BIN)/python bench/scaling.py
	$(BIN)/python bench/memory.py
	$(BIN)/python bench/checkpoint.py
	$(BIN)/python bench/restart.py
	$(BIN)/python bench/bytes_sent.py
	$(BIN)/python bench/split_memory.py
	$(BIN)/python bench/split_limit.py
	$(BIN)/python bench/idle_share.py
	$(BIN)/python bench/split_step.py
	$(BIN)/python bench/together.py
	$(BIN)/python bench/coupled_loss.py
	$(BIN)/python bench/step_extras.py
	$(BIN)/python bench/keras_step.py
	$(BIN)/python bench/server_transport.py
	PYTHONPATH=tools $(BIN)/python bench/unequal.py
	PYTHONPATH=tools $(BIN)/python bench/slow_network.py
	$(BIN)/python bench/watching.py

pins: .venv/bin/python
	$(BIN)/python tools/pins.py

audit: .venv/.installed-audit
	@$(BIN)/python tools/audit.py

format: .venv/.installed-dev
	$(BIN)/ruff check --fix-only . && $(BIN)/ruff format . && $(BIN)/ruff check .

clean:
	rm -rf .venv site dist build .pytest_cache .ruff_cache .hypothesis .import_linter_cache
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

.venv/bin/python:
	@if [ -z "$(PYTHON)" ]; then printf '$(NO_PYTHON)\n' >&2; exit 1; fi
	@echo "creating .venv with $$("$(PYTHON)" --version)"
	@"$(PYTHON)" -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { printf '$(NO_PYTHON)\n' >&2; exit 1; }
	@"$(PYTHON)" -m venv .venv || { rm -rf .venv; printf '$(NO_VENV)\n' >&2; exit 1; }

# torch first and alone: nothing that comes after may choose another build of it. One for CPUs if pip is led to one, else
# the registry's; asked first, as pip would take whichever of two listed files comes with a hash.
CPU_BUILD := $(shell sed -n 's/^\(torch==[^ ]*+cpu\).*/\1/p' pins/torch-cpu.txt)
HAS_CPU_BUILD := $(PIP) --dry-run --no-deps --only-binary :all: '$(CPU_BUILD)' >/dev/null 2>&1
.venv/.torch: constraints.txt pins/torch.txt pins/torch-cpu.txt | .venv/bin/python
	@echo 'installing torch (a few minutes the first time)'
	@if ! $(HAS_PINS); then $(NO_PINS); $(PIP) -c constraints.txt torch; \
	elif $(HAS_CPU_BUILD); then $(PINNED) --no-deps -r pins/torch-cpu.txt; \
	else $(PINNED) --no-deps -r pins/torch.txt; fi
	@touch $@

.venv/.installed: pyproject.toml .venv/.torch
	@echo 'installing phalanx'
	@$(PIP) -c constraints.txt -e .
	@touch $@

# The registry's build of torch for Linux asks for CUDA's libraries; one for CPUs does not.
ASKS_FOR_CUDA := $(BIN)/python -c 'import sys; from importlib.metadata import requires; \
	sys.exit(not any(one.startswith(("cuda-", "nvidia-", "triton")) for one in requires("torch")))'
.venv/.installed-dev: pyproject.toml pins/dev.txt pins/cuda.txt .venv/.torch
	@echo 'installing phalanx and what tests, types and docs need'
	@if $(HAS_PINS); then \
		if $(ASKS_FOR_CUDA); then $(PINNED) -r pins/dev.txt -r pins/cuda.txt; else $(PINNED) -r pins/dev.txt; fi \
		&& $(PIP) --no-deps --no-build-isolation -e .; \
	else $(PIP) -c constraints.txt -e '.[dev]'; fi
	@touch $@ .venv/.installed

.venv/.installed-bench: pins/bench.txt .venv/.installed-dev
	@echo 'installing the peers that bench/ compares with'
	@if $(HAS_PINS); then $(PINNED) --no-deps -r pins/bench.txt; else $(PIP) -c constraints.txt -e '.[bench]'; fi
	@touch $@

# In a folder that only the zoo sees, and without what they ask for: torch is not to be another.
.venv/.installed-zoo: pins/zoo.txt .venv/.installed-dev
	@echo 'installing the libraries whose models are in the zoo'
	@rm -rf .venv/zoo
	@if $(HAS_PINS); then $(PINNED) --no-deps --target .venv/zoo -r pins/zoo.txt; \
	else $(PIP) -c constraints.txt --no-deps --target .venv/zoo torchvision timm diffusers; fi
	@touch $@

.venv/.installed-audit: pins/audit.txt .venv/.installed-dev
	@echo 'installing pip-audit'
	@$(PINNED) -r pins/audit.txt
	@touch $@
