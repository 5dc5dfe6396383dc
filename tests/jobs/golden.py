"""The scripts in jobs/ are what `mpisgd submit` prints, its golden files; `python -m tests.jobs.golden` renews them."""

from __future__ import annotations

import contextlib
import io
import shlex
from pathlib import Path

from mpisgd.cli import submit

JOBS = Path(__file__).parents[2] / "jobs"

_CPU = "--nodes 2 --learners 16 --evaluator --venv .venv"
_GPU = "--nodes 2 --gpus-per-node 4 --shards 2 --venv .venv"
#: Script -> what `mpisgd submit jobs/job.toml` is told besides.
COMMANDS = {
    "slurm-cpu.sbatch": f"--system slurm {_CPU}",
    "slurm-gpu.sbatch": f"--system slurm {_GPU} --threads 4",
    "slurm-chain.sbatch": f"--system slurm {_CPU} --chain",
    "slurm-array.sbatch": f"--system slurm {_CPU} --array hardsync 'softsync --protocol.n 4' 'backup --protocol.b 2' allreduce",
    "lsf-cpu.bsub": f"--system lsf {_CPU}",
    "lsf-gpu.bsub": f"--system lsf {_GPU}",
    "lsf-chain.bsub": f"--system lsf {_CPU} --chain",
    "lsf-array.bsub": f"--system lsf {_CPU} --array hardsync 'softsync --protocol.n 4' 'backup --protocol.b 2' allreduce",
    "pbs-cpu.pbs": f"--system pbs {_CPU}",
    "pbs-gpu.pbs": f"--system pbs {_GPU}",
    "pbs-chain.pbs": f"--system pbs {_CPU} --chain",
    "pbs-array.pbs": f"--system pbs {_CPU} --array hardsync 'softsync --protocol.n 4' 'backup --protocol.b 2' allreduce",
    "flux-cpu.flux": f"--system flux {_CPU}",
    "flux-array.flux": f"--system flux {_CPU} --array hardsync 'softsync --protocol.n 4' 'backup --protocol.b 2' allreduce",
    "flux-gpu.flux": f"--system flux {_GPU}",
    "lsf-jsrun.bsub": "--system jsrun --nodes 2 --gpus-per-node 6 --shards 2 --modules spectrum-mpi --venv .venv",
}


def rendered(script: str) -> str:
    """What the command prints, from the checkout's root."""
    out = io.StringIO()
    with contextlib.chdir(JOBS.parent), contextlib.redirect_stdout(out):
        assert submit.main(["jobs/job.toml", *shlex.split(COMMANDS[script]), "--dry-run"]) == 0
    return out.getvalue()


if __name__ == "__main__":
    for name in COMMANDS:
        (JOBS / name).write_text(rendered(name))
        (JOBS / name).chmod(0o755)
