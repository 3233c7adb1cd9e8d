# make demo   train on 4 local ranks, kill two of them, show that nothing was lost
#             (the first time 4 minutes on two cores, and 2.7 GB of downloads, most of it torch's CUDA)
# make test   ruff, pyright, import-linter, the site, pytest: what CI runs   (about 18 minutes on two cores)
# make test-all  the same with all variants and all examples of properties
# make docs   the pages of docs/ as a site, in site/index.html; a broken link is an error
# make chaos  hundreds of random faults in each of five runs                                 (about an hour)
# make endurance  a thousand random faults of all classes in one job on four ranks; writes benchmarks/endurance_4.md
# make bench  what policies cost while nothing fails, what it takes from kill -9 to the next iteration, how fast copies are,
#             how long the simulator takes, what 1,024 ranks exchange as a generation starts, and a report of a large run
#             (4 GB of events in a temporary folder)
# make partial  evaluation loss of lossless and partial checkpoints under four faults, into docs/partial.md
# make profile  this machine's constants for the simulator, as cluster=measured (a minute of training on 4 local ranks)
# All make .venv on the first call and install nothing on the next.
#
# make demo TORCH_BUILD=cpu   makes .venv with a build of torch from PyTorch's own index: without CUDA, and much
#             smaller (or with another CUDA: cu126). Else torch is the build that pip's index has.

PYTHON ?= python3
TORCH ?= 2.13.0
TORCH_BUILD ?=
TORCH_INDEX := https://download.pytorch.org/whl/$(TORCH_BUILD)
TORCH_WANTED := $(TORCH)$(TORCH_BUILD:%=+%)
TORCH_IS_ASKED := $(filter-out file,$(origin TORCH) $(origin TORCH_BUILD))
PIP := .venv/bin/pip -qq --disable-pip-version-check

.PHONY: demo test test-all check types imports docs chaos endurance bench partial profile venv dev clean

demo: venv
	@.venv/bin/python -m launcher.demo

bench: venv
	@.venv/bin/python benchmarks/overhead.py
	@.venv/bin/python benchmarks/recovery.py
	@.venv/bin/python benchmarks/policies.py
	@.venv/bin/torchrun --nproc-per-node=2 benchmarks/copies.py
	@.venv/bin/python benchmarks/report.py
	@.venv/bin/python benchmarks/simulator.py
	@.venv/bin/python benchmarks/control_plane.py

partial: venv
	@.venv/bin/python benchmarks/partial.py

profile: venv
	@rm -rf outputs/profile
	@.venv/bin/torchrun --nproc-per-node=4 launcher/train.py +ckpt=moevement model=small run.dir=outputs/profile \
		train.iterations=30 train.eval_every_iters=0 train.eval_batches=1 \
		fault=at 'fault.at=[{iteration: 14, rank: 2, phase: backward}, {iteration: 22, rank: 1}]'
	@.venv/bin/python -m launcher.cluster_profile outputs/profile --write conf/cluster/measured.yaml

test: check
	@.venv/bin/pytest -n 2 --dist worksteal

test-all: check
	@.venv/bin/pytest -n 2 --dist worksteal --full

chaos: dev
	@.venv/bin/pytest -m chaos

endurance: dev
	@.venv/bin/python scripts/endurance.py --faults 1000 --ranks 4 --write benchmarks/endurance_4.md

check: dev
	@.venv/bin/ruff check -q .
	@.venv/bin/ruff format -q --check .
	@$(MAKE) -s -j 2 types imports docs

types:
	@.venv/bin/pyright --warnings > .venv/pyright.log || { cat .venv/pyright.log; exit 1; }

imports:
	@.venv/bin/lint-imports > .venv/imports.log || { cat .venv/imports.log; exit 1; }

# without a notice about a later mkdocs, which mkdocs-material prints in a frame
docs: dev
	@NO_MKDOCS_2_WARNING=1 .venv/bin/mkdocs build -q

venv: .venv/installed
ifneq ($(TORCH_IS_ASKED),)
	@made=$$(cat .venv/installed); test -z "$$made" -o "$$made" = "$(TORCH_WANTED)" || { echo >&2 \
		"TORCH, TORCH_BUILD: got $(TORCH_WANTED), wanted $$made, of which .venv was made: make clean first"; exit 1; }
endif
dev: venv .venv/installed-dev

# torch first: from its own index, if that was asked for, and by exact version from pip's unless it is there then
.venv/installed: pyproject.toml
	@test -x .venv/bin/pip || $(PYTHON) -m venv .venv
ifneq ($(TORCH_BUILD),)
	@$(PIP) install --index-url $(TORCH_INDEX) --retries 1 torch==$(TORCH_WANTED) 2> .venv/torch.log || echo >&2 \
		"TORCH_BUILD: torch $(TORCH_WANTED) was not to be had (.venv/torch.log): taking the build of pip's index"
endif
	@$(PIP) install torch==$(TORCH)
	@$(PIP) install -e .[launcher]
ifneq ($(TORCH_IS_ASKED),)
	@echo $(TORCH_WANTED) > $@
else
	@test -s $@ && touch $@ || echo $(TORCH_WANTED) > $@
endif

.venv/installed-dev: .venv/installed
	@$(PIP) install -e .[dev]
	@.venv/bin/python scripts/install_browser.py
	@.venv/bin/python scripts/fetch_megatron_lm.py
	@touch $@

clean:
	rm -rf .venv outputs artefacts site
