"""`mpisgd doctor`, alone or under `mpirun -n RANKS`."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import TYPE_CHECKING

import tyro
from rich.console import Console
from rich.text import Text

from mpisgd.base.errors import EXIT_FAILED, EXIT_OK
from mpisgd.cli.options import parse, taken_out
from mpisgd.config import Config, hints
from mpisgd.liveness.guard import launched_rank

if TYPE_CHECKING:
    from mpisgd.site.facts import Finding

_STYLES = {"ok": "green", "warning": "yellow", "fault": "bold red"}


@dataclass(frozen=True)
class Options:
    """Examine MPI, ranks, cores, threads, torch and the file system, and name mends for problems.

    Start doctor like training, to examine the same: mpirun -n 4 mpisgd doctor. Options of a run may follow its file, or stand for
    it: --shards 2 --group-size 2.
    Exit status 1: something must be mended before a run.
    """

    config: tyro.conf.Positional[Path | None] = None
    """A run's configuration, to see each rank's role, cores and GPU."""
    dir: Path = Path()
    """Directory for runs; small files are written there and removed."""
    timeout_s: float = 120.0
    """Seconds until an endless step is given up, and named."""


def main(argv: list[str]) -> int:
    """Return the exit status, the same on every rank; rank 0 prints."""
    options, words = _read(argv)
    from mpisgd.site.doctor import diagnose
    from mpisgd.site.rolemap import with_job
    from mpisgd.site.survey import examine

    config = parse(words, "mpisgd doctor")[0] if words else None
    survey, rank = examine(options.dir, options.timeout_s)
    if config is not None:
        survey = with_job(survey, config)
    findings = diagnose(survey)
    # N single ranks would print N reports: the launcher's first rank speaks for all.
    if rank == 0 and (len(survey.ranks) > 1 or launched_rank() == 0):
        show(findings, Console(highlight=False, soft_wrap=True))
    return EXIT_FAILED if any(finding.level == "fault" for finding in findings) else EXIT_OK


def _read(argv: list[str]) -> tuple[Options, list[str]]:
    """Return doctor's options, and a run's words. Raises ConfigError; SystemExit: tyro."""
    own, words = taken_out(argv, {"--dir": "a directory", "--timeout-s": "seconds"})
    given = [word for option in own.items() for word in option]
    given += [word for word in words if word in ("-h", "--help") or _is_nobodys(word)]
    return tyro.cli(Options, args=given, prog="mpisgd doctor", console_outputs=launched_rank() == 0), words


def _is_nobodys(word: str) -> bool:
    """Return whether neither a run nor another framework has this option: perhaps doctor's, misspelt."""
    name = word.partition("=")[0].removeprefix("--").removeprefix("no-").replace("-", "_")
    if not word.startswith("--") or "." in name or name in ("trust", "help_all", "print_config"):
        return False
    return name not in {item.name for item in fields(Config)} and hints.foreign([word], ()) is None


def show(findings: Sequence[Finding], console: Console) -> None:
    width = max(len(finding.name) for finding in findings)
    for finding in findings:
        level = Text(f"{finding.level:<8}", style=_STYLES[finding.level])
        console.print(Text.assemble(level, f"{finding.name:<{width}}  {finding.text}"))
        if finding.mend:
            console.print(Text(f"{'':8}{'':{width}}  mend: {finding.mend}"))
    levels = Counter(finding.level for finding in findings)
    console.print(f"{levels['ok']} ok, {levels['warning']} warnings, {levels['fault']} faults")
