"""Replay of runs that computed on something else than this CPU: what is compared within a tolerance, and what is on trust."""

from __future__ import annotations

import shutil
from pathlib import Path

from mpisgd import replay
from mpisgd.records.log import schema
from mpisgd.replay.prove import FOREIGN_TOLERANCE
from tests.forge import rewrite
from tests.unit.replay.test_replay import SOFTSYNC, simulated


def test_what_last_bits_decide_is_not_held_against_a_foreign_run(tmp_path: Path) -> None:
    """As GPUs gave it: what was rounded off was another by a tenth, and a squared norm by 6 %, of weights that are within 5 %."""
    run = simulated(tmp_path / "run", protocol=SOFTSYNC, push_format="bfloat16", epochs=0.05)
    for table, column, by in (("pushes", "rounded", 1.3), ("updates", "gradient_sq", 1.09)):
        path = shutil.copytree(run, tmp_path / column)
        rewrite(path / schema.shard_file(0), table, lambda rows: rows.__setitem__(column, rows[column] * by))  # noqa: B023
        assert f"{column} " in replay.replay(path).reason
        assert replay.replay(path, tolerance=FOREIGN_TOLERANCE).reason == ""
