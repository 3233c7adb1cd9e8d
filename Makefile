# make demo   train on 4 local ranks, kill two of them, show that nothing was lost           (under 5 minutes)
# make test   ruff, pyright, import-linter, pytest                                           (about half an hour)
# make chaos  hundreds of random faults in each of five runs                                 (about an hour)
# make bench  what policies cost while nothing fails, what it takes from kill -9 to the next iteration, how fast copies are
# All make .venv on the first call and install nothing on the next.

PYTHON ?= python3
TORCH ?= 2.13.0
PIP := .venv/bin/pip -qq --disable-pip-version-check

.PHONY: demo test check chaos bench venv dev clean

demo: venv
	@.venv/bin/python scripts/demo.py

bench: venv
	@.venv/bin/torchrun --nproc-per-node=4 benchmarks/overhead.py
	@.venv/bin/python benchmarks/recovery.py
	@.venv/bin/python benchmarks/policies.py
	@.venv/bin/torchrun --nproc-per-node=2 benchmarks/copies.py

test: check
	@.venv/bin/pytest

chaos: dev
	@.venv/bin/pytest -m chaos

check: dev
	@.venv/bin/ruff check -q .
	@.venv/bin/ruff format -q --check .
	@.venv/bin/pyright --warnings > .venv/pyright.log || { cat .venv/pyright.log; exit 1; }
	@.venv/bin/lint-imports > .venv/imports.log || { cat .venv/imports.log; exit 1; }

venv: .venv/installed
dev: .venv/installed-dev

# torch first and by exact version: where there is no GPU, pip then takes a CPU build and no CUDA packages
.venv/installed: pyproject.toml
	@test -x .venv/bin/pip || $(PYTHON) -m venv .venv
	@$(PIP) install torch==$(TORCH)
	@$(PIP) install -e .
	@touch $@

.venv/installed-dev: .venv/installed
	@$(PIP) install -e .[dev]
	@touch $@

clean:
	rm -rf .venv outputs
