"""Slices that hold whole layers: where they end, and what makes no sense."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mpisgd import models
from mpisgd.base.errors import ConfigError
from mpisgd.config import (
    AlexNetOptions,
    Cifar10FullOptions,
    Config,
    LambOptions,
    MlpOptions,
    MnistCnnOptions,
    ModelOptions,
    SmallCnnOptions,
    SoftmaxOptions,
    compatibility,
    replace,
)
from mpisgd.job import parts
from mpisgd.protocols import (
    AsyncOptions,
    BackupOptions,
    DownpourOptions,
    HardsyncOptions,
    SoftsyncOptions,
    SspOptions,
    TimeoutOptions,
    VersionedOptions,
)
from mpisgd.vectors.flat import FlatModel, Layer, bounds_of, cut_between, cut_large, first_layers, named

MODELS: list[Any] = [
    (SoftmaxOptions(), (1, 8, 8), ["1"]),
    (MlpOptions((10, 20, 30)), (8,), ["1", "3", "5", "7"]),
    (MlpOptions((8,), batch_norm=True), (8,), ["1", "2", "4"]),
    (SmallCnnOptions(), (1, 8, 8), ["0", "2", "6"]),
    (MnistCnnOptions(), (1, 28, 28), ["0", "3", "6", "9", "13"]),
    (Cifar10FullOptions(), (3, 32, 32), ["0", "3", "6", "10"]),
    pytest.param(AlexNetOptions(), (3, 227, 227), ["0", "3", "6", "8", "10", "15", "18", "20"], marks=pytest.mark.slow),
]


@pytest.mark.parametrize(("options", "shape", "names"), MODELS, ids=lambda value: type(value).__name__)
def test_slices_of_the_papers_networks_end_between_layers_or_within_large_ones(
    options: ModelOptions, shape: tuple[int, ...], names: list[str]
) -> None:
    model = FlatModel(models.make(options, input_shape=shape, classes=10, seed=1))
    assert [layer.name for layer in model.layers] == names
    for shards in (*range(1, len(names) + 1), 2 * len(names) + 1):
        config = Config(per_layer=True, shards=shards)
        bounds = parts.bounds(config, model)
        assert [start for start, _ in bounds] == [0, *(end for _, end in bounds[:-1])]
        assert bounds[-1][1] == model.size
        large = [layer.size > model.size / shards for layer in model.layers]
        cut_within = {end for _, end in bounds} - {end for _, end in bounds_of([[layer] for layer in model.layers])}
        assert all(large[first_layers(model.layers, [(end, end)])[0]] for end in cut_within)
        assert max(end - start for start, end in bounds) < 2 * model.size / shards + 1
    assert parts.bounds(Config(per_layer=True, shards=1), model) == [(0, model.size)]


def test_names_say_which_part_of_a_layer_a_slice_has() -> None:
    layers = [Layer("a", 2), Layer("b", 9), Layer("", 1)]
    assert first_layers(layers, [(0, 4), (4, 8), (8, 12)]) == [0, 1, 1]
    assert named(layers, [(0, 4), (4, 8), (8, 12)]) == [["a", "b 1/3"], ["b 2/3"], ["b 3/3", "(model)"]]
    assert named(layers, [(0, 2), (2, 11), (11, 12)]) == [["a"], ["b"], ["(model)"]]


def test_a_layer_is_cut_where_a_slice_would_be_twice_a_share_but_not_for_norms_nor_by_earlier_rules() -> None:
    model = FlatModel(models.make(MlpOptions((40, 20, 30)), input_shape=(60,), classes=10, seed=1))
    assert [layer.size for layer in model.layers] == [2440, 820, 630, 310]
    config = Config(per_layer=True, shards=3)
    assert parts.bounds(config, model) == [(0, 2440), (2440, 3260), (3260, 4200)], "1.75 of a share"
    config = replace(config, shards=4)
    whole = [(0, 2440), (2440, 3260), (3260, 3890), (3890, 4200)]
    assert parts.bounds(config, model) == [(0, 814), (814, 2440), (2440, 3260), (3260, 4200)] != whole
    assert parts.bounds(config, model, rules=2) == parts.bounds(replace(config, optimizer=LambOptions()), model) == whole
    by_slice = replace(config, clip_average=1.0, clip_average_of="slice")
    assert parts.bounds(by_slice, model) == whole


def test_a_layer_without_elements_is_not_cut() -> None:
    assert cut_large([Layer("a", 0), Layer("b", 5)], 3) == [Layer("a", 0), Layer("b", 2), Layer("b", 2), Layer("b", 1)]


def test_more_shards_than_parameters_are_refused() -> None:
    model = FlatModel(models.make(SoftmaxOptions(), input_shape=(2,), classes=2, seed=1))
    assert len(parts.bounds(Config(per_layer=True, shards=6), model)) == 6
    with pytest.raises(ConfigError, match="shards = 7: expected at most the number of parameters, 6"):
        parts.bounds(Config(per_layer=True, shards=7), model)


@given(sizes=st.lists(st.integers(1, 50), min_size=1, max_size=8), shards=st.integers(1, 8))
def test_no_other_cut_is_more_even(sizes: list[int], shards: int) -> None:
    layers = [Layer(str(at), size) for at, size in enumerate(sizes)]
    shards = min(shards, len(layers))

    def squares(edges: tuple[int, ...]) -> int:
        return sum(sum(sizes[start:end]) ** 2 for start, end in itertools.pairwise((0, *edges, len(sizes))))

    slices = cut_between(layers, shards)
    assert [layer for own in slices for layer in own] == layers
    assert all(slices)
    assert len(slices) == shards
    found = tuple(itertools.accumulate(len(own) for own in slices))[:-1]
    assert squares(found) == min(map(squares, itertools.combinations(range(1, len(sizes)), shards - 1)))


def test_equal_layers_are_dealt_out_evenly() -> None:
    lengths = [len(own) for own in cut_between([Layer(str(at), 5) for at in range(10)], 4)]
    assert sorted(lengths) == [2, 2, 3, 3]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"protocol": BackupOptions(abort=True)},
            r"per_layer = True: expected False beside protocol backup \(learners give up\)",
        ),
        ({"protocol": DownpourOptions(n_push=2)}, "protocol.n_push = 2: expected 1 beside"),
        ({"protocol": DownpourOptions(n_fetch=3)}, "protocol.n_fetch = 3: expected 1 beside"),
        ({"protocol": SspOptions(get_model_frequency=2)}, "protocol.get_model_frequency = 2: expected 1 beside"),
    ],
    ids=str,
)
def test_what_makes_no_sense_is_refused(changes: dict[str, Any], message: str) -> None:
    compatibility.check(Config(**changes))
    with pytest.raises(ConfigError, match=message):
        compatibility.check(Config(per_layer=True, **changes))


@pytest.mark.parametrize(
    "protocol",
    [
        AsyncOptions(),
        SoftsyncOptions(),
        DownpourOptions(),
        DownpourOptions(n_fetch=1),
        SspOptions(),
        HardsyncOptions(),
        BackupOptions(late="apply"),
        TimeoutOptions(),
        VersionedOptions(),
    ],
)
@pytest.mark.parametrize("stages", [{"nonfinite": "continue"}, {"nonfinite": "drop", "clip_norm": 1.0, "push_format": "bfloat16"}])
def test_what_makes_sense_is_not(protocol: Any, stages: dict[str, Any]) -> None:
    compatibility.check(Config(per_layer=True, averaging=0.9, protocol=protocol, **stages))
