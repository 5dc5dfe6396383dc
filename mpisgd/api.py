"""Training from Python, under mpirun (DESIGN 7)."""

from __future__ import annotations

import os
from argparse import Namespace
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mpisgd.base.imports import refuse_in_import
from mpisgd.config import Config, config_file, replace
from mpisgd.config import trust as consent
from mpisgd.liveness import leaving

if TYPE_CHECKING:
    from torch import Tensor, nn

    from mpisgd.comm.mpi.library import MPI
    from mpisgd.job.finish import Outcome
    from mpisgd.records.callbacks import End, Evaluation, Update


def train(  # noqa: PLR0913 - a user's objects, by name
    model: Callable[..., nn.Module] | None = None,
    loss: Callable[[Tensor, Tensor], Tensor] | None = None,
    data: Any = None,
    config: str | Path | Mapping[str, Any] | Namespace | Config | None = None,
    comm: MPI.Intracomm | None = None,
    resume: str | Path | None = None,
    trust: bool = False,
    step: Callable[[nn.Module, Any], Any] | None = None,
    on_update: Callable[[Update], Any] | None = None,
    on_evaluation: Callable[[Evaluation], Any] | None = None,
    on_end: Callable[[End], Any] | None = None,
) -> Outcome:
    """Train; every rank of the job calls this with the same arguments. By default model, loss and data are the configuration's.

    Args:
        model: factory of a `torch.nn.Module`, called with `input_shape` and `classes` where its signature has them.
        loss: callable of (output, target) -> scalar tensor.
        step: instead of a loss: callable of (model, batch) -> scalar tensor, or mapping of `loss` and metrics, each a mean over
            the batch, a nest of tensors on the model's device. Evaluations use `eval` mode, and average metrics over samples;
            `error` is shown as a share of wrong classes.
        data: pair (train, test), or its factory; each a pair of tensors (inputs, targets) or a map-style data set. For a step,
            samples may be any nest of tensors, batched by torch's `default_collate`. A `DataLoader` in place of a data set lends
            its collate function and workers; an `IterableDataset` is for `sampling = "stream"`. A factory is called with
            `data_dir` and `seed` where its signature has them.
        config: TOML file, nested mapping of the same shape, `argparse.Namespace` of its fields, or `Config`; code named there is
            imported.
        resume: directory of an interrupted run, to go on from its newest checkpoint (`mpisgd.job.resume`). `config` defaults to
            the run's; only `resume.CHANGEABLE` may differ. A finished run returns its outcome. Code named by the run is imported
            only if brought here, or named in `config`.
        trust: import code named by the run all the same (`mpisgd.config.trust`).
        on_update: called with an `Update`, of all since its last call, by a thread of shard 0's rank. Training does not wait, but
            shares its core.
        on_evaluation: called with an `Evaluation` for each row of `evaluations`, by the evaluator, or without one by learner 0
            after training. It delays the next evaluation.
        on_end: called with an `End` by rank 0, once the run is DONE, unless DONE before. The configuration's `callbacks` may
            name a class with these three instead.
        comm: mpi4py communicator; default: all ranks.

    Returns:
        The outcome, the same on every rank.

    Raises:
        AgreedError (an MpisgdError): on every rank, where the job cannot start.
        RunInterrupted (a SystemExit; code 85 on the first rank, 0 on others): on every rank, after a signal; `resume` goes on.

    Uncaught, these are reported by the first rank for all. A callback that raises ends the job, with its name, as does any later
    failure on a rank (law 9); in a process by itself it is raised.

    Draws of factories, samples, model and loss from the global generators of torch, numpy and `random` are seeded by names (law 5).
    """
    refuse_in_import("mpisgd.train()")  # a process that is no rank must not wait for ranks
    with leaving.as_one(comm):
        from mpisgd.records.callbacks import Callbacks

        callbacks = Callbacks(on_update, on_evaluation, on_end)
        objects = {"model": model, "data": data, "loss": loss, "step": step}
        path = None if resume is None else Path(resume)
        of_the_run = config is None and not trust
        if config is None and path is not None:
            config = config_file.of_run(path)
        elif config is None:
            config = Config()
        elif isinstance(config, str | os.PathLike):
            config = consent.read(os.fspath(config), trust)
        else:
            config = config_file.from_objects(config)
        if path is not None:
            from mpisgd.job.finish import finished
            from mpisgd.job.resume import as_many_shards_as_ranks, check_changes
            from mpisgd.job.user_code import PARTS

            config = config_file.cut_anew(replace(config, out=str(path), overwrite=False), config_file.of_run(path))
            taken = {name: getattr(config_file.of_run(path), name) for name in PARTS if objects[name] is not None}
            check_changes(path, replace(config, **taken))  # but for objects brought anew: a checkpoint knows its model
            outcome = finished(path)
            if outcome is not None:
                return outcome
            if of_the_run:
                names = consent.names_of(config, training=True)
                user_objects = {field: spec for field, spec in names.items() if objects.get(field.partition(".")[0]) is not None}
                consent.check(path, config, user_objects, consent.resume_line(path, config), training=True)
            config = as_many_shards_as_ranks(path, config)
        from mpisgd.comm.mpi.library import MPI
        from mpisgd.liveness.failure_watch import FailureWatch
        from mpisgd.liveness.watch import Watch

        ranks = MPI.COMM_WORLD if comm is None else comm
        with Watch() as watch:  # torch may take minutes to import
            watch.begin(FailureWatch(ranks, lambda: "starting", str))
            from mpisgd.job.parts import UserObjects
            from mpisgd.job.run import run

        return run(config, ranks, UserObjects(model, loss, data, step, callbacks), resumed=path is not None)
