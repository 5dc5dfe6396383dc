"""A centre's own words, written down once: `~/.config/mpisgd/sites/NAME.toml` has defaults for `submit --site NAME`."""

from __future__ import annotations

import dataclasses
import os
import re
import tomllib
import typing
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec

from mpisgd.base.errors import ConfigError, nearest
from mpisgd.site.scripts.options import Request


def folder() -> Path:
    """Where sites lie: XDG_CONFIG_HOME/mpisgd/sites, else ~/.config/mpisgd/sites."""
    base = os.environ.get("XDG_CONFIG_HOME", "")
    return (Path(base) if base else Path.home() / ".config") / "mpisgd" / "sites"


def defaults(name: str) -> dict[str, Any]:
    """What a site's file says: options of `submit` by their names, with `_`. Raises ConfigError: no such file, or no TOML."""
    there = sorted(path.stem for path in folder().glob("*.toml"))
    if name not in there:
        hint = f"one of: {', '.join(there)}" if there else "a file there: jobs/sites has examples to begin from"
        raise ConfigError(f"site = {name!r}: there is no {folder() / f'{name}.toml'}; expected {hint}")
    path = folder() / f"{name}.toml"
    try:
        table = tomllib.loads(path.read_text("utf-8"))
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        raise ConfigError(f"site = {name!r}: {path} cannot be read: {error}") from error
    for key in ("config", "site"):
        if key in table:
            raise ConfigError(f"site = {name!r}: {path}: {key}: expected none: it is no default of a site")
    return table


def request(table: Mapping[str, Any], where: str) -> Request:
    """The request that has these values, and the defaults of all else.

    Raises ConfigError, after `where`: an unknown name, with the nearest; a value of another type, or one that cannot be.
    """
    known = [field.name for field in dataclasses.fields(Request)]
    for key in table:
        if key not in known:
            raise ConfigError(f"{where}unknown option {key!r}{nearest(key, known)}")
    try:
        return msgspec.convert(dict(table), Request, dec_hook=_decode)
    except msgspec.ValidationError as error:
        raise ConfigError(f"{where}{_plain(table, str(error))}") from error
    except ConfigError as error:
        raise ConfigError(f"{where}{error}") from error


def _plain(table: Mapping[str, Any], text: str) -> str:
    """`nodes = '2': expected an int` for msgspec's words, and the list where only some are allowed."""
    found = re.search(r"\$\.(\w+)", text)
    if found is None:
        return text
    (hint,) = (hint for name, hint in typing.get_type_hints(Request).items() if name == found[1])
    allowed = [str(each) for part in (hint, *typing.get_args(hint)) for each in typing.get_args(part) if isinstance(each, str)]
    plain = text.partition(" - at")[0].lower().removeprefix("expected ").replace("`", "")
    expected = f"one of: {', '.join(allowed)}" if allowed else plain
    return f"{found[1]} = {table[found[1]]!r}: expected {expected}"


def _decode(kind: type, value: Any) -> Any:
    if kind is Path and isinstance(value, str):
        return Path(value)
    raise TypeError(f"expected {kind.__name__}, got {type(value).__name__}")
