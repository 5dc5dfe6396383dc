"""TOML <-> `Config`: strict reading (unknown keys and wrong types are refused by name), complete writing."""

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
from mpisgd.base.speech import all_visible
from mpisgd.config import KINDS, Config, StagesOptions, kind_of, make_options, replace
from mpisgd.config.hints import does_nothing, option

#: A table that a run adds to its config.toml; reading it back as a configuration passes over it.
INNER = "inner_optimizer"
ENVIRONMENT = "environment"


def read(path: str | Path) -> Config:
    """The configuration in a TOML file.

    Raises ConfigError: no such file, not TOML, an unknown key (with the nearest valid one), a value of the wrong type.
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
    """The configuration of a run that is to go on, with the directory where it is now. Raises ConfigError where there is none."""
    path = run / "config.toml"
    if not path.is_file():
        above = next((each for each in [*run.parents][:2] if each != Path() and (each / path.name).is_file()), None)
        how = f"; did you mean --resume {above}?" if above else ""
        if (run / "LOCK").is_file():
            how = "; it was killed before it had written that: begin anew with --overwrite"
        raise ConfigError(f"--resume {run}: it is no run directory of mpisgd, it has no {path.name}{how}")
    return replace(read(path), out=str(run), overwrite=False)


def cut_anew(config: Config, before: Config) -> Config:
    """A configuration with which a run goes on that had `before`: where there are to be more or fewer stages, and nobody has said
    where those begin, it is not where they began."""
    if config.group_size == before.group_size or config.stages != before.stages:
        return config
    return replace(config, stages=dataclasses.replace(config.stages, at=()) if config.in_groups else StagesOptions())


def is_of_a_run(path: str | Path) -> bool:
    """Whether a file that can be read as a configuration was written by a run."""
    return ENVIRONMENT in tomllib.loads(Path(path).read_text("utf-8"))


def from_mapping(table: Mapping[str, Any]) -> Config:
    """A nested mapping into a `Config`: of values as TOML has them, or of paths and numbers of numpy or torch."""
    table = {key: _of_toml(value) for key, value in table.items() if key != ENVIRONMENT}
    return typing.cast(Config, _structure(Config, table, ""))


def from_objects(given: Any) -> Config:
    """The configuration in a mapping, a `Config`, a namespace or a dataclass. Raises ConfigError for anything else."""
    if isinstance(given, Config):
        given = to_mapping(given)
    given = _of_toml(given)
    if not isinstance(given, Mapping):
        expected = "the path of a TOML file, a mapping, a namespace, a dataclass or a Config"
        raise ConfigError(f"config: found {type(given).__name__}, expected {expected}")
    return from_mapping(given)


def _of_toml(value: Any) -> Any:
    """A value as TOML would give it: a path becomes text, a namespace or a dataclass a table, and an array or a number of numpy or
    torch becomes Python's."""
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
    """The opposite of `from_mapping`: plain values; fields that are None are left out."""
    return typing.cast(dict[str, Any], _plain(config))


def dumps(config: Config, environment: Mapping[str, Any] | None = None) -> str:
    """The configuration as TOML, with the table [environment] at the end where it is given."""
    table = to_mapping(config)
    if environment is not None:
        table[ENVIRONMENT] = all_visible(environment)
    return tomli_w.dumps(table)


def _structure(cls: type, table: Mapping[str, Any], prefix: str) -> Any:
    hints = typing.get_type_hints(cls)
    known = {item.name for item in dataclasses.fields(cls)}
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
    """`protocol = "softsync"` or a table `[protocol]` with `name = "softsync"` and that kind's own fields."""
    if isinstance(value, str):
        return make_options(component, value)
    if not isinstance(value, Mapping) or not isinstance(value.get("name"), str):
        raise ConfigError(f"{component} = {value!r}: expected a table with the key 'name', one of {', '.join(KINDS[component])}")
    fields = {key: item for key, item in value.items() if key != "name"}
    default = make_options(component, value["name"])
    for named_by in ("factory", "scheduler"):  # what the name says, where it is none of a kind
        if value["name"] == getattr(default, named_by, ""):
            fields[named_by] = value["name"]
    try:
        return _structure(type(default), fields, component + ".")
    except ConfigError as error:
        if component == INNER and str(error).startswith("optimizer."):  # its kinds are those of `optimizer`, and call themselves so
            raise ConfigError(f"{INNER}{str(error).removeprefix('optimizer')}") from error
        raise


def _plain(value: Any, component: str | None = None) -> Any:
    if dataclasses.is_dataclass(value):
        table = {"name": kind_of(value)} if component in KINDS else {}
        for item in dataclasses.fields(value):
            inner = getattr(value, item.name)
            if inner is not None:
                table[item.name] = _plain(inner, item.name)
        return table
    if isinstance(value, Mapping):
        return {str(key): _plain(inner) for key, inner in value.items()}
    if isinstance(value, tuple):
        return [_plain(inner) for inner in value]
    return value
