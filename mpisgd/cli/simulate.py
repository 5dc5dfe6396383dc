"""`mpisgd simulate [job.toml] [options]`, in this process."""

from __future__ import annotations

import sys

from mpisgd.base.errors import EXIT_OK, ConfigError
from mpisgd.cli.options import parse
from mpisgd.config import config_file
from mpisgd.job.placement import on_virtual_ranks
from mpisgd.liveness.guard import launched_size


def main(argv: list[str]) -> int:
    """Run a virtual cluster. Raises ConfigError, DataError: bad input; DeadlockError and others: the run's."""
    if launched_size() > 1:
        raise ConfigError(f"simulate runs in one process, but the launcher started {launched_size()}: leave mpirun out")
    config, print_config = parse(argv, "mpisgd simulate", virtual=True)
    on_virtual_ranks(config)
    if print_config:
        print(config_file.dumps(config), end="")
        return EXIT_OK
    from mpisgd.simulate import simulate

    try:
        simulate(config)
    except KeyboardInterrupt:
        print(f"\nmpisgd: {config.out} has the run until then; to begin anew: --overwrite", file=sys.stderr)
        raise
    return EXIT_OK
