"""A learner that fires malformed messages at its shard, on real ranks; the whole campaign is `tests.faults.fuzz`."""

from __future__ import annotations

from pathlib import Path

from tests.faults import fuzz


def test_three_hundred(tmp_path: Path) -> None:
    found = fuzz.campaign(300, 2, tmp_path)
    assert found["failures"] == []
    assert found["refused"] >= 250
    assert len(found["fired"]) == len(fuzz.Gun(0, 4).kinds), "each kind was fired"
