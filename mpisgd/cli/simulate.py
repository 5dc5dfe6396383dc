"""`mpisgd simulate [job.toml] [options]`: a run on a virtual cluster, in this one process."""

from __future__ import annotations

import sys
from pathlib import Path

from mpisgd.base.errors import EXIT_FAILED, EXIT_OK, ConfigError, MpisgdError
from mpisgd.command_line.beside import resumed
from mpisgd.command_line.options import ELEMENT, parse
from mpisgd.config import Config, config_file, replace
from mpisgd.job.placement import on_virtual_ranks
from mpisgd.launching.several import begun
from mpisgd.liveness.guard import launched_size
from mpisgd.sweep import elements
from mpisgd.sweep.elements import Element
from mpisgd.sweep.outcomes import WORDS


def main(argv: list[str]) -> int:
    """The configuration of `train`, and of the virtual cluster besides; no mpirun.

    Raises ConfigError, DataError for what cannot be; DeadlockError and the like from the run.
    """
    if launched_size() > 1:
        raise ConfigError(f"simulate runs in one process, but the launcher started {launched_size()}: start it without mpirun")
    if argv and not argv[0].startswith("-") and ELEMENT not in argv and elements.is_sweep(argv[0]):
        return _sweep(Path(argv[0]), argv[1:])
    config, print_config = parse(argv, "mpisgd simulate", virtual=True)
    on_virtual_ranks(config)
    if print_config:
        print(config_file.dumps(config), end="")
        return EXIT_OK
    from mpisgd.simulate import simulate

    try:
        simulate(config)
    except KeyboardInterrupt:
        print(f"\nmpisgd: {config.out} has what there was until then; to do it again: --overwrite", file=sys.stderr)
        raise
    return EXIT_OK


def _sweep(file: Path, words: list[str]) -> int:
    """Each run of a sweep, when all are known to be good; what fails leaves its reason, and the next begins."""
    resume, words = resumed(words)
    sweep = elements.read(file)

    def config_of(element: Element) -> tuple[str, Config]:
        config = parse([str(file), ELEMENT, element.name, *words], "mpisgd simulate", virtual=True)[0]
        on_virtual_ranks(config)
        return element.name, config

    configs = dict(sweep.each(config_of))
    first = configs[sweep.elements[0].name]
    directory = Path(first.out) if resume is None else resume
    names = begun(file, directory, resume=resume is not None, overwrite=first.overwrite)
    from mpisgd.simulate import simulate

    failed = 0
    for name in configs if names is None else names:
        print(f"mpisgd simulate: {name}", file=sys.stderr, flush=True)
        said = directory / f"{name}{WORDS}"
        said.unlink(missing_ok=True)
        try:
            simulate(replace(configs[name], out=str(directory / name), overwrite=first.overwrite or resume is not None))
        except MpisgdError as error:
            failed += 1
            reason = f"mpisgd simulate: {type(error).__name__}: {error}"
            said.write_text(f"{reason}\n", "utf-8")
            print(reason, file=sys.stderr, flush=True)
    print(
        f"{len(configs if names is None else names) - failed} runs are done; look at them with: mpisgd compare --sweep {directory}"
    )
    return EXIT_FAILED if failed else EXIT_OK
