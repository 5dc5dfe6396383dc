"""`mpisgd export RUN OUT`."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import tyro

from mpisgd.base.errors import EXIT_OK, CheckpointError, ConfigError

if TYPE_CHECKING:
    from mpisgd.records.weights import State

_PARTS = ("model", "data", "loss", "step")


@dataclass(frozen=True)
class Options:
    """Write a run's weights to a file: a state dict, by the model's own names, for `--init-from` and torch.

    Without `--clock`: an ended run's last weights. With `--clock`: a checkpoint's, also of a run under way. For names the model is
    then made anew; buffers are learner 0's until the run has ended, else batch norm is measured. This loads data, and needs the
    run's code as in `replay`.
    """

    run: tyro.conf.Positional[Path]
    """The run's directory, e.g. results/run."""
    out: tyro.conf.Positional[Path]
    """New file to write: .pt, by torch.save, or .safetensors."""
    clock: int | None = None
    """Checkpoint of this clock, not the last weights."""
    best: bool = False
    """Best weights, by the run's --evaluation.best; of a run under way, so far."""
    averaged: bool = False
    """Averaged weights (thetabar)."""
    data_dir: str | None = None
    """Directory of data files, if not the run's."""
    model: str = ""
    """package.module:factory of the user's own model, as in `train`."""
    data: str = ""
    """package.module:factory of the user's own data."""
    loss: str = ""
    """package.module:callable, the user's own loss, or a function of torch.nn.functional."""
    step: str = ""
    """package.module:function, the user's own step."""
    trust: bool = False
    """Import and call all code that the run names, not only the options' code."""


def main(argv: list[str]) -> int:
    """Write the file. Raises ConfigError, DataError, CheckpointError: impossible; StorageError: unwritable."""
    options = tyro.cli(Options, args=argv, prog="mpisgd export")
    from mpisgd.records import weights
    from mpisgd.records.log.reader import Directory

    run = Directory(options.run)
    weights.check_new(options.out)
    if options.best and (options.averaged or options.clock is not None):
        other = "--averaged" if options.averaged else f"--clock {options.clock}"
        raise ConfigError(f"--best beside {other}: expected only one option; the best weights may be of any clock, or averaged")
    if options.best:
        state = weights.best_of_run(run)
    elif options.clock is None:
        state = weights.of_run(run, averaged=options.averaged)
    else:
        state = _of_checkpoint(options, options.clock)
    weights.write(options.out, state)
    print(f"{options.out}: {len(state):,} tensors, {sum(each.numel() for each in state.values()):,} numbers")
    return EXIT_OK


def _of_checkpoint(options: Options, clock: int) -> State:
    import torch

    from mpisgd.base.draws import as_in_the_run
    from mpisgd.config import ConstantOptions, config_file, replace, trust
    from mpisgd.gradient.measure import batch_norms
    from mpisgd.job import parts
    from mpisgd.job.parts import NO_OBJECTS
    from mpisgd.protocols import HardsyncOptions
    from mpisgd.records.checkpoint import buffers
    from mpisgd.records.checkpoint import checkpoint as disk
    from mpisgd.records.log.reader import Directory
    from mpisgd.replay.user_objects import renamed_in

    run = options.run
    there = sorted(disk.clock_of(each) for each in disk.directories(run) if (each / disk.MANIFEST).is_file())
    if clock not in there:
        listed = f"found clocks {', '.join(map(str, there))}" if there else "there are none"
        raise CheckpointError(f"{run} has no checkpoint of clock {clock}: {listed}")
    checkpoint = disk.read(disk.directory_of(run, clock))
    tensors = [checkpoint.tensors(shard) for shard in range(len(checkpoint.parts))]
    name = "averaged" if options.averaged else "weights"
    if any(name not in each for each in tensors):
        raise CheckpointError(f"{checkpoint.path} has no {name}: the run had averaging = 0")
    # A model needs neither; both may be code.
    config = replace(config_file.of_run(run), protocol=HardsyncOptions(), schedule=ConstantOptions())
    named = {part: getattr(options, part) for part in _PARTS if getattr(options, part)}
    if not options.trust:
        names = trust.names_of(config)
        trust.check(run, config, {field: spec for field, spec in names.items() if field.partition(".")[0] in named})
    config = renamed_in(config, named)
    if options.data_dir is not None:
        config = replace(config, data_dir=options.data_dir)
    with as_in_the_run(int(Directory(run).environment.get("threads", 1))):
        data = parts.load_data(config, NO_OBJECTS)
        model = parts.build_model(config, parts.meta_of(data, config), NO_OBJECTS, resumed=True)
        if model.fingerprint != checkpoint.model:
            raise CheckpointError(
                f"{checkpoint.path} is of another model: parameters of the checkpoint {checkpoint.model}, here {model.fingerprint}"
            )
        model.weights.copy_(torch.cat([torch.from_numpy(each[name]) for each in tensors]))
        learners = config.buffers_evaluated == "learner"
        kept = learners and buffers.at_checkpoint(run, clock, model.module, newest=clock == there[-1])
        if not kept and batch_norms(model.module):
            if learners:
                config = replace(config, evaluation=dataclasses.replace(config.evaluation, buffers="recalibrate"))
                print("batch-norm statistics are measured on training samples: learner 0's statistics of this clock are missing")
            parts.make_measure(config, model, parts.load_loss(config, NO_OBJECTS), data).prepare()
    return model.state()
