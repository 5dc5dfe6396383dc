"""Whose code is run: what a run's directory names is somebody's, and is imported only where the user says so (SECURITY.md).

A configuration may name the user's own model, data, loss, step, protocol, schedule or weights of stale gradients as
`package.module:attribute`. In a job file, on the command line or in a Python program it is the user who names them. In the
config.toml of a run it is whoever wrote that directory: to open it would be to run their code. So those names are listed, and
refused, unless the user names them too.
"""

from __future__ import annotations

import reprlib
import shlex
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from mpisgd.base.errors import ConfigError
from mpisgd.base.imports import file_of, is_spec
from mpisgd.config import Config, CustomDataOptions, CustomModelOptions, config_file
from mpisgd.rules.options import names_a_rule

#: The fields that may name code, and the option of `train` that gives each.
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
    """Names that would be imported for a configuration: field -> package.module:attribute; in `training`, callbacks, too."""
    found = {
        "model.factory": config.model.factory if isinstance(config.model, CustomModelOptions) else "",
        "data.factory": config.data.factory if isinstance(config.data, CustomDataOptions) else "",
        "loss": config.loss if ":" in config.loss else "",
        "step": config.step if ":" in config.step else "",
        "protocol.factory": getattr(config.protocol, "factory", ""),
        "protocol.modulation": getattr(config.protocol, "modulation", ""),
        "schedule.factory": getattr(config.schedule, "factory", ""),
        "callbacks": config.callbacks if training else "",
    }
    if not names_a_rule(found["protocol.modulation"]):
        del found["protocol.modulation"]
    return {field: spec for field, spec in found.items() if spec}


def check(where: Path, config: Config, consented: Mapping[str, str], line: str = "", *, training: bool = False) -> None:
    """Raises ConfigError where `config`, found in `where`, names code that is not `consented` (field -> name).

    `line`: one that names this code, and so consents to it alone. `training` is as in `names_of`.
    """
    names = {field: spec for field, spec in names_of(config, training=training).items() if consented.get(field) != spec}
    if not names:
        return
    parts = (field.partition(".")[0] for field in OPTIONS if field.endswith(".factory"))
    kwargs = {f"{part}.factory": getattr(getattr(config, part), "kwargs", {}) for part in parts}
    lines = [f"  {field} = {spec!r}{_called_with(kwargs.get(field))}, from {_found(spec)}" for field, spec in names.items()]
    narrower = f"; or, to these names alone:\n{line}" if line and all(map(is_spec, names.values())) else ""
    raise ConfigError(
        f"{where} names code, which would be imported and called here as yours; nothing of it has been:\n"
        + "\n".join(lines)
        + f"\nif you trust it, say so by --trust (in Python: trust=True){narrower}"
    )


def check_resumed(run: Path, words: Sequence[str], consented: Mapping[str, str]) -> None:
    """Raises ConfigError where a run that is to go on names code that neither the command line names nor the job file in it, whose
    names are `consented` (field -> name).
    """
    config = config_file.of_run(run)
    check(run, config, dict(consented) | _said(words), resume_line(run, config), training=True)


def read(path: str | Path, trusting: bool = False) -> Config:
    """The configuration in a file that the user names; one that a run wrote is that run's.

    Raises ConfigError as `config_file.read` does, and where a run wrote the file, and it names code.
    """
    config = config_file.read(path)
    if not trusting and config_file.is_of_a_run(path):
        check(Path(path), config, {}, training=True)
    return config


def resume_line(run: Path, config: Config) -> str:
    """The command that resumes a run and consents to what it names."""
    words = "".join(f" {OPTIONS[field]} {shlex.quote(spec)}" for field, spec in names_of(config, training=True).items())
    return f"mpisgd train --resume {shlex.quote(str(run))}{words}"


def _said(words: Sequence[str]) -> dict[str, str]:
    """Names on a command line: `--model mine:make` or `--model=mine:make`."""
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
    return f"module {module!r}, {where}" if where else f"module {module!r}, of which there is no file here"
