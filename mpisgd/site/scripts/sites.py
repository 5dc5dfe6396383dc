"""A centre's defaults for `submit --site NAME`, from `~/.config/mpisgd/sites/NAME.toml`."""

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
from mpisgd.site.scripts.job_options import Request


def folder() -> Path:
    """Return XDG_CONFIG_HOME/mpisgd/sites, else ~/.config/mpisgd/sites."""
    base = os.environ.get("XDG_CONFIG_HOME", "")
    return (Path(base) if base else Path.home() / ".config") / "mpisgd" / "sites"


def defaults(name: str) -> dict[str, Any]:
    """Return a site's options. Raises ConfigError: no file, no TOML, or a forbidden option."""
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
            raise ConfigError(f"site = {name!r}: {path}: {key}: expected none: no default of a site")
    return table


def request(table: Mapping[str, Any], where: str) -> Request:
    """Return a request. Raises ConfigError, after `where`: an unknown name, a wrong type, or an impossible value."""
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
    """Reword msgspec's error: `nodes = '2': expected an int`, or the allowed values."""
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
