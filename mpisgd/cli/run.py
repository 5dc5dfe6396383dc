"""`mpisgd run -n RANKS [job.toml] [options of train]`."""

from __future__ import annotations

import shlex
from pathlib import Path

from mpisgd.base.errors import ConfigError
from mpisgd.cli import train
from mpisgd.cli.options import parse, resumed, taken_out
from mpisgd.config import config_file
from mpisgd.launching.restarts import Attempts, Job
from mpisgd.launching.under_way import refuse_among_ranks
from mpisgd.site import launchers

#: Option -> its value's placeholder, and its text; others are train's.
OPTIONS = {
    "-n": ("RANKS", "how many ranks to start: shards, learners, and the evaluator, if any"),
    "--max-restarts": ("N", "begin again up to N times, from the newest checkpoint, where ranks fail; default: 0"),
    "--launcher": (
        "NAME",
        "program that starts the ranks: mpirun, srun-pmix, srun-pmi2, srun-cray, aprun, mpiexec.hydra; default: this MPI's",
    ),
    "--launcher-args": ('"WORDS"', 'more words for the launcher, e.g. "--hostfile hosts"'),
}


def main(argv: list[str]) -> int:
    """Parse, then start the ranks: a misspelt option starts none. Returns the job's status."""
    own, words = taken_out(argv, {name: value for name, (value, _) in OPTIONS.items()})
    if {"--help", "-h", "--help-all", "--print-config"} & set(words):
        if "--print-config" not in words:
            print(usage())
        return train.main(words)
    refuse_among_ranks()
    ranks, restarts = _number(own, "-n", 1), _number(own, "--max-restarts", 0)
    options = _words(own)
    launcher = launchers.by_run(own["--launcher"], ranks) if "--launcher" in own else []
    same = ["mpisgd", "run", *(word for option in own.items() for word in option)]
    run, rest = resumed(words)
    if run is not None and rest and not rest[0].startswith("-"):
        del rest[0]
    config, _ = parse(rest, "mpisgd run", None if run is None else config_file.of_run(run))
    path = Path(config.out) if run is None else run
    job = Job(ranks, words, path, run is not None, options, launcher, shlex.join(same))
    return Attempts(job, restarts).run()


def _words(own: dict[str, str]) -> list[str]:
    try:
        return shlex.split(own.get("--launcher-args", ""))
    except ValueError as error:
        raise ConfigError(f"--launcher-args {own['--launcher-args']!r}: {error}") from error


def usage() -> str:
    lines = [f"  {f'{name} {value}':<30} {text}" for name, (value, text) in OPTIONS.items()]
    usage = "usage: mpisgd run -n RANKS [job.toml] [options]"
    return "\n".join([usage, "", *lines, "", "All other options are train's.", ""])


def _number(own: dict[str, str], name: str, least: int) -> int:
    said = own.get(name, "" if least else "0")
    if not said.isdecimal() or int(said) < least:
        found = f"{name} {said}" if said else f"{name} is missing"
        raise ConfigError(f"{found}: expected a number of at least {least}, e.g. mpisgd run -n 6 job.toml")
    return int(said)
