"""Whatever befalls the ranks of jobs whose layers are exchanged one by one: as in `test_storms.py`."""

from __future__ import annotations

import random
from pathlib import Path

import pytest
import torch

from tests.virtual.storm import aftermath
from tests.virtual.storm.draw import draw_layered

PARTS, OF_EACH = 28, 5
MARKS = pytest.mark.slow, pytest.mark.rare


@pytest.mark.parametrize("part", [0, *(pytest.param(part, marks=MARKS[: 1 + (part % 7 > 0)]) for part in range(1, PARTS))])
def test_laws_hold_whatever_befalls_a_job(part: int, tmp_path: Path) -> None:
    """Learners die and hang between two slices of a gradient, too."""
    torch.set_num_threads(1)
    for number in range(part * OF_EACH, (part + 1) * OF_EACH):
        drawn = draw_layered(random.Random(f"layered:{number}"), number)
        seen = aftermath.weather(drawn, tmp_path / str(number), proven=number % 2 == 0)
        assert not seen.failures, f"{drawn}:\n{seen.failures[0]}\n{drawn!r}"
