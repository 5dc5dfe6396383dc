"""Batch norm where data are stored by class: statistics are of all classes, and so are those that are saved."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import torch

from mpisgd.config import DigitsOptions, Part
from mpisgd.data import load
from mpisgd.job import parts
from mpisgd.job.parts import UserObjects
from tests.virtual.jobs import config, simulated

JOB = {
    "model": {"name": "mlp", "hidden": [48], "batch_norm": True},
    "virtual": {"learners": 2},
    "mu": 32,
    "epochs": 3,
    "evaluation": {"every_epochs": 0, "batch": 50, "buffers": "recalibrate", "recalibrate_batches": 6},
    "threads": 1,
    "log": {"progress": "off"},
}
"""300 of the 1,437 digits are for recalibration; the first 300 that are stored are zeros, ones and a few twos."""


def test_data_sorted_by_class_are_evaluated_as_others_are(tmp_path: Path) -> None:
    """The error is that of statistics of all samples, to noise: 2.5 %, where those of the first 300 would give 8.1 %."""
    digits = load(DigitsOptions(), data_dir="", seed=1)
    by_class = np.argsort(digits.train.targets.numpy(), kind="stable")
    train, test = (
        tuple(split.batch(order)) for split, order in ((digits.train, by_class), (digits.test, np.arange(len(digits.test))))
    )
    user_objects = UserObjects(data=(train, test))
    run = simulated(tmp_path / "run", JOB, user_objects)
    error = run.evaluations["error"][-1]
    whole = config(tmp_path / "unused", JOB, evaluation={"batch": 2000, "buffers": "recalibrate", "recalibrate_batches": 1})
    data = parts.load_data(whole, user_objects)
    model = parts.build_model(whole, parts.meta_of(data), user_objects)
    saved = torch.load(run.path / "weights.pt", weights_only=True)["theta"]
    model.module.load_state_dict(saved)
    measure = parts.make_measure(whole, model, parts.load_loss(whole, user_objects), data)
    assert measure.of(Part.TEST)[1] == error, "the statistics that were evaluated are saved"
    measure.prepare()
    of_all = measure.of(Part.TEST)[1]
    assert of_all < 0.08
    assert abs(error - of_all) < 0.02
    assert run.environment["batch_norm_policy"].startswith("recalibrate on 300 of 1,437 training samples")
