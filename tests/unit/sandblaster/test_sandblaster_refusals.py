"""What has no meaning beside batch optimisation is refused, with the field, its value and what was expected."""

from __future__ import annotations

from typing import Any

import pytest

from mpisgd.base.errors import ConfigError
from mpisgd.config import compatibility, config_file
from mpisgd.data.sampling import PortionSampling
from mpisgd.job import placement

REFUSED: list[tuple[str, Any, bool]] = [
    ("optimizer", "adam", False),
    ("schedule", {"name": "step", "epochs": [1.0]}, False),
    ("alpha0", 0.1, False),
    ("linear_scaling", True, False),
    ("epochs", 3.0, False),
    ("local_steps", 2, False),
    ("averaging", 0.9, False),
    ("accumulation", 2, False),
    ("per_layer", True, False),
    ("push_format", "bfloat16", False),
    ("push_format", "topk", False),
    ("pull_format", "bfloat16", False),
    ("compensation", 0.1, False),
    ("clip_norm", 1.0, False),
    ("clip_average", 1.0, False),
    ("evaluation.patience", 2, False),
    ("checkpoint.partner_updates", 5, False),
    ("nonfinite", "drop", False),
    ("sampling", "replacement", False),
    ("autocast", "float16", False),
    ("group_size", 2, False),
    ("micro_batches", 2, False),
    ("groups", {"rate": {"*.bias": 2.0}}, False),
    ("virtual.gradients", False, True),
    ("virtual.batched", True, True),
]


def table_of(field: str, value: Any) -> dict[str, Any]:
    outer, _, inner = field.partition(".")
    table = {outer: {inner: value} if inner else value, "protocol": "sandblaster"}
    virtual = {"gradients": True} if outer != "virtual" or inner == "batched" else {}
    if outer == "evaluation":
        table |= {"evaluation": {inner: value, "best": "loss"}, "evaluator": True}
    return {**table, "virtual": {**virtual, **(table.get("virtual") or {})}}


@pytest.mark.parametrize(("field", "value", "virtual"), REFUSED, ids=[field for field, _, _ in REFUSED])
def test_what_has_no_meaning_is_refused_by_its_name(field: str, value: Any, virtual: bool) -> None:
    config = config_file.from_mapping(table_of(field, value))
    with pytest.raises(ConfigError, match=rf"^{field} = .*: expected .* beside protocol sandblaster: "):
        compatibility.check(config, virtual=virtual)


def test_every_pair_of_the_table_is_tried() -> None:
    pairs = sum(other == "batch" for _, other in compatibility.REFUSED)
    assert pairs == len(REFUSED)


def test_plain_options_are_not_refused() -> None:
    config = config_file.from_mapping({"protocol": "sandblaster", "virtual": {"gradients": True}})
    compatibility.check(config, virtual=True)
    compatibility.check(config)


@pytest.mark.parametrize(
    ("field", "value", "expected"),
    [
        ("iterations", 0, "1"),
        ("history", 0, "1"),
        ("share", 0.0, "above 0"),
        ("share", 1.5, "at most 1"),
        ("weight_decay", -1.0, "0"),
        ("push_every", 0, "1"),
    ],
)
def test_options_have_bounds(field: str, value: float, expected: str) -> None:
    with pytest.raises(ConfigError, match=rf"protocol\.{field} = {value}: expected .*{expected}"):
        config_file.from_mapping({"protocol": {"name": "sandblaster", field: value}})


def test_sums_of_several_portions_have_no_order() -> None:
    config = config_file.from_mapping({"protocol": {"name": "sandblaster", "push_every": 2, "order": "portions"}})
    with pytest.raises(ConfigError, match=r"protocol\.push_every = 2: expected 1 beside protocol\.order = 'portions'"):
        compatibility.check(config)


def test_a_portion_larger_than_the_batch_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"mu = 65: expected at most the 64 samples of the batch \(128 x protocol.share = 0.5\)"):
        PortionSampling(128, 65, 0.5, seed=1)


def test_portions_are_the_batch_each_sample_once() -> None:
    sampling = PortionSampling(103, 10, 0.5, seed=3)
    assert (sampling.samples, sampling.portions) == (52, 6)
    dealt = [sampling.indices(learner_id, portion).tolist() for learner_id, portion in enumerate(range(6))]
    assert [len(each) for each in dealt] == [10, 10, 10, 10, 10, 2]
    assert len({index for each in dealt for index in each}) == 52


def test_too_few_ranks_are_told_what_they_would_be() -> None:
    config = config_file.from_mapping({"protocol": "sandblaster", "shards": 2})
    with pytest.raises(ConfigError, match=r"needed at least 4 = 2 shard\(s\) \+ 1 coordinator \+ 1 learner"):
        placement.on_ranks(config, ["a"] * 3)
    roles, _ = placement.on_ranks(config, ["a"] * 6)
    assert (roles.shard_ranks, roles.coordinator_rank, roles.learner_ranks) == ((0, 1), 2, (3, 4, 5))
