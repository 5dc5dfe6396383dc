"""Schedules that have found something, by what they found (`kept.json`). Each is a whole draw: how others are drawn may change.

`python -m tests.virtual.storm.kept "WHAT" < draw`, before the fault is mended, keeps a failing draw, without needless faults.
"""

from __future__ import annotations

import dataclasses
import json
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from tests.virtual.storm import aftermath
from tests.virtual.storm.draw import Damage, Draw, Fault

_FILE = Path(__file__).with_suffix(".json")


def _read(fields: dict[str, Any]) -> Draw:
    attempts = tuple(tuple(Fault(**each) for each in faults) for faults in fields.pop("attempts"))
    damages = tuple(Damage(**each) for each in fields.pop("damages", ()))
    return Draw(**{**fields, "again": tuple(fields.pop("again", (0, 0)))}, attempts=attempts, damages=damages)


def _write(name: str, drawn: Draw) -> str:
    """Return a draw as JSON, a fault to a line."""
    listed = ("attempts", "damages")
    rest = json.dumps({field: value for field, value in _said(drawn).items() if field not in listed})[:-1]
    attempts = ",\n    ".join(f"[{_lines(faults)}]" for faults in drawn.attempts)
    damages = f',\n   "damages": [{_lines(drawn.damages)}]' if drawn.damages else ""
    return f' {json.dumps(name)}:\n  {rest}, "attempts": [\n    {attempts}]{damages}}}'


def _lines(items: tuple[Any, ...]) -> str:
    return ",\n     ".join(json.dumps(_said(item)) for item in items)


def _said(of: Any) -> dict[str, Any]:
    """Return the fields that are no defaults."""
    return {field.name: value for field in dataclasses.fields(of) if (value := getattr(of, field.name)) != field.default}


KEPT = {name: _read(fields) for name, fields in json.loads(_FILE.read_text()).items()}


def _simpler(drawn: Draw) -> Iterator[Draw]:
    """Yield draws with a fault, an attempt or another trait less."""
    attempts = drawn.attempts
    for at, faults in enumerate(attempts):
        for number in range(len(faults)):
            fewer = (*attempts[:at], faults[:number] + faults[number + 1 :], *attempts[at + 1 :])
            yield dataclasses.replace(drawn, attempts=fewer)
    if len(attempts) > 1:
        yield dataclasses.replace(drawn, attempts=attempts[:-1])
    for trait in _SPARED:
        if any(getattr(drawn, name) != value for name, value in trait.items()):
            yield dataclasses.replace(drawn, **trait)


_SPARED: list[dict[str, Any]] = [{"damages": ()}, {"freed": ""}, {"again": (0, 0)}, {"evaluator": False}, {"reorders": False}]


def _fails(drawn: Draw) -> bool:
    with tempfile.TemporaryDirectory() as directory:
        return bool(aftermath.weather(drawn, Path(directory)).failures)


def _keep(name: str, drawn: Draw) -> None:
    while (simpler := next(filter(_fails, _simpler(drawn)), None)) is not None:
        drawn = simpler
    kept = (_write(each, made) for each, made in {**KEPT, name: drawn}.items())
    _FILE.write_text("{\n" + ",\n".join(kept) + "\n}\n")


if __name__ == "__main__":
    torch.set_num_threads(1)
    found = eval(sys.stdin.read(), {"Draw": Draw, "Fault": Fault, "Damage": Damage})
    if not _fails(found):
        sys.exit("this draw does not fail here")
    _keep(sys.argv[1], found)
