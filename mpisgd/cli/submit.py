"""`mpisgd submit job.toml`."""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from dataclasses import dataclass, fields

import tyro

from mpisgd.base.errors import EXIT_OK
from mpisgd.cli.options import parse
from mpisgd.config import Config, hints
from mpisgd.site.scripts import sites
from mpisgd.site.scripts.job_options import Request
from mpisgd.site.scripts.submission import make, submit


@dataclass(frozen=True)
class Options(Request):
    site: str = ""
    """Defaults from ~/.config/mpisgd/sites/NAME.toml; options here go first."""
    dry_run: bool = False
    """Print the script and do nothing."""


Options.__doc__ = Request.__doc__


def main(argv: list[str]) -> int:
    """Submit, or print. Raises ConfigError: impossible counts, a refusing batch system; SystemExit from tyro."""
    argv = _joined(argv)
    hints.refuse_foreign(argv, {*(item.name for item in fields(Options)), "partition", "project", "bank"}, hints.SUBMIT)
    options = tyro.cli(Options, args=argv, prog="mpisgd submit", default=_defaults(argv))
    script = make(options, _read, shlex.join(["mpisgd", "submit", *(word for word in argv if word != "--dry-run")]))
    if options.dry_run:
        print(script.text, end="")
        return EXIT_OK
    jobs = submit(script)
    place = f"results/{options.name}-{jobs[0]}{'-*' if options.array else ''}"
    which = f"job{'s' * (len(jobs) > 1)} {' '.join(jobs)}"
    print(f"{which}: {script.layout.ranks} ranks on {script.layout.nodes} nodes; runs go to {place}")
    return EXIT_OK


def _joined(argv: Sequence[str]) -> list[str]:
    """Join `--directive --x=1`, whose value looks like an option here."""
    words: list[str] = []
    for word in argv:
        if words and words[-1] in ("--directive", "--setup"):
            words[-1] += f"={word}"
        else:
            words.append(word)
    return words


def _defaults(argv: Sequence[str]) -> Options:
    """Return the named site's defaults, without a configuration."""
    named = [word.partition("=")[2] or "".join(argv[index + 1 : index + 2]) for index, word in enumerate(argv) if _is_site(word)]
    if not named:
        return Options(config=tyro.MISSING)
    request = sites.request({**sites.defaults(named[-1]), "config": ""}, f"site = {named[-1]!r}: ")
    return Options(**{**vars(request), "config": tyro.MISSING})


def _is_site(word: str) -> bool:
    return word.partition("=")[0] == "--site"


def _read(words: Sequence[str]) -> Config:
    return parse(list(words), "mpisgd submit --array" if len(words) > 1 else "mpisgd submit")[0]
