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


def train(  # noqa: PLR0913 - what a user brings, each by its name
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
    """Train; every rank of the job calls this with the same arguments.

    Args:
        model: factory of a `torch.nn.Module`; called with `input_shape` and `classes` where its signature has them. Default:
            the configuration's model.
        loss: callable of (output, target) -> scalar tensor. Default: the configuration's loss.
        step: instead of a loss: a callable of (model, batch) -> scalar tensor, or a mapping of `loss` and of metrics, each a mean
            over the batch. A batch is any nest of tensors, on the model's device. In evaluations the model is in `eval` mode, and
            metrics are averaged over the samples. One called `error` is shown as the share of wrong classes is.
        data: a factory of, or itself, a pair (train, test), each a pair of tensors (inputs, targets) or a map-style data set;
            for a step, samples of a data set may be any nest of tensors, which torch's `default_collate` makes batches of;
            a `DataLoader` in place of a data set lends its collate function and workers;
            an `IterableDataset` is one for `sampling = "stream"`;
            a factory is called with `data_dir` and `seed` where its signature has them. Default: the configuration's data.
        config: a TOML file, a nested mapping of the same shape, an `argparse.Namespace` of its fields, or a `Config`; the code that
            it names is imported.
        resume: the directory of a run that was interrupted: it goes on from its newest checkpoint (`mpisgd.job.resume`). `config`
            is then that of the run, which is the default; only `resume.CHANGEABLE` may differ. Where the run had finished, how it
            ended is returned. The code that the run names is imported only where it is brought here, or named in `config`.
        trust: import what the run names all the same (`mpisgd.config.trust`).
        on_update: called with an `Update` by a thread of shard 0's rank, rank 0 as a rule: what has been done since its last call.
            Training waits for no call; but the thread takes turns with the shard, so that its seconds are not quite free.
        on_evaluation: called with an `Evaluation`, for each row of `evaluations`, by the evaluator, or without one by learner 0
            after training. It delays the next evaluation.
        on_end: called with an `End` by rank 0, once the run is DONE; not where it was interrupted, or had been done before. The
            configuration's `callbacks` may name a class with these three, instead.
        comm: an mpi4py communicator; default: all ranks.

    Returns:
        The outcome, the same on every rank.

    Raises:
        AgreedError (an MpisgdError): on every rank alike, where the job cannot start.
        RunInterrupted (a SystemExit; code 85 on the first rank, 0 on others): on every rank alike, where a signal has interrupted
            the run, which `resume` continues.
    Where nobody catches what all raise, the first rank says it, and the status, for all.
    A callback that raises ends the job, with its name. Any later failure on one rank ends the whole job, loudly (law 9); in a
    process by itself it is raised.

    What factories, samples, model and loss draw from the global generators of torch, numpy and `random` is seeded by names (law 5).
    """
    refuse_in_import("mpisgd.train()")  # by itself: a process that is no rank must not wait for ranks
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
            from mpisgd.job.naming import PARTS
            from mpisgd.job.resume import as_many_shards_as_ranks, check_changes, finished

            config = config_file.cut_anew(replace(config, out=str(path), overwrite=False), config_file.of_run(path))
            taken = {name: getattr(config_file.of_run(path), name) for name in PARTS if objects[name] is not None}
            check_changes(path, replace(config, **taken))  # but for what is brought anew: a checkpoint knows its model
            outcome = finished(path)
            if outcome is not None:
                return outcome
            if of_the_run:
                names = consent.names_of(config, training=True)
                brought = {field: spec for field, spec in names.items() if objects.get(field.partition(".")[0]) is not None}
                consent.check(path, config, brought, consent.resume_line(path, config), training=True)
            config = as_many_shards_as_ranks(path, config)
        from mpisgd.comm.mpi.library import MPI
        from mpisgd.liveness.vigil import Vigil

        ranks = MPI.COMM_WORLD if comm is None else comm
        with Vigil(ranks, lambda: "starting", str):  # torch may take minutes to import
            from mpisgd.job.parts import Brought
            from mpisgd.job.run import run

        return run(config, ranks, Brought(model, loss, data, step, callbacks), resumed=path is not None)
