"""`mpirun -n RANKS mpisgd train [job.toml] [options]`: one rank of a run."""

from __future__ import annotations

from mpisgd import config_file
from mpisgd.cli.options import parse
from mpisgd.errors import EXIT_OK
from mpisgd.guard import launched_rank


def main(argv: list[str]) -> int:
    """Parse before torch and MPI are imported, so that a misspelt option costs no start-up; then run."""
    config, print_config = parse(argv, "mpisgd train")
    if print_config:
        if launched_rank() == 0:
            print(config_file.dumps(config), end="")
        return EXIT_OK
    from mpisgd.api import train

    train(config=config)
    return EXIT_OK
