"""Consent to code: a run's directory may name code, imported only if the user names it, too (SECURITY.md).

Code is named as `package.module:attribute`: by the user in a job file, on the command line or in Python, but in a run's config.toml
by the directory's writer. Opening the run would run the writer's code: refuse these names without consent.
"""

from __future__ import annotations

import reprlib
import shlex
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from mpisgd.base.errors import ConfigError
from mpisgd.base.imports import file_of, is_spec
from mpisgd.config import Config, config_file
from mpisgd.rules.protocol_options import names_a_rule

#: Field that may name code -> option of `train`.
OPTIONS: Mapping[str, str] = {
    "model.factory": "--model",
    "data.factory": "--data",
    "loss": "--loss",
    "step": "--step",
    "protocol.factory": "--protocol",
    "protocol.modulation": "--protocol.modulation",
    "schedule.factory": "--schedule",
    "callbacks": "--callbacks",
}


def names_of(config: Config, *, training: bool = False) -> dict[str, str]:
    """Return names to import: field -> package.module:attribute; callbacks in `training` alone."""
    found = {}
    for field in OPTIONS:
        component, _, name = field.rpartition(".")
        spec: str = getattr(getattr(config, component) if component else config, name, "")
        is_code = names_a_rule(spec) if name == "modulation" else ":" in spec if name in ("loss", "step") else bool(spec)
        if is_code and (training or name != "callbacks"):
            found[field] = spec
    return found


def check(where: Path, config: Config, consented: Mapping[str, str], line: str = "", *, training: bool = False) -> None:
    """Raise ConfigError if `config`, from `where`, names code not `consented` to (field -> name).

    `line`: a command that consents to this code alone.
    """
    names = {field: spec for field, spec in names_of(config, training=training).items() if consented.get(field) != spec}
    if not names:
        return
    parts = (field.partition(".")[0] for field in OPTIONS if field.endswith(".factory"))
    kwargs = {f"{part}.factory": getattr(getattr(config, part), "kwargs", {}) for part in parts}
    lines = [f"  {field} = {spec!r}{_called_with(kwargs.get(field))}, from {_found(spec)}" for field, spec in names.items()]
    narrower = f"; or, for these names alone:\n{line}" if line and all(map(is_spec, names.values())) else ""
    raise ConfigError(
        f"{where} names code to import and call here as yours (nothing imported or called yet):\n"
        + "\n".join(lines)
        + f"\nif you trust this code, say so by --trust (in Python: trust=True){narrower}"
    )


def check_resumed(run: Path, words: Sequence[str], consented: Mapping[str, str]) -> None:
    """Raise ConfigError if a resumed run names code absent from the command line and its job file (`consented`)."""
    config = config_file.of_run(run)
    check(run, config, dict(consented) | _said(words), resume_line(run, config), training=True)


def read(path: str | Path, trusting: bool = False) -> Config:
    """Return the configuration in a user's file.

    Raises ConfigError as `config_file.read`, and for code in a run's file unless `trusting`.
    """
    config = config_file.read(path)
    if not trusting and config_file.is_of_a_run(path):
        check(Path(path), config, {}, training=True)
    return config


def resume_line(run: Path, config: Config) -> str:
    """Return the command to resume a run with consent to its code."""
    words = "".join(f" {OPTIONS[field]} {shlex.quote(spec)}" for field, spec in names_of(config, training=True).items())
    return f"mpisgd train --resume {shlex.quote(str(run))}{words}"


def _said(words: Sequence[str]) -> dict[str, str]:
    """Return code named by `--model mine:make` or `--model=mine:make`."""
    said: dict[str, str] = {}
    for at, word in enumerate(words):
        option, equals, value = word.partition("=")
        value = value if equals else words[at + 1] if at + 1 < len(words) else ""
        said |= {field: value for field, own in OPTIONS.items() if option in (own, f"--{field}")}
    return said


def _called_with(kwargs: Mapping[str, object] | None) -> str:
    return f" called with {reprlib.repr(dict(kwargs))}" if kwargs else ""


def _found(spec: str) -> str:
    module = spec.partition(":")[0]
    if module.partition(".")[0] in sys.stdlib_module_names:
        return f"module {module!r} of Python"
    where = file_of(module) if is_spec(spec) else ""
    return f"module {module!r}, {where}" if where else f"module {module!r}, without a file here"
