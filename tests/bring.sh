#!/usr/bin/env bash
# `make bring`: what tests want besides the environment of the package (an argument: .venv), from Debian, as root, and from the package
# index. It goes on without what cannot be had, and says so: those tests are skipped. Where all is there, it does nothing.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
venv=${1:-.venv} site=.venv-site
PATH="$PATH:/usr/local/sbin:/usr/sbin:/sbin"

# What, then a command, whose last line is told where it fails.
bring() {
  echo "bring: $1"
  said=$("${@:2}" 2>&1) || { echo "bring: left out, so tests are skipped: $1: ${said##*$'\n'}"; return 1; }
}

packages=()
while read -r there package; do
  command -v "$there" > /dev/null || compgen -G "$there" > /dev/null || packages+=("$package")
done << 'END'
slurmctld slurm-wlm
munged munge
/usr/lib/*/libpmix.so libpmix-dev
ip iproute2
ps procps
unshare util-linux
mount mount
hostname hostname
cc gcc
mpirun.openmpi openmpi-bin
mpicc.openmpi libopenmpi-dev
END
# RUNLEVEL=1: no daemon is started.
debian() {
  [[ $(id -u) == 0 ]] || { echo "only root installs Debian's packages"; return 1; }
  command -v apt-get || { echo "no apt-get here"; return 1; }
  apt-get -qq update && RUNLEVEL=1 DEBIAN_FRONTEND=noninteractive apt-get -qq install --no-install-recommends "$@"
}
((${#packages[@]} == 0)) || bring "Debian's ${packages[*]}" debian "${packages[@]}" || true

pip=("$venv/bin/python" -m pip install --quiet --disable-pip-version-check --retries 1 -c constraints.txt)
[[ -e $(compgen -G "$venv/lib/python*/site-packages/transformers/__init__.py") ]] || bring "transformers" "${pip[@]}" transformers || true

# The recipe of docs/howto/cluster.md, for Debian's Open MPI: an mpi4py of its own, before all else that $venv has.
recipe() {
  "$venv/bin/python" -m venv --clear --without-pip "$site"
  (cd "$venv" && echo "$PWD"/lib/python*/site-packages) > "$(echo "$site"/lib/python*/site-packages)/others.pth"
  pip[0]=$site/bin/python
  MPICC=mpicc.openmpi "${pip[@]}" --no-binary=mpi4py --no-cache-dir --ignore-installed --no-deps mpi4py && touch "$site/.installed"
}
[[ -e $site/.installed ]] || ! command -v mpicc.openmpi > /dev/null || bring "an environment for Debian's Open MPI" recipe || true
