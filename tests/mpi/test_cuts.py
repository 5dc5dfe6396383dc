"""One model cut in each way, on real ranks, every way to send and wait: replay, and the bits of a learner that is one rank."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from mpisgd import replay
from mpisgd.records.log import schema
from mpisgd.records.log.reader import Run
from tests import cut_models

from . import laws
from .conftest import Shared, dealt, jobs_of, launch, only

pytestmark = pytest.mark.slow

MODEL = f"{cut_models.__name__}:"
WHOLE, LISTED = ({"model": {"name": f"{MODEL}{name}"}} for name in ("whole", "listed"))
#: name -> (ranks, what differs from COMMON); those of one learner have bits of their own.
RUNS: dict[str, tuple[int, dict[str, Any]]] = {
    "cut-alone": (3, {**WHOLE, "shards": 1}),
    "cut-alone-parts": (3, {**WHOLE, "shards": 1, "micro_batches": 2}),
    "cut-alone-learner": (2, {**WHOLE, "shards": 1, "micro_batches": 4}),
    "cut-names": (6, {**WHOLE, "group_size": 2, "stages": {"at": list(cut_models.AT[2])}}),
    "cut-names-learner": (6, {**WHOLE, "group_size": 3, "shards": 3, "micro_batches": 4, "stages": {"at": list(cut_models.AT[3])}}),
    "cut-seconds-parts": (
        8,
        {"model": {"name": f"{MODEL}sequential"}, "group_size": 2, "shards": 3, "micro_batches": 2, "evaluator": True}
        | {"stages": {"balance": "seconds"}, "pipeline": "1f1b"},
    ),
    "cut-list": (6, {**LISTED, "group_size": 2, "stages": {"at": ["1"]}}),
}
COMMON = {"protocol": "hardsync", "epochs": 0.1, "mu": 8, "threads": 1, "shards": 2}
COMMON |= {"evaluation": {"every_epochs": 0.0, "buffers": "recalibrate"}, "log": {"progress": "off"}}
ALONE = tuple(name for name in RUNS if name.startswith("cut-alone"))
CASES = dealt(RUNS, once=ALONE)
SHARED = Shared(CASES, jobs_of(RUNS, COMMON))


@pytest.mark.parametrize(("switch", "name"), only(CASES, "cut-names", "cut-seconds", "cut-list"))
def test_each_cut_has_the_bits_of_one_rank(runs: Path, switch: str, name: str) -> None:
    run = Run(runs / switch / name)
    laws.hold(run)
    assert replay.check(run.path, trust=True) == ""
    kind = name.rpartition("-")[2]
    alone = runs / "ssend" / (f"cut-alone-{kind}" if kind in ("parts", "learner") else "cut-alone")
    assert cut_models.state_of(run.path / schema.WEIGHTS) == cut_models.state_of(alone / schema.WEIGHTS)
    assert len(run.config["stages"]["at"]) == run.config["group_size"] - 1, "also where it was measured"


TRIED = """\
import json, sys, mpisgd
config = {"epochs": 1.0, "mu": 8, "threads": 1, "shards": 2, "group_size": 2, "out": "run", "log": {"progress": "off"}}
mpisgd.train(config={**config, **json.loads(sys.argv[1])})
"""


@pytest.mark.parametrize(
    ("changes", "refused"),
    [
        pytest.param(
            '{"model": {"name": "tests.cut_models:Fickle"}, "stages": {"at": ["second"]}}',
            "ConfigError: stages.at = ['second']: torch's splitter cannot trace the Fickle",
            marks=pytest.mark.rare,
        ),
        pytest.param(
            '{"model": {"name": "tests.cut_models:whole"}, "stages": {"balance": "seconds"}}',
            "ConfigError: group_size = 2: the model is a Whole",
            marks=pytest.mark.rare,
        ),
        (  # which one rank alone tries
            '{"model": {"name": "tests.cut_models:misfits"}}',
            "ConfigError: group_size = 2: the output of stage 0, of shape (8, 5), does not fit stage 1 with first weights of shape"
            " (10, 6)",
        ),
    ],
)
def test_a_cut_that_cannot_be_ends_the_job_on_all_ranks(changes: str, refused: str, tmp_path: Path) -> None:
    done = launch(4, "-c", TRIED, changes, cwd=tmp_path, PYTHONPATH=str(Path(__file__).parents[2]))
    assert done.status != 0 and refused in done.text, done.text
    assert not (tmp_path / "run").exists()
