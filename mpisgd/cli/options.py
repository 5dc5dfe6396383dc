"""The command line of a run: a TOML file, then typed overrides, checked and explained by tyro."""

from __future__ import annotations

import io
from contextlib import nullcontext, redirect_stderr
from dataclasses import fields, is_dataclass
from pathlib import Path

import tyro

from mpisgd import hints, trust
from mpisgd.config import KINDS, Config, kind_of, make_options, replace
from mpisgd.errors import ConfigError
from mpisgd.guard import launched_rank

_DESCRIPTION = """Train a model with shards and learners on MPI ranks: mpirun -n RANKS mpisgd train [job.toml] [options].

The first word may be a TOML file; options on the command line override it. --print-config prints the result and stops.
--resume RUN goes on with a run that was interrupted, from its newest checkpoint; RUN has its configuration. Code that RUN names is
run only where the command line names it too, by --model, --data, --loss, --protocol.modulation or a TOML file
(whose other lines do not count then); or with --trust.

Components come in kinds; choose one and its own options appear below (--protocol softsync --help):
{kinds}
--model, --data and --protocol also take the user's own package.module:factory."""


TRUST = "--trust"


def parse(words: list[str], prog: str, base: Config | None = None) -> tuple[Config, bool]:
    """The configuration that a command line means, where it overrides `base`, and whether `--print-config` was there.

    Raises ConfigError; exits with status 2 (tyro) on an unknown or ill-typed option, naming the nearest valid one.
    """
    print_config, trusting = "--print-config" in words, TRUST in words
    words = [word for word in words if word not in ("--print-config", TRUST)]
    if base is None and words and not words[0].startswith("-"):
        base = trust.read(Path(words.pop(0)), trusting)
    base, words = _choose_kinds(base or Config(), words)
    _refuse_other_kinds(base, words)
    found = hints.foreign(words, _known(base))
    if found is not None:
        raise ConfigError(f"unknown option {found[0]}: {found[1]}")
    kinds = "\n".join(f"--{component} {{{','.join(kinds)}}}" for component, kinds in KINDS.items())
    first = launched_rank() == 0
    with nullcontext() if first else redirect_stderr(io.StringIO()):  # console_outputs does not cover ill-typed values
        config = tyro.cli(
            Config,
            prog=prog,
            description=_DESCRIPTION.format(kinds=kinds),
            default=base,
            args=words,
            config=(tyro.conf.AvoidSubcommands,),
            console_outputs=first,
        )
    return config, print_config


def _known(base: Config) -> set[str]:
    """The names of all options, `mu` and `protocol.n`."""
    names = set()
    for item in fields(base):
        value = getattr(base, item.name)
        names |= {item.name} | ({f"{item.name}.{each.name}" for each in fields(value)} if is_dataclass(value) else set())
    return names


def _refuse_other_kinds(base: Config, words: list[str]) -> None:
    """`--protocol.n` without `--protocol softsync`: say so, where tyro could only say that it knows no such option."""
    for word in words:
        component, dot, field = word.removeprefix("--").partition("=")[0].partition(".")
        if not dot or component not in KINDS or not word.startswith("--"):
            continue
        field = field.replace("-", "_").removeprefix("no_")
        having = [name for name, kind in KINDS[component].items() if field in {item.name for item in fields(kind)}]
        present = kind_of(getattr(base, component))
        if having and present not in having:
            raise ConfigError(
                f"{word}: {component} is {present!r}, which has no {field!r}; it belongs to --{component} {' or '.join(having)}"
            )


def _choose_kinds(base: Config, words: list[str]) -> tuple[Config, list[str]]:
    """Take `--protocol NAME` and its like out of the words; a kind other than the file's starts from that kind's defaults."""
    rest: list[str] = []
    queue = list(words)
    while queue:
        word = queue.pop(0)
        name, equals, value = word.removeprefix("--").partition("=")
        if not word.startswith("--") or name not in KINDS:
            rest.append(word)
            continue
        if not equals:
            if not queue:
                raise ConfigError(f"--{name}: expected one of {', '.join(KINDS[name])} after it")
            value = queue.pop(0)
        present = getattr(base, name)
        if value not in (kind_of(present), getattr(present, "factory", None)):
            base = replace(base, **{name: make_options(name, value)})
    return base, rest
