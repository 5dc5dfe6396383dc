"""Time limits in the forms of all batch systems."""

from __future__ import annotations

import re

from mpisgd.base.errors import ConfigError

FORMS = (
    "hours:minutes, hours:minutes:seconds, days-hours, days-hours:minutes, days-hours:minutes:seconds, minutes, or a number with a"
    " unit, s, m, h or d, as in 90m or 1.5h"
)
_UNITS_S = {"s": 1, "m": 60, "h": 3600, "d": 86400}
_CLOCK = re.compile(r"(?:(?P<days>\d+)-)?(?P<hours>\d+)(?::(?P<minutes>[0-5]?\d)(?::(?P<seconds>[0-5]?\d))?)?", re.ASCII)
_WITH_UNIT = re.compile(r"(\d+(?:\.\d+)?)([smhd])", re.ASCII)


def seconds(text: str) -> int:
    """Return the seconds of a time limit. Raises ConfigError: an unknown form.

    `2:00` is hours:minutes, as in LSF (see `of_two`); a single number is minutes, as in SLURM, LSF and Flux.
    """
    if found := _WITH_UNIT.fullmatch(text):
        return round(float(found[1]) * _UNITS_S[found[2]])
    if is_bare(text):
        return 60 * int(text)
    found = _CLOCK.fullmatch(text)
    if found is None:
        raise ConfigError(f"time = {text!r}: expected {FORMS}")
    days, hours, minutes, rest = (int(part or 0) for part in found.groups())
    if found["days"] and hours > 23:
        raise ConfigError(f"time = {text!r}: expected fewer than 24 hours beside days")
    return 86400 * days + 3600 * hours + 60 * minutes + rest


def is_bare(text: str) -> bool:
    """Return whether there is no unit: minutes, but seconds in PBS."""
    return text.isascii() and text.isdecimal()


def of_two(text: str) -> str:
    """Suggest other forms for two numbers, which SLURM and PBS read as minutes:seconds."""
    found = re.fullmatch(r"(\d+):(\d\d?)", text, re.ASCII)
    if found is None:
        return ""
    first, second = found.groups()
    return (
        f"'{first}:{second}:00' for {int(first)} h {int(second)} min, or '0:{first}:{second}' for {int(first)} min {int(second)} s"
    )


def hms(seconds: int) -> str:
    """Format for SLURM and PBS: `01:00:00`."""
    return f"{seconds // 3600:02}:{seconds // 60 % 60:02}:{seconds % 60:02}"


def hm(seconds: int) -> str:
    """Format for LSF, rounded up: `01:00`."""
    minutes = -(-seconds // 60)
    return f"{minutes // 60:02}:{minutes % 60:02}"


def fsd(seconds: int) -> str:
    """Format for Flux: `60m` or `90s`."""
    return f"{seconds}s" if seconds % 60 else f"{seconds // 60}m"
