#!/bin/bash
# mpisgd on the CPUs of a cluster with Flux, an array: one run for each element of a sweep.
# Made by: mpisgd submit jobs/sweep.toml --system flux --nodes 2 --learners 16 --evaluator --venv .venv
# Submit it from where CONFIG and VENV are found, once for each element: flux batch --env=ARRAY_INDEX=1 --env=ARRAY_JOB=NAME FILE.
# Runs go to results/ there.
#
# ======== edit this block ==============================================================================================
# A slot is a node's share of the job: up to 9 ranks. ranks = shards + learners (+ 1 evaluator), here 1 + 16 + 1 = 18.
#flux: --job-name=mpisgd
#flux: --nodes=2
#flux: --nslots=2
#flux: --cores-per-slot=9
#flux: --time-limit=60m
#flux: --output=mpisgd-{{id}}.out
##flux-- --queue=...
##flux-- --bank=...
CONFIG=jobs/sweep.toml
SHARDS=1
EVALUATOR=1   # 1: one rank evaluates snapshots; 0: learner 0 does so after the run
# One element of the array for each: a run of the sweep in CONFIG, and its shards. ARRAY_INDEX, from 1, says which.
ELEMENTS=(
  "hardsync,alpha0=0.02,seed=1 1"
  "hardsync,alpha0=0.02,seed=2 1"
  "hardsync,alpha0=0.05,seed=1 1"
  "hardsync,alpha0=0.05,seed=2 1"
  "softsync,n=4,alpha0=0.02,seed=1 1"
  "softsync,n=4,alpha0=0.02,seed=2 1"
  "softsync,n=4,alpha0=0.05,seed=1 1"
  "softsync,n=4,alpha0=0.05,seed=2 1"
  "allreduce,alpha0=0.02,seed=1 0"
  "allreduce,alpha0=0.02,seed=2 0"
  "allreduce,alpha0=0.05,seed=1 0"
  "allreduce,alpha0=0.05,seed=2 0"
)
MODULES=""    # what to `module load`, e.g. "gcc/13 openmpi/5.0"; empty: nothing
VENV=.venv    # the virtual environment in which mpisgd is installed; empty: none
NAME=mpisgd
RANKS=18      # Flux deals out nodes, not ranks
TASKS_PER_NODE=9
MPI=openmpi   # openmpi or mpich: the one that mpi4py in $VENV runs on (`mpisgd doctor` says which)
THREADS=1     # cores per rank; for more, ask Flux for them too: --cores-per-slot
# ======== nothing below needs an edit ==================================================================================
set -euo pipefail

# Flux has no arrays: this script is queued once for each element. Their runs lie together, by the number of the first of these jobs.
ARRAY_JOB=${ARRAY_JOB:-$(flux job id --to=f58plain "$(flux getattr jobid)")} index=${ARRAY_INDEX:-0}
if ((index < 1)); then
  echo "error: ARRAY_INDEX is not set: flux batch --env=ARRAY_INDEX=1 --env=ARRAY_JOB=NAME, and so on" >&2
  exit 2
fi
SWEEP=results/$NAME-$ARRAY_JOB
if ((index > ${#ELEMENTS[@]})); then
  echo "error: element $index of the array, but ELEMENTS has ${#ELEMENTS[@]}" >&2
  exit 2
fi
read -r ELEMENT shards <<<"${ELEMENTS[index - 1]}"
RUN=$SWEEP/$ELEMENT
NODES=$(flux getattr size)
if ((RANKS > NODES * TASKS_PER_NODE)); then
  echo "error: RANKS = $RANKS, but $NODES nodes of $TASKS_PER_NODE tasks" >&2
  exit 2
fi
LEARNERS=$((RANKS - SHARDS - EVALUATOR))
if ((LEARNERS < 1)); then
  echo "error: $RANKS ranks - $SHARDS shards - $EVALUATOR evaluators leave $LEARNERS learners: ask for more RANKS" >&2
  exit 2
fi
# Each run has as many learners as the others, and its own shards.
RANKS=$((shards + LEARNERS + EVALUATOR)) SHARDS=$shards
echo "$RANKS ranks = $SHARDS shards + $LEARNERS learners + $EVALUATOR evaluators; the run's directory is $RUN"

# Module files and activate scripts read variables that need not be set.
set +u
# shellcheck disable=SC2086  # several modules are several words
if [[ -n $MODULES ]]; then module load $MODULES; fi
# shellcheck source=/dev/null
if [[ -n $VENV ]]; then source "$VENV/bin/activate"; fi
set -u

# Without this each rank starts a thread for every core that it may use, and the ranks of a node fight for them.
export OMP_NUM_THREADS=$THREADS

# What compare --sweep reads: which runs there are to be, and what the ranks of this one say.
mkdir -p "$SWEEP"
if [[ ! -e $SWEEP/sweep.toml ]]; then cp "$CONFIG" "$SWEEP/sweep.toml"; fi
echo "what the ranks say goes to $RUN.out"

train=(train "$CONFIG" --element "$ELEMENT" --out "$RUN")
if ((SHARDS)); then train+=(--shards "$SHARDS"); fi
if ((EVALUATOR)); then train+=(--evaluator); fi

launch=(flux run --nodes="$NODES" --ntasks="$RANKS" --cores-per-task="$THREADS")
case $MPI in
  openmpi) launch+=(-o pmi=pmix) ;;  # Open MPI 5 speaks PMIx alone, which is Flux's plugin flux-pmix
  mpich) ;;
  *)
    echo "error: MPI = '$MPI': expected openmpi or mpich" >&2
    exit 2
    ;;
esac

# shellcheck disable=SC2329
spoken() { exec "$@" >>"$RUN.out" 2>&1; }
launch=(spoken "${launch[@]}")

# Two minutes before the time limit, or a little earlier, the batch system warns this script, which passes it on to the ranks:
# they write a checkpoint and leave with status 85; when the time is over it is too late. They run in the background, since bash
# hears of signals in `wait` only. A launcher that has not ended after LEAVE_S seconds is killed: Open MPI's was seen to stay when its
# ranks had saved and left, until the time limit ended all, and nothing went on.
launcher='' impatient='' heard=0
LEAVE_S=${LEAVE_S:-60}
# shellcheck disable=SC2329  # called by trap
warn() {
  heard=1
  echo "warned: the time is nearly over" >&2
  if [[ -z $launcher ]]; then return; fi
  # flux run does not pass it on.
  flux job kill --signal=USR1 "$(flux job last)" 2>/dev/null || true
  if [[ -n $impatient ]]; then return; fi
  {
    sleep "$LEAVE_S" >/dev/null 2>&1
    echo "the launcher has not ended $LEAVE_S s after the warning: it is killed" >&2
    kill -KILL "$launcher"
  } &
  impatient=$!
}
trap warn USR1
# This script warns itself, as long before the limit. (It writes nothing, and goes with the script.)
left=$(flux job timeleft) || left=3600
{
  sleep $((left > 120 ? left - 120 : 0)) &
  trap 'kill "$!"' EXIT TERM
  wait $! && kill -USR1 $$
} >/dev/null 2>&1 &
timer=$!
trap 'kill "$timer" 2>/dev/null || true' EXIT
status=0
"${launch[@]}" mpisgd "${train[@]}" &
launcher=$!
while
  heard=0 status=0
  wait "$launcher" || status=$?
  ((heard))  # it was a signal that ended the waiting
do :; done
if [[ -n $impatient ]]; then kill "$impatient" 2>/dev/null || true; fi

# Believe DONE, which mpisgd writes last, when clock, books and log agree. The launcher's status proves nothing: mpirun may
# say 0 when a node is lost, and not 0 when all was well and something died on its way out.
if [[ -f $RUN/DONE ]]; then
  if ((status != 0)); then echo "note: the launcher's exit status was $status, but the run is complete" >&2; fi
  echo "done; look at it with: mpisgd report $RUN"
  exit 0
fi
if ((status == 85)); then
  echo "interrupted, with a checkpoint in $RUN: it can go on by train --resume $RUN" >&2
else
  echo "error: there is no $RUN/DONE: the run did not end well (the launcher's exit status was $status)" >&2
  if compgen -G "$RUN/checkpoint/*" >/dev/null; then
    echo "it can go on from a checkpoint, by train --resume $RUN; how far back that is says: mpisgd report $RUN" >&2
  fi
fi
exit $((status == 0 ? 1 : status))
