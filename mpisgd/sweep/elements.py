"""A sweep's file: a configuration with a table [sweep], a grid of lists, or with tables [[sweep]], a list of settings."""

from __future__ import annotations

import copy
import itertools
import re
import tomllib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any, TypeVar

from mpisgd.base.errors import ConfigError, nearest
from mpisgd.config import KINDS, Config, config_file

T = TypeVar("T")

TABLE = "sweep"
FILE = "sweep.toml"
"""What the file is called in the directory of a sweep."""

_MOST = 10_000
_TOLD = 10
_LONGEST = 150
"""Letters of a name: a file's may have 255, with what is put behind it."""
_NAME = re.compile(r"\w[\w.,=+-]*", re.ASCII)


@dataclass(frozen=True)
class Element:
    """One run of a sweep: `settings` are what sets it apart, field -> value; `table` is its configuration, as TOML has it."""

    name: str
    settings: Mapping[str, Any]
    table: Mapping[str, Any] = field(repr=False)

    @cached_property
    def config(self) -> Config:
        """Raises ConfigError: what the configuration of any run must not be."""
        return config_file.from_mapping(self.table)


@dataclass(frozen=True)
class Sweep:
    """All runs of one file, in its order; the names tell them apart."""

    elements: tuple[Element, ...]

    def named(self, name: str) -> Element:
        """Raises ConfigError where there is none of this name, with the nearest."""
        for each in self.elements:
            if each.name == name:
                return each
        raise ConfigError(f"--element {name!r}: the sweep has none{nearest(name, [each.name for each in self.elements])}")

    def each(self, make: Callable[[Element], T]) -> list[T]:
        """What `make` makes of each element. Raises ConfigError with a line for each that it refuses, not the first alone."""
        made, refused = [], []
        for element in self.elements:
            try:
                made.append(make(element))
            except ConfigError as error:
                refused.append(f"{element.name}: {error}")
        if refused:
            more = [f"and {len(refused) - _TOLD} more"] * (len(refused) > _TOLD)
            first = f"{len(refused)} of {len(self.elements)} runs of the sweep cannot be:"
            raise ConfigError("\n".join([first, *refused[:_TOLD], *more]))
        return made


def is_sweep(path: str | Path) -> bool:
    """Whether the file has settings of several runs; what cannot be read is none, and is refused as a configuration."""
    try:
        return TABLE in tomllib.loads(Path(path).read_text("utf-8"))
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError):
        return False


def read(path: str | Path) -> Sweep:
    """The runs of a sweep's file. Raises ConfigError: it cannot be read, or has no good [sweep], or gives two runs one name."""
    try:
        table = tomllib.loads(Path(path).read_text("utf-8"))
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"sweep {str(path)!r} cannot be read: {error}") from error
    except tomllib.TOMLDecodeError as error:
        raise ConfigError(f"{path} is not TOML: {error}") from error
    try:
        return _sweep(table)
    except ConfigError as error:
        raise ConfigError(f"{path}: {error}") from error


def _sweep(table: Mapping[str, Any]) -> Sweep:
    asked, base = table.get(TABLE), {key: value for key, value in table.items() if key != TABLE}
    settings: list[tuple[dict[str, Any], dict[str, Any]]]
    if isinstance(asked, Mapping) and asked:
        settings = [({}, each) for each in _grid(asked)]
    elif isinstance(asked, list) and asked and all(isinstance(each, Mapping) for each in asked):
        settings = [_listed(each) for each in asked]
    else:
        raise ConfigError("sweep: expected a table [sweep] of lists, seed = [1, 2], or tables [[sweep]], one for each run")
    elements, places = [], dict[str, int]()
    for number, (own, values) in enumerate(settings, 1):
        for name in ("out", "overwrite"):
            if name in values:
                raise ConfigError(f"sweep: {name}: expected none: each run has a directory of its own, named after its settings")
        name = _checked(own.get("name", _name(values)), number)
        if name in places:
            how = 'give them names, by name = "..." in [[sweep]]' if own or isinstance(asked, list) else "a value stands twice"
            raise ConfigError(f"sweep: runs {places[name]} and {number} are both {name!r}: {how}")
        places[name] = number
        elements.append(Element(name, values, _merged(base, values)))
    return Sweep(tuple(elements))


def _grid(asked: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    """Every combination, the last field of the file changing fastest."""
    axes = dict(_axes(asked, ""))
    count = 1
    for key, values in axes.items():
        if not isinstance(values, list) or not values:
            raise ConfigError(f"sweep.{key} = {values!r}: expected a list of values, e.g. {key} = [{_shown(values)}]")
        count *= len(values)
    if count > _MOST:
        raise ConfigError(f"sweep: {count:,} combinations: expected at most {_MOST:,}")
    for values in itertools.product(*axes.values()):
        yield dict(zip(axes, values, strict=True))


def _axes(table: Mapping[str, Any], prefix: str) -> Iterator[tuple[str, Any]]:
    for key, value in table.items():
        if isinstance(value, Mapping):
            yield from _axes(value, f"{prefix}{key}.")
        else:
            yield prefix + key, value


def _listed(table: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """The name of an element of [[sweep]], if it has one, and its settings."""
    own = {"name": table["name"]} if "name" in table else {}
    rest = {key: value for key, value in table.items() if key != "name"}
    whole = {key: value for key, value in rest.items() if key in KINDS and isinstance(value, Mapping) and "name" in value}
    return own, {**whole, **dict(_axes({key: value for key, value in rest.items() if key not in whole}, ""))}


def _merged(base: Mapping[str, Any], values: Mapping[str, Any]) -> dict[str, Any]:
    """A configuration with these settings; a component of the kind that it is already keeps its options."""
    table = copy.deepcopy(dict(base))
    for key, value in values.items():
        *above, last = key.split(".")
        inner = table
        for name in above:
            found = inner.get(name, {})
            inner[name] = {"name": found} if name in KINDS and isinstance(found, str) else found
            inner = inner[name]
            if not isinstance(inner, dict):
                raise ConfigError(f"sweep.{key}: {name} = {inner!r} is no table")
        before = inner.get(last)
        if not (last in KINDS and isinstance(before, Mapping) and before.get("name") == value):
            inner[last] = value
    return table


# ----------------------------------------------------------------------------------------------------------------- names


def _name(values: Mapping[str, Any]) -> str:
    """`softsync,n=4,alpha0=0.05,seed=1`: the settings, the seed last, in letters that no shell and no file system minds."""
    keys = sorted(values, key=lambda key: key == "seed")
    return ",".join(_setting(key, values[key]) for key in keys)


def _setting(key: str, value: Any) -> str:
    if key in KINDS:
        if isinstance(value, Mapping):
            options = [f"{name}={_plain(each)}" for name, each in value.items() if name != "name"]
            return ",".join([_plain(value.get("name", key)), *options])
        return _plain(value)
    return f"{key}={_plain(value)}"


def _plain(value: Any) -> str:
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, list):
        return "+".join(map(_plain, value))
    if isinstance(value, Mapping):
        return "+".join(f"{key}={_plain(each)}" for key, each in value.items())
    return re.sub(r"[^\w.+-]+", "_", str(value), flags=re.ASCII).strip("_") or "none"


def _checked(name: object, number: int) -> str:
    what = f"sweep: run {number}: name = {name!r}: expected"
    if not isinstance(name, str) or not _NAME.fullmatch(name) or name.endswith((".out", ".toml", ".links")):
        raise ConfigError(f"{what} letters, digits and any of . , = + - _, beginning with a letter or digit")
    if len(name) > _LONGEST:
        raise ConfigError(f'{what} at most {_LONGEST} letters: give it a name, by name = "..." in [[sweep]]')
    return name


def _shown(value: Any) -> str:
    return "..." if isinstance(value, list) else f'"{value}"' if isinstance(value, str) else _plain(value)
