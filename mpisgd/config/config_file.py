"""TOML <-> `Config`: strict reading, complete writing."""

from __future__ import annotations

import dataclasses
import os
import tomllib
import typing
from argparse import Namespace
from collections.abc import Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import tomli_w

from mpisgd.base.errors import ConfigError, nearest
from mpisgd.base.terminal import all_visible
from mpisgd.config import CHOSEN, KINDS, Config, StagesOptions, kind_of, make_options, older, replace
from mpisgd.config.hints import does_nothing, option

INNER = "inner_optimizer"
#: A table that a run adds to its config.toml, ignored by reading.
ENVIRONMENT = "environment"


def read(path: str | Path) -> Config:
    """Return the configuration in a TOML file.

    Raises ConfigError: unreadable, not TOML, unknown key, wrong type.
    """
    try:
        text = Path(path).read_text("utf-8")  # as TOML is, whatever the locale
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"configuration file {str(path)!r} cannot be read: {error}") from error
    try:
        return from_mapping(tomllib.loads(text))
    except tomllib.TOMLDecodeError as error:
        script = f"; a script of yours is started by mpirun -n RANKS python {path}" if Path(path).suffix == ".py" else ""
        raise ConfigError(f"{path} is not TOML: {error}{script}") from error
    except ConfigError as error:
        raise ConfigError(f"{path}: {error}") from error


def of_run(run: Path) -> Config:
    """Return the configuration of a run to resume, at its present path. Raises ConfigError: no config.toml."""
    path = run / "config.toml"
    if not path.is_file():
        above = next((each for each in [*run.parents][:2] if each != Path() and (each / path.name).is_file()), None)
        how = f"; did you mean --resume {above}?" if above else ""
        if (run / "LOCK").is_file():
            how = "; the run was killed before writing the file: begin anew with --overwrite"
        raise ConfigError(f"--resume {run}: no run directory of mpisgd, {path.name} is missing{how}")
    return replace(read(path), out=str(run), overwrite=False)


def cut_anew(config: Config, before: Config) -> Config:
    """Drop old cuts if the resumed run changes group_size alone."""
    if config.group_size == before.group_size or config.stages != before.stages:
        return config
    return replace(config, stages=dataclasses.replace(config.stages, at=()) if config.in_groups else StagesOptions())


def is_of_a_run(path: str | Path) -> bool:
    """Return whether a run wrote this configuration file."""
    return ENVIRONMENT in tomllib.loads(Path(path).read_text("utf-8"))


def from_mapping(table: Mapping[str, Any]) -> Config:
    """Return the `Config` of a mapping with values of TOML, paths, and numbers of numpy or torch."""
    table = {key: _of_toml(value) for key, value in older.renewed(table).items() if key != ENVIRONMENT}
    return typing.cast(Config, _structure(Config, table, ""))


def from_objects(given: Any) -> Config:
    """Return the `Config` of a mapping, namespace or dataclass. Raises ConfigError for others."""
    if isinstance(given, Config):
        given = to_mapping(given)
    given = _of_toml(given)
    if not isinstance(given, Mapping):
        expected = "the path of a TOML file, a mapping, a namespace, a dataclass or a Config"
        raise ConfigError(f"config: found {type(given).__name__}, expected {expected}")
    return from_mapping(given)


def _of_toml(value: Any) -> Any:
    if isinstance(value, os.PathLike):
        return os.fspath(value)
    if isinstance(value, Namespace | SimpleNamespace) or (dataclasses.is_dataclass(value) and not isinstance(value, type)):
        value = vars(value)
    if isinstance(value, Mapping):
        return {key: _of_toml(each) for key, each in value.items()}
    if isinstance(value, list | tuple):
        return [_of_toml(each) for each in value]
    return value.tolist() if hasattr(value, "tolist") else value


def to_mapping(config: Config) -> dict[str, Any]:
    """Return plain values without None, the opposite of `from_mapping`."""
    return typing.cast(dict[str, Any], _plain(config))


def dumps(config: Config, environment: Mapping[str, Any] | None = None) -> str:
    """Return the configuration as TOML, [environment] last."""
    table = to_mapping(config)
    if environment is not None:
        table[ENVIRONMENT] = all_visible(environment)
    return tomli_w.dumps(table)


def _structure(cls: type, table: Mapping[str, Any], prefix: str) -> Any:
    hints = typing.get_type_hints(cls)
    known = {item.name for item in dataclasses.fields(cls) if CHOSEN not in item.metadata}
    table = {key: value for key, value in table.items() if key in known or not does_nothing(prefix + key, value)}
    for key in table:
        if key not in known:
            hint = option(prefix + key, file=True)
            raise ConfigError(f"unknown key {prefix + key!r}{f': {hint}' if hint else nearest(key, known)}")
    return cls(**{key: _value(hints[key], value, prefix + key) for key, value in table.items()})


def _value(hint: Any, value: Any, where: str) -> Any:
    if where in KINDS:
        return _kind(where, value)
    if dataclasses.is_dataclass(hint):
        if not isinstance(value, Mapping):
            raise ConfigError(f"{where} = {value!r}: expected a table [{where}]")
        return _structure(typing.cast(type, hint), value, where + ".")
    try:
        return msgspec.convert(value, hint, str_keys=True)
    except msgspec.ValidationError as error:
        raise ConfigError(f"{where} = {value!r}: {str(error)[0].lower()}{str(error)[1:]}") from error


def _kind(component: str, value: Any) -> Any:
    """Return options by `protocol = "softsync"` or a table with that `name`."""
    if isinstance(value, str):
        return make_options(component, value)
    if not isinstance(value, Mapping) or not isinstance(value.get("name"), str):
        raise ConfigError(f"{component} = {value!r}: expected a table with the key 'name', one of {', '.join(KINDS[component])}")
    fields = {key: item for key, item in value.items() if key != "name"}
    default = make_options(component, value["name"])
    for named_by in ("factory", "scheduler"):  # a name that is no kind: the user's factory, or torch's scheduler
        if value["name"] == getattr(default, named_by, ""):
            fields[named_by] = value["name"]
    try:
        return _structure(type(default), fields, component + ".")
    except ConfigError as error:
        if component == INNER and str(error).startswith("optimizer."):  # errors of these kinds name `optimizer`
            raise ConfigError(f"{INNER}{str(error).removeprefix('optimizer')}") from error
        raise


def _plain(value: Any, component: str | None = None) -> Any:
    if dataclasses.is_dataclass(value):
        table = {"name": kind_of(value)} if component in KINDS else {}
        for item in dataclasses.fields(value):
            inner = getattr(value, item.name)
            if inner is not None and CHOSEN not in item.metadata:
                table[item.name] = _plain(inner, item.name)
        return table
    if isinstance(value, Mapping):
        return {str(key): _plain(inner) for key, inner in value.items()}
    if isinstance(value, tuple):
        return [_plain(inner) for inner in value]
    return value
