"""Words besides a run's options."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from mpisgd.base.errors import ConfigError


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
