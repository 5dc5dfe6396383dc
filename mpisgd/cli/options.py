"""Command line of a run: a TOML file, then typed overrides, by tyro; and words beside these.

Only `simulate` has options of the virtual cluster; a file's tables serve both.
"""

from __future__ import annotations

import io
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, nullcontext, redirect_stderr
from dataclasses import dataclass, field, fields, is_dataclass
from pathlib import Path
from typing import Any

import tyro

from mpisgd.base.errors import EXIT_OK, ConfigError
from mpisgd.cli import help
from mpisgd.config import KINDS, Config, hints, kind_of, make_options, options, replace, trust
from mpisgd.config.config_virtual import (
    ComputeOptions,
    ConstantComputeOptions,
    FailureOptions,
    NetworkOptions,
    ServiceOptions,
    VirtualOptions,
)
from mpisgd.liveness.guard import launched_rank

_DESCRIPTION = """The first word may be a TOML file; options on the command line override the file.
--print-config prints the result and stops.{resume}

Components come in kinds; the options of a chosen kind appear below (--protocol softsync --help-all):
{kinds}
--model, --data, --protocol and --schedule also take the user's own package.module:factory."""
_RESUME = """
--resume RUN goes on with an interrupted run, from the newest checkpoint; RUN has the configuration.
Code named by RUN runs only where the command line or a TOML file names this code, too; or with --trust."""

#: Tables of a job file for `simulate` alone.
VIRTUAL = tuple(name for names in help.VIRTUAL.values() for name in names)

TRUST = "--trust"


@dataclass(frozen=True)
class _RealConfig(Config):
    """Configuration with the file's virtual cluster, hidden from options and help."""

    virtual: tyro.conf.SuppressFixed[tyro.conf.Fixed[VirtualOptions]] = field(default_factory=VirtualOptions)
    compute: tyro.conf.SuppressFixed[tyro.conf.Fixed[ComputeOptions]] = field(default_factory=ConstantComputeOptions)
    network: tyro.conf.SuppressFixed[tyro.conf.Fixed[NetworkOptions]] = field(default_factory=NetworkOptions)
    service: tyro.conf.SuppressFixed[tyro.conf.Fixed[ServiceOptions]] = field(default_factory=ServiceOptions)
    failures: tyro.conf.SuppressFixed[tyro.conf.Fixed[FailureOptions]] = field(default_factory=FailureOptions)
    way: tyro.conf.SuppressFixed[tyro.conf.Fixed[str]] = "auto"


@dataclass(frozen=True)
class _VirtualConfig(Config):
    way: tyro.conf.SuppressFixed[tyro.conf.Fixed[str]] = "auto"


def parse(words: list[str], prog: str, base: Config | None = None, *, virtual: bool = False) -> tuple[Config, bool]:
    """Return `base` with a command line's overrides, and whether `--print-config` is there.

    `virtual`: with a virtual cluster's options. Raises ConfigError; exits with 2 (tyro) for unknown or ill-typed options, with 0
    after `--help`.
    """
    print_config, trusting = "--print-config" in words, TRUST in words
    words = [word for word in words if word not in ("--print-config", TRUST)]
    if base is None and words and not words[0].startswith("-"):
        base = trust.read(Path(words.pop(0)), trusting)
    if not virtual:
        _refuse_virtual(words)
    base, words = _choose_kinds(base or Config(), words)
    _refuse_other_kinds(base, words)
    first = launched_rank() == 0
    if "--help" in words or "-h" in words:
        if first:
            print(help.usage(base, prog.removeprefix("mpisgd "), words, virtual=virtual))
        raise SystemExit(EXIT_OK)
    words = ["--help" if word == "--help-all" else word for word in words]
    hints.refuse_foreign(words, _known(base))
    kinds = "\n".join(
        f"--{component.replace('_', '-')} {{{','.join(kinds)}}}"
        for component, kinds in KINDS.items()
        if virtual or component not in VIRTUAL
    )
    with nullcontext() if first else redirect_stderr(io.StringIO()), _of_inner_optimizer(words):  # stderr: of ill-typed values
        kind = _VirtualConfig if virtual else _RealConfig
        config = tyro.cli(
            kind,
            prog=prog,
            description=_DESCRIPTION.format(kinds=kinds, resume="" if virtual else _RESUME),
            default=kind(**_values(base)),
            args=words,
            config=(tyro.conf.AvoidSubcommands,),
            console_outputs=first,
        )
    return Config(**_values(config)), print_config


@contextmanager
def _of_inner_optimizer(words: list[str]) -> Iterator[None]:
    """Correct an error's table: both optimisers' kinds say `optimizer`."""
    try:
        yield
    except ConfigError as error:
        table, _, field = str(error).partition(" ")[0].partition(".")
        given = {word.removeprefix("--").partition("=")[0].replace("-", "_") for word in words}
        if table == "optimizer" and f"inner_optimizer.{field}" in given and f"optimizer.{field}" not in given:
            raise ConfigError(f"inner_{error}") from error
        raise


def _values(config: Config) -> dict[str, Any]:
    return {item.name: getattr(config, item.name) for item in fields(Config)}


def _refuse_virtual(words: list[str]) -> None:
    """Raise ConfigError for `--virtual.learners` on real ranks, naming `simulate`: a file may have it."""
    for word in words:
        if word.startswith("--") and word.removeprefix("--").partition("=")[0].partition(".")[0] in VIRTUAL:
            raise ConfigError(f"{word}: an option of virtual clusters, for mpisgd simulate alone; expected no virtual option here")


def _known(base: Config) -> set[str]:
    names = set()
    for item in options():
        value = getattr(base, item.name)
        names |= {item.name} | ({f"{item.name}.{each.name}" for each in fields(value)} if is_dataclass(value) else set())
    return names


def _refuse_other_kinds(base: Config, words: list[str]) -> None:
    """Raise ConfigError for `--protocol.n` without softsync: tyro would not say why."""
    for word in words:
        component, dot, field = word.removeprefix("--").partition("=")[0].replace("-", "_").partition(".")
        if not dot or component not in KINDS or not word.startswith("--"):
            continue
        field = field.removeprefix("no_")
        having = [name for name, kind in KINDS[component].items() if field in {item.name for item in fields(kind)}]
        present = kind_of(getattr(base, component))
        if having and present not in having:
            raise ConfigError(
                f"{word}: {component} {present!r} has no {field!r}; this option belongs to --{component.replace('_', '-')}"
                f" {' or '.join(having)}"
            )


def _choose_kinds(base: Config, words: list[str]) -> tuple[Config, list[str]]:
    """Take `--protocol NAME` and the like out of words; a new kind starts from defaults."""
    rest: list[str] = []
    queue = list(words)
    while queue:
        word = queue.pop(0)
        said, equals, value = word.removeprefix("--").partition("=")
        name = said.replace("-", "_")
        if not word.startswith("--") or name not in KINDS:
            rest.append(word)
            continue
        if not equals:
            if not queue:
                raise ConfigError(f"--{said}: expected one of {', '.join(KINDS[name])} after --{said}")
            value = queue.pop(0)
        present = getattr(base, name)
        if value not in (kind_of(present), getattr(present, "factory", None), getattr(present, "scheduler", None)):
            base = replace(base, **{name: make_options(name, value)})
    return base, rest


def taken_out(words: list[str], options: Mapping[str, str]) -> tuple[dict[str, str], list[str]]:
    """Return the values of these options, and other words. `options`: option -> its value's placeholder.

    Raises ConfigError: no value.
    """
    found: dict[str, str] = {}
    rest: list[str] = []
    remaining = iter(words)
    for word in remaining:
        name, equals, value = word.partition("=")
        if name not in options:
            rest.append(word)
            continue
        given = value if equals else next(remaining, "")
        if not given:
            raise ConfigError(f"{name}: expected {options[name]} after {name}")
        found[name] = given
    return found, rest


def resumed(words: list[str]) -> tuple[Path | None, list[str]]:
    """Return `--resume`'s directory, and other words. Raises ConfigError: no directory."""
    for at, word in enumerate(words):
        name, equals, value = word.partition("=")
        if name == "--resume":
            rest = words[at + 1 :]
            if not equals:
                if not rest or rest[0].startswith("-"):
                    raise ConfigError("--resume: expected the directory of a run after --resume")
                value, *rest = rest
            return Path(value), [*words[:at], *rest]
    return None, words
