"""What stands in each script, what its batch system sets by its documentation, and what must come of it."""

from __future__ import annotations

from tests.jobs.golden import COMMANDS

SCRIPTS = sorted(COMMANDS)

_SLURM = ["--job-name=mpisgd", "--nodes=2", "--ntasks=18", "--ntasks-per-node=9", "--cpus-per-task=1", "--time=01:00:00"]
_WARNING = "--signal=B:USR1@120"
_LSF = ["-n 18", '-R "span[ptile=9]"', "-W 01:00"]
_LSF_WARNING = ["-wa USR1", "-wt 2"]
_PBS = [
    "-N mpisgd",
    "-l select=2:ncpus=9:mpiprocs=9:ompthreads=1",
    "-l place=scatter",
    "-l walltime=01:00:00",
    "-j oe",
    "-r n",
]
_FLUX = ["--job-name=mpisgd", "--nodes=2", "--nslots=2"]
_FLUX_END = ["--time-limit=60m", "--output=mpisgd-{{id}}.out"]
#: Script -> what the batch system must read in it.
DIRECTIVES = {
    "slurm-cpu.sbatch": [*_SLURM, "--output=%x-%j.out", _WARNING, "--no-requeue"],
    "slurm-chain.sbatch": [*_SLURM, "--output=%x-%j.out", _WARNING, "--requeue", "--open-mode=append"],
    "slurm-array.sbatch": [*_SLURM, "--array=1-4", "--output=%x-%A-%a.out", _WARNING, "--no-requeue"],
    "slurm-gpu.sbatch": [
        "--job-name=mpisgd",
        "--nodes=2",
        "--ntasks=10",
        "--ntasks-per-node=5",
        "--gpus-per-node=4",
        "--cpus-per-task=4",
        "--time=01:00:00",
        "--output=%x-%j.out",
        _WARNING,
        "--no-requeue",
    ],
    "lsf-cpu.bsub": ["-J mpisgd", *_LSF, "-o mpisgd-%J.out", *_LSF_WARNING, "-rn"],
    "lsf-chain.bsub": ["-J mpisgd", *_LSF, "-o mpisgd-%J.out", *_LSF_WARNING, '-Q "85"', "-r"],
    "lsf-array.bsub": ['-J "mpisgd[1-4]"', *_LSF, "-o mpisgd-%J-%I.out", *_LSF_WARNING, "-rn"],
    "lsf-gpu.bsub": [
        "-J mpisgd",
        "-n 10",
        '-R "span[ptile=5]"',
        '-gpu "num=4:mode=shared:j_exclusive=yes"',
        "-W 01:00",
        "-o mpisgd-%J.out",
        *_LSF_WARNING,
        "-rn",
    ],
    "pbs-cpu.pbs": _PBS,
    "pbs-chain.pbs": _PBS,
    "pbs-array.pbs": [*_PBS[:-1], "-J 1-4", _PBS[-1]],
    "pbs-gpu.pbs": [_PBS[0], "-l select=2:ncpus=5:mpiprocs=5:ompthreads=1:ngpus=4", *_PBS[2:]],
    "flux-cpu.flux": [*_FLUX, "--cores-per-slot=9", *_FLUX_END],
    "flux-array.flux": [*_FLUX, "--cores-per-slot=9", *_FLUX_END],
    "flux-gpu.flux": [*_FLUX, "--cores-per-slot=5", "--gpus-per-slot=4", *_FLUX_END],
    "lsf-jsrun.bsub": ["-J mpisgd", "-nnodes 2", "-alloc_flags smt1", "-W 01:00", "-o mpisgd-%J.out", *_LSF_WARNING, "-rn"],
}

_SLURM_CPU = {
    "SLURM_JOB_ID": "4711",
    "SLURM_JOB_NAME": "mpisgd",
    "SLURM_JOB_NUM_NODES": "2",
    "SLURM_NTASKS": "18",
    "SLURM_NTASKS_PER_NODE": "9",
    "SLURM_CPUS_PER_TASK": "1",
}
_LSF_CPU = {
    "LSB_JOBID": "4711",
    "LSB_JOBNAME": "mpisgd",
    "LSB_JOBINDEX": "0",
    "LSB_DJOB_NUMPROC": "18",
    "LSB_MCPU_HOSTS": "hostA 9 hostB 9 ",
}
_PBS_CPU = {
    "PBS_JOBID": "4711.server",
    "PBS_JOBNAME": "mpisgd",
    "PBS_O_WORKDIR": "CHECKOUT",
    "PBS_NODEFILE": "hostA 9 hostB 9",
    "NCPUS": "1",
    "OMP_NUM_THREADS": "1",
}
#: Script -> what the batch system sets, by its documentation. CHECKOUT is where the job was submitted; of PBS_NODEFILE it says what
#: lies there, as LSB_MCPU_HOSTS does. A Flux script asks `flux`.
ENVIRONMENTS = {
    "slurm-cpu.sbatch": _SLURM_CPU,
    "slurm-chain.sbatch": _SLURM_CPU,
    # SLURM gives the elements of an array numbers of their own, too.
    "slurm-array.sbatch": _SLURM_CPU | {"SLURM_JOB_ID": "4713", "SLURM_ARRAY_JOB_ID": "4711", "SLURM_ARRAY_TASK_ID": "2"},
    "slurm-gpu.sbatch": {
        "SLURM_JOB_ID": "4711",
        "SLURM_JOB_NAME": "mpisgd",
        "SLURM_JOB_NUM_NODES": "2",
        "SLURM_NTASKS": "10",
        "SLURM_NTASKS_PER_NODE": "5",
        "SLURM_CPUS_PER_TASK": "4",
        "SLURM_GPUS_PER_NODE": "4",
        "SLURM_GPUS_ON_NODE": "4",
    },
    "lsf-cpu.bsub": _LSF_CPU,
    "lsf-chain.bsub": _LSF_CPU,
    "lsf-array.bsub": _LSF_CPU | {"LSB_JOBNAME": "mpisgd[2]", "LSB_JOBINDEX": "2"},
    "lsf-gpu.bsub": {
        "LSB_JOBID": "4711",
        "LSB_JOBNAME": "mpisgd",
        "LSB_DJOB_NUMPROC": "10",
        "LSB_MCPU_HOSTS": "hostA 5 hostB 5 ",
        "CUDA_VISIBLE_DEVICES": "0,1,2,3",
    },
    "pbs-cpu.pbs": _PBS_CPU,
    "pbs-chain.pbs": _PBS_CPU,
    "pbs-array.pbs": _PBS_CPU | {"PBS_JOBID": "4711[2].server", "PBS_ARRAY_INDEX": "2", "PBS_ARRAY_ID": "4711[].server"},
    "pbs-gpu.pbs": _PBS_CPU | {"PBS_NODEFILE": "hostA 5 hostB 5", "CUDA_VISIBLE_DEVICES": "0,1,2,3"},
    "flux-cpu.flux": {"FLUX_URI": "local:///tmp/flux/local-0"},
    # Flux has no arrays: `submit` tells each job which element it is, and the number of the first.
    "flux-array.flux": {"FLUX_URI": "local:///tmp/flux/local-0", "ARRAY_INDEX": "2", "ARRAY_JOB": "f3XyY"},
    "flux-gpu.flux": {"FLUX_URI": "local:///tmp/flux/local-0"},
    "lsf-jsrun.bsub": {
        "LSB_JOBID": "4711",
        "LSB_JOBNAME": "mpisgd",
        "LSB_DJOB_NUMPROC": "85",
        "LSB_MCPU_HOSTS": "batch5 1 a01n01 42 a01n02 42 ",
    },
}

#: The element of each array that ENVIRONMENTS say.
ELEMENT = "softsync --protocol.n 4"
RUN = {}
for _script in SCRIPTS:
    _of_array = "array" in _script
    _number = "4711" if "flux" not in _script else "f3XyY" if _of_array else "f3XyZ"
    RUN[_script] = f"results/mpisgd-{_number}{'-2-softsync' * _of_array}"

BLAUNCH = "--hostfile HOSTFILE --prtemca plm_ssh_agent blaunch --bind-to none -x OMP_NUM_THREADS"
TMRSH = "--hostfile HOSTFILE --prtemca plm_ssh_agent pbs_tmrsh --bind-to none -x OMP_NUM_THREADS"
_FLUX_GPUS = "flux run --nodes=2 --tasks-per-node=5 --gpus-per-node=4 --cores=10 -o gpu-affinity=off"
_FLUX_CORES = "flux run --nodes=2 --ntasks=18 --cores-per-task=1"
#: (script, MPI) -> what the script must start ranks with.
LAUNCHES = {
    ("slurm-gpu.sbatch", "openmpi"): "mpirun -n 10 --bind-to none -x OMP_NUM_THREADS",
    ("slurm-gpu.sbatch", "mpich"): "srun --mpi=pmi2 --kill-on-bad-exit=1 --ntasks=10 --cpus-per-task=4",
    ("lsf-gpu.bsub", "openmpi"): "mpirun -n 10 " + BLAUNCH,
    ("lsf-gpu.bsub", "mpich"): "mpiexec -rmk lsf -launcher lsf -n 10",
    ("pbs-gpu.pbs", "openmpi"): "mpirun -n 10 " + TMRSH,
    ("pbs-gpu.pbs", "mpich"): "mpiexec -rmk pbs -launcher rsh -launcher-exec pbs_tmrsh -n 10",
    ("flux-gpu.flux", "openmpi"): f"{_FLUX_GPUS} -o pmi=pmix",
    ("flux-gpu.flux", "mpich"): _FLUX_GPUS,
    ("lsf-jsrun.bsub", ""): (
        "jsrun --nrs 2 --rs_per_host 1 --tasks_per_rs 7 --cpu_per_rs 42 --gpu_per_rs 6 --launch_distribution packed"
        " --bind packed:6 --smpiargs=-gpu --exit_on_error 1 --env OMP_NUM_THREADS=6"
    ),
}
for _kind in ("cpu", "array"):
    LAUNCHES |= {(f"flux-{_kind}.flux", "openmpi"): f"{_FLUX_CORES} -o pmi=pmix", (f"flux-{_kind}.flux", "mpich"): _FLUX_CORES}
for _kind in ("cpu", "chain", "array"):
    LAUNCHES |= {
        (f"slurm-{_kind}.sbatch", "openmpi"): "mpirun -n 18 --bind-to none -x OMP_NUM_THREADS",
        (f"slurm-{_kind}.sbatch", "mpich"): "srun --mpi=pmi2 --kill-on-bad-exit=1 --ntasks=18 --cpus-per-task=1",
        (f"lsf-{_kind}.bsub", "openmpi"): "mpirun -n 18 " + BLAUNCH,
        (f"lsf-{_kind}.bsub", "mpich"): "mpiexec -rmk lsf -launcher lsf -n 18",
        (f"pbs-{_kind}.pbs", "openmpi"): "mpirun -n 18 " + TMRSH,
        (f"pbs-{_kind}.pbs", "mpich"): "mpiexec -rmk pbs -launcher rsh -launcher-exec pbs_tmrsh -n 18",
    }
#: script -> what every rank must run.
TRAINS = {}
for _script in SCRIPTS:
    _more = f" --protocol {ELEMENT}" if "array" in _script else ""
    _gpus = "gpu" in _script or "jsrun" in _script
    _roles = "--shards 2 --device cuda --placement spread" if _gpus else "--shards 1 --evaluator"
    TRAINS[_script] = f"mpisgd train jobs/job.toml --out {RUN[_script]} {_roles}{_more}"
THREADS = {"slurm-gpu.sbatch": "4", "lsf-jsrun.bsub": "6"}  # the others: 1
