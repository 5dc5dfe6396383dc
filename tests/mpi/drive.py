"""Run under mpirun: many small training runs, one after the other, in one job (starting ranks is what takes long).

`python drive.py jobs.json`, a list of {"ranks": n, "config": {...}, "record": path or null, "env": {...}}. A job that needs fewer
ranks than there are runs on the first ones. `record`: learner 0 saves the weights of each of its mini-batches, (mini-batches,
parameters). `env`: environment variables during that job; the `way` of a configuration (`tests/travel.py`) is one.
"gpu": "staged" or "direct": there is a GPU, a pretended one (`tests/pretend_gpu.py`), whose memory MPI is not given, or is; then
learners, on the CPU all the same, give MPI what is torch's, too. "none": there is none, but shards use the same kernels. Where
"device" says "cuda", learners are on the CPU as well, and see the GPU's memory as that of a peer's: for them it is never late.
"several": as "staged", but each rank has a GPU of its own, and sees no other.
"apart": path: each rank takes itself to be on a node of its own, and what it says goes into path-RANK.
{"ranks": n, "resume": directory} goes on with a run, with "shards", "group_size", "pipeline" or "stages" in place of its own.
`drive.py jobs.json together` runs all at once, each on ranks of its own; the process of each rank is in `jobs.json.pids`. The
learners of a job with "held": n compute no more than n mini-batches, and wait to be killed, or for the file "until".
`drive.py jobs.json interrupted` runs at once jobs that signals interrupt, as often as each has directories in "kept", to which the
run is then copied before it goes on; and, in the end, once more into "whole".
"""

from __future__ import annotations

import dataclasses
import json
import os
import shutil
import socket
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, redirect_stderr
from pathlib import Path
from typing import Any, cast
from unittest import mock

from mpisgd.base.without_gc import importing

with importing():
    import mpisgd.job.run

import numpy as np
import torch
from torch import Tensor, nn

from mpisgd import models
from mpisgd.base.errors import EXIT_INTERRUPTED, RunInterrupted
from mpisgd.comm.mpi.library import MPI
from mpisgd.config import Config, config_file, replace
from mpisgd.config.config_file import from_mapping
from mpisgd.exchange.roles import of_job
from mpisgd.gradient import stages
from mpisgd.job.run.start import Start
from mpisgd.liveness.guard import SIZE_VARIABLES, failing_fast
from mpisgd.update import optimizer
from mpisgd.update.slice_update import SliceUpdate
from mpisgd.vectors.memory import Memory

sys.path.append(str(Path(__file__).parents[2]))  # the root, where `tests` is, whatever jobs run before

from tests import travel
from tests.once import once
from tests.pretend_gpu import pretend_gpu


def recording(config: Config, seen: list[np.ndarray]) -> tuple[Callable[..., nn.Module], Callable[[Tensor, Tensor], Tensor]]:
    """A model factory and a loss that notes the weights whenever a gradient is about to be computed."""
    modules: list[nn.Module] = []

    def factory(input_shape: tuple[int, ...], classes: int) -> nn.Module:
        modules.append(models.make(config.model, input_shape=input_shape, classes=classes, seed=config.seed))
        return modules[-1]

    def loss(output: Tensor, target: Tensor) -> Tensor:
        if torch.is_grad_enabled():
            seen.append(torch.cat([p.detach().reshape(-1) for p in modules[-1].parameters()]).numpy().copy())
        return torch.nn.functional.cross_entropy(output, target)

    return factory, loss


def wait_politely(comm: MPI.Intracomm) -> None:
    """A barrier that leaves the cores to those who still work; MPICH's own would keep them busy."""
    meeting = comm.Ibarrier()
    while not meeting.Test():
        time.sleep(0.01)


def say_size(ranks: int) -> None:
    """Let what looks how many ranks were launched find so many."""
    for name in (*SIZE_VARIABLES, "OMPI_COMM_WORLD_LOCAL_SIZE"):
        if name in os.environ:
            os.environ[name] = str(ranks)


@contextmanager
def under(variables: Mapping[str, str]) -> Iterator[None]:
    """Environment variables for a while."""
    before = dict(os.environ)
    os.environ.update(variables)
    try:
        yield
    finally:
        for name in variables:
            del os.environ[name]
        os.environ.update(before)


def held(most: int, until: str | None = None) -> Callable[[Tensor, Tensor], Tensor]:
    """A loss in which a learner stays after so many mini-batches, for ever or until there is such a file: what is to be killed, or
    is sent a signal, before its end does not come to it.

    It takes the place of torch's, so that the run's configuration names a loss that it can go on with.
    """
    computed, cross_entropy = 0, torch.nn.functional.cross_entropy

    def loss(output: Tensor, target: Tensor) -> Tensor:
        nonlocal computed
        computed += torch.is_grad_enabled()
        while computed > most and not (until and Path(until).exists()):
            time.sleep(0.1)
        return cross_entropy(output, target)

    return loss


def listed() -> list[dict[str, Any]]:
    """The jobs, each with `config` and `env`."""
    jobs: list[dict[str, Any]] = json.loads(Path(sys.argv[1]).read_text())
    for job in jobs:
        job["config"], variables = travel.launched(job.get("config", {}))
        job["env"] = job.get("env", {}) | variables
    return jobs


def resume(job: dict[str, Any], comm: MPI.Intracomm) -> None:
    config = config_file.of_run(Path(job["resume"]))
    other: dict[str, Any] = {name: job[name] for name in ("shards", "group_size", "pipeline") if name in job}
    if "stages" in job:
        other["stages"] = dataclasses.replace(config.stages, at=tuple(job["stages"]["at"]))
    mpisgd.train(config=replace(config, **other), comm=comm, resume=job["resume"])


def together(jobs: list[dict[str, Any]]) -> None:
    """Each job has its own ranks, in their order."""
    world = MPI.COMM_WORLD
    mine = [number for number, job in enumerate(jobs) for _ in range(job["ranks"])][world.rank]
    comm = cast(MPI.Intracomm, world.Split(mine, world.rank))
    job = jobs[mine]
    os.environ.update(job["env"])
    tell_pids(mine, len(jobs))
    if "held" in job:
        torch.nn.functional.cross_entropy = held(job["held"], job.get("until"))  # type: ignore[assignment]
    with failing_fast(world, lambda: job.get("resume") or job["config"]["out"]):
        if "resume" in job:
            resume(job, comm)
        else:
            mpisgd.train(config=from_mapping(job["config"]), comm=comm)
        wait_politely(world)


def tell_pids(mine: int, jobs: int) -> None:
    """Write down the processes of each job, in the order of its ranks."""
    pids = MPI.COMM_WORLD.gather((mine, os.getpid()))
    if pids is not None:
        aside = Path(sys.argv[1] + ".aside")
        aside.write_text(json.dumps([[pid for number, pid in pids if number == each] for each in range(jobs)]))
        aside.rename(sys.argv[1] + ".pids")


def interrupted(jobs: list[dict[str, Any]]) -> None:
    """Each job has its own ranks, and goes on by itself after each signal, for which its learners wait."""
    world = MPI.COMM_WORLD
    mine = [number for number, job in enumerate(jobs) for _ in range(job["ranks"])][world.rank]
    comm, job = cast(MPI.Intracomm, world.Split(mine, world.rank)), jobs[mine]
    config, out = job["config"], job["config"]["out"]
    os.environ.update(job["env"])
    tell_pids(mine, len(jobs))
    with failing_fast(world, lambda: out):
        for attempt, kept in enumerate(job["kept"]):
            try:
                with mock.patch.object(torch.nn.functional, "cross_entropy", held(job["most"], job["sent"][attempt])):
                    if attempt:
                        mpisgd.train(comm=comm, resume=out)
                    else:
                        mpisgd.train(config=from_mapping(config), comm=comm)
            except RunInterrupted as end:
                assert end.code == (0 if comm.Get_rank() else EXIT_INTERRUPTED)
                if comm.rank == 0:
                    shutil.copytree(out, kept)
                    Path(kept, "kept").touch()
                time.sleep(0.5)  # the same signal may come to this rank late: here it is no other one
                wait_politely(comm)
            else:
                raise AssertionError(f"{out} came to its end without a signal")
        mpisgd.train(comm=comm, resume=out)
        if job["whole"]:
            mpisgd.train(config=from_mapping(config | {"out": job["whole"]}), comm=comm)
        wait_politely(world)


def of_torch(
    config: Config, model: Any, shared: Memory | None = None, *, direct: bool = False, place: Callable[..., Memory] = stages.place
) -> Memory:
    """Give MPI tensors where a GPU's would be given; a model of another device computes apart from memory in common."""
    direct = direct and shared is None and stages.pushes_from_gpu(config)
    if config.device == "cuda" and not direct:
        apart: Memory = shared or model.memory.pinned()
        return apart
    memory = place(config, model, shared)
    if direct:
        model.memory = memory = Memory(*memory.tensors)
    return memory


def computes_on_cpu(start: Start, field: str, *, used: bool, choose: Callable[..., str] = Start._device) -> str:
    device = choose(start, field, used=used)
    return device if field == "shard_device" else "cpu"


@contextmanager
def gpu(how: str | None, *, late: bool) -> Iterator[None]:
    """As a job's "gpu" says."""
    if how is None:
        yield
        return
    with ExitStack() as stack:
        stack.enter_context(mock.patch.object(optimizer, "CACHED_NBYTES", 0))
        stack.enter_context(mock.patch.dict(SliceUpdate.__init__.__kwdefaults__, fused=True))  # a GPU's kernels
        if how != "none":
            stack.enter_context(under({"MPISGD_GPU_MEMORY": "direct" if how == "direct" else "staged"}))
            stack.enter_context(pretend_gpu(late, f"GPU-{MPI.COMM_WORLD.rank if how == 'several' else 0}"))
            stack.enter_context(mock.patch.object(Start, "_device", computes_on_cpu))
            stack.enter_context(mock.patch.object(stages, "place", of_torch))
        yield


@contextmanager
def apart(path: str | None, rank: int) -> Iterator[None]:
    """As a job's "apart" says."""
    if path is None:
        yield
        return
    node = mock.patch.object(socket, "gethostname", lambda: f"node{rank}")
    with node, Path(f"{path}-{rank}").open("w") as said, redirect_stderr(said):
        yield


def learners_of(config: dict[str, Any], ranks: int) -> tuple[int, ...]:
    return tuple(of_job(from_mapping(config), [""] * ranks).learner_ranks)


def one(job: dict[str, Any], comm: MPI.Intracomm) -> None:
    if "resume" in job:
        resume(job, comm)
        return
    config = from_mapping(job["config"])
    seen: list[np.ndarray] = []
    model, loss = recording(config, seen) if job.get("record") else (None, None)
    mpisgd.train(model=model, loss=loss, config=config, comm=comm)
    if job.get("record") and comm.rank == learners_of(job["config"], comm.size)[0]:
        np.save(job["record"], np.array(seen))


def main() -> None:
    world = MPI.COMM_WORLD
    if sys.argv[2:]:
        {"together": together, "interrupted": interrupted}[sys.argv[2]](listed())
        return
    doing = [""]
    with failing_fast(world, lambda: doing[0]), once():
        for job in listed():
            doing[0] = job.get("resume") or job["config"]["out"]
            comm = cast(MPI.Intracomm, world.Split(0 if world.rank < job["ranks"] else MPI.UNDEFINED, world.rank))
            if comm != MPI.COMM_NULL:
                say_size(comm.size)
                peer = job["config"].get("device") == "cuda" and comm.rank in learners_of(job["config"], comm.size)
                with under(job["env"]), gpu(job.get("gpu"), late=not peer), apart(job.get("apart"), comm.rank):
                    one(job, comm)
                comm.Free()
            wait_politely(world)


if __name__ == "__main__":
    main()
