"""The calls that join the pieces of a model: what they compute, that each fits its backward pass, and what is refused."""

from __future__ import annotations

import re
import threading
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.nn import functional

from mpisgd import models
from mpisgd.base.errors import ConfigError
from mpisgd.config import Config, LocalOptions, MlpOptions, ModelOptions, SpeechOptions
from mpisgd.exchange.roles import of_job
from mpisgd.job import parts
from mpisgd.job.parts import UserObjects
from mpisgd.job.tensors import Tensors, check_piece, pieces_needed_by
from mpisgd.models.in_pieces import Needed
from mpisgd.models.interleaved import Interleaved
from mpisgd.models.partition import Partition
from mpisgd.pipeline.rounds import Rounds
from mpisgd.vectors.flat import FlatModel
from tests.effort import examples


def partitions(places: int) -> list[Partition]:
    return [Partition(place, places) for place in range(places)]


def together(places: int, call: Callable[[Partition], Any]) -> list[Any]:
    own = partitions(places)
    return Interleaved(own).run([lambda partition=partition: call(partition) for partition in own])


# --------------------------------------------------------------------------------------------------------- what they compute


@pytest.mark.deeper
@given(st.data(), st.integers(1, 5), st.integers(1, 9), st.sampled_from([-1, 0, 1]))
@settings(max_examples=examples(240, of=8), deadline=None)
def test_pieces_of_a_tensor_are_what_they_are_in_it(data: st.DataObject, places: int, most: int, dim: int) -> None:
    whole = torch.randn(places * 2 + most, places * 2 + most)
    halo = data.draw(st.integers(0, 2))

    def call(partition: Partition) -> tuple[Tensor, Tensor, Tensor]:
        share = partition.share(whole.shape[dim])
        own = whole.narrow(dim, share.start, len(share))
        return partition.exchange(own, halo, dim), partition.gather(own, dim), partition.sum(whole[partition.place])

    with torch.no_grad():
        found = together(places, call)
    padded = torch.cat([(zeros := torch.zeros_like(whole.narrow(dim, 0, halo))), whole, zeros], dim)
    for partition, (bordered, gathered, total) in zip(partitions(places), found, strict=True):
        share = partition.share(whole.shape[dim])
        assert torch.equal(bordered, padded.narrow(dim, share.start, len(share) + 2 * halo))
        assert torch.equal(gathered, whole)
        in_order = whole[0].clone()
        for other in whole[1:places]:
            in_order += other
        assert torch.equal(total, in_order), "summed in the order of pieces"


@pytest.mark.deeper
@given(st.integers(1, 5), st.sampled_from(["exchange", "gather", "sum"]), st.integers(0, 2**31))
@settings(max_examples=examples(240, of=8), deadline=None)
def test_each_call_is_the_adjoint_of_its_backward_pass(places: int, name: str, seed: int) -> None:
    """<A x, y> = <x, A' y>, over all pieces together, whatever the others do with what they have."""
    generator = torch.Generator().manual_seed(seed)
    sizes = [3 + (0 if name == "sum" else place % 3) for place in range(places)]
    inputs = [torch.randint(-9, 9, (2, size), generator=generator).double() for size in sizes]

    def call(partition: Partition) -> tuple[Tensor, Tensor]:
        own = inputs[partition.place].clone().requires_grad_()
        output = partition.exchange(own, 2) if name == "exchange" else getattr(partition, name)(own)
        weights = torch.randint(-9, 9, output.shape, generator=torch.Generator().manual_seed(seed + partition.place)).double()
        output.backward(weights)
        assert own.grad is not None
        return (output * weights).sum(), (own * own.grad).sum()

    forward, backward = zip(*together(places, call), strict=True)
    assert sum(forward) == sum(backward)


def fill(model: nn.Module, whole: nn.Sequential, kind: str) -> None:
    """Give the pieces the weights of the unsplit network."""
    own: Any
    for piece in model.children():
        layers: list[Any] = [layer for layer in whole if any(True for _ in layer.parameters())]
        for at, own in enumerate(piece.layers):  # type: ignore[arg-type, union-attr]
            if kind == "local":
                columns = slice(piece.own.start, piece.own.stop)  # type: ignore[union-attr]
                own.weight.copy_(layers[at].weight[:, columns])
                own.bias.copy_(layers[at].bias[..., columns])
                continue
            inner, partition = own.layer, piece.partition
            if at % 2 == 0:
                share = partition.share(len(layers[at].weight))  # type: ignore[union-attr, operator]
                inner.weight.copy_(layers[at].weight[share.start : share.stop])
                inner.bias.copy_(layers[at].bias[share.start : share.stop])
            else:
                share = partition.share(layers[at].weight.shape[1])  # type: ignore[union-attr, operator]
                inner.weight.copy_(layers[at].weight[:, share.start : share.stop])
                if inner.bias is not None:
                    inner.bias.copy_(layers[at].bias)
        if kind == "local":
            rows, _, channels, *_ = layers[-2].weight.shape
            weight = layers[-1].weight.view(len(layers[-1].weight), channels, rows, -1)[..., columns]
            piece.last.weight.copy_(weight.flatten(1))  # type: ignore[union-attr, operator]
            if piece.last.bias is not None:  # type: ignore[union-attr]
                piece.last.bias.copy_(layers[-1].bias)  # type: ignore[union-attr, operator]


@pytest.mark.parametrize("places", [2, 3, 5])
@pytest.mark.parametrize(
    ("kind", "options", "shape"),
    [
        ("speech", SpeechOptions(hidden=(10, 8, 9, 7)), (3, 4)),
        ("speech", SpeechOptions(hidden=(10, 8, 9)), (3, 4)),
        ("local", LocalOptions(channels=(4, 3)), (2, 4, 10)),
        ("local", LocalOptions(channels=(2,), field=5), (1, 3, 11)),
    ],
)
def test_pieces_are_the_unsplit_network(kind: str, options: ModelOptions, shape: tuple[int, ...], places: int) -> None:
    """Loss and gradient of the papers' shapes, in pieces, beside torch's on the whole: within what rounding otherwise makes."""
    config = Config(model=options, group_size=places, group_form="partition", shards=places, mu=8)
    drawn = torch.Generator().manual_seed(1)
    inputs, targets = torch.randn(16, *shape, generator=drawn), torch.randint(0, 6, (16,), generator=drawn)
    user_objects = UserObjects(data=((inputs, targets), (inputs, targets)))
    tensors = Tensors.load(config, user_objects, parts.load_data(config, user_objects), 1)
    whole: Any = models.make(options, input_shape=shape, classes=6, seed=3)
    sizes = [len(list(piece.parameters())) for piece in tensors.model.module.children()]
    assert len(sizes) == places and sum(each.numel() for each in whole.parameters()) == tensors.model.size
    with torch.no_grad():
        fill(tensors.model.module, whole, kind)
    gradient = tensors.gradient(0)
    loss = gradient.compute(0)
    batch = torch.as_tensor(tensors.sampling.indices(0, 0))
    expected = functional.cross_entropy(whole(inputs[batch]), targets[batch])
    expected.backward()
    assert loss == pytest.approx(expected.item(), rel=1e-6)
    twin = models.make(options, input_shape=shape, classes=6, seed=3, places=places)
    flat = FlatModel(twin)
    for each in whole.parameters():
        each.data = each.grad
    with torch.no_grad():
        fill(twin, whole, kind)
    assert flat.weights.norm() > 0
    torch.testing.assert_close(tensors.model.gradients, flat.weights, rtol=1e-5, atol=1e-6)


def test_the_papers_speech_model_has_42_million_parameters() -> None:
    with torch.device("meta"):
        model = models.make(SpeechOptions(), input_shape=(11, 40), classes=8192, seed=1)
    assert sum(each.numel() for each in model.parameters()) == 41_777_152


# --------------------------------------------------------------------------------------------------------------- the turns


class Draws(nn.Module):
    """Draws before and after a call, and in the backward pass of a second one."""

    def __init__(self, partition: Partition) -> None:
        super().__init__()
        self.partition, self.layer, self.drop = partition, nn.Linear(4, 6), nn.Dropout(0.5)

    def forward(self, inputs: Tensor) -> Tensor:
        passed = self.partition.sum(self.drop(self.layer(self.drop(inputs))))
        output: Tensor = self.partition.gather(self.drop(passed)[:, : 1 + self.partition.place])
        return output


def of_pieces(places: int, **options: Any) -> Config:
    return Config(**{"group_size": places, "group_form": "partition", "shards": places, "mu": 4, **options})


def tensors_of(factory: Any, needed: Needed | None = None, **options: Any) -> Tensors:
    """Of all pieces, or those that are `needed`."""
    inputs, targets = torch.randn(16, 4, generator=torch.Generator().manual_seed(1)), torch.arange(16) % 3
    config = of_pieces(**{"places": options.get("group_size", 2), **options})
    user_objects = UserObjects(model=factory, data=((inputs, targets), (inputs, targets)))
    data = parts.load_data(config, user_objects)
    meta = parts.meta_of(data, config)
    model, loss = parts.build_model(config, meta, user_objects, needed=needed), parts.load_loss(config, user_objects)
    return Tensors(config, meta, loss, model, parts.make_sampling(config, meta, 2), data)


def test_what_a_piece_draws_is_its_own() -> None:
    """As if each had its process: the other pieces of a turn draw in between."""
    torch.manual_seed(5)
    alone = [torch.rand(3) for _ in range(2)]

    def call(partition: Partition) -> list[Tensor]:
        torch.manual_seed(5)
        first = torch.rand(3)
        with torch.no_grad():
            partition.sum(first)
        return [first, torch.rand(3)]

    for found in together(3, call):
        assert all(map(torch.equal, found, alone))
    one, other = (tensors_of(Draws, seed=seed).gradient(0).compute(0) for seed in (1, 1))
    assert one == other != tensors_of(Draws, seed=2).gradient(0).compute(0)


def test_what_a_piece_raises_goes_through() -> None:
    def call(partition: Partition) -> Tensor:
        if partition.place == 1:
            raise KeyError("of piece 1")
        return partition.sum(torch.zeros(2))

    with pytest.raises(KeyError, match="of piece 1"):
        together(3, call)


# ----------------------------------------------------------------------------------------------------------------- refused


class Piece(nn.Module):
    def __init__(self, partition: Partition, forward: Callable[[Partition, Tensor], Tensor]) -> None:
        super().__init__()
        self.partition, self.layer, self.how = partition, nn.Linear(4, 3), forward

    def forward(self, inputs: Tensor) -> Tensor:
        return self.how(self.partition, self.layer(inputs))


def unequal(partition: Partition, passed: Tensor) -> Tensor:
    return partition.sum(partition.sum(passed) if partition.place == 0 else passed)


def unused(partition: Partition, passed: Tensor) -> Tensor:
    partition.gather(passed)
    return partition.sum(passed)


def unused_by_one(partition: Partition, passed: Tensor) -> Tensor:
    other = partition.sum(passed)
    return partition.sum(passed) + (other if partition.place else 0 * other.detach())


shared = nn.Linear(4, 3)


def tied(partition: Partition) -> nn.Module:
    return nn.Sequential(shared, Piece(partition, lambda _, passed: passed))


@pytest.mark.parametrize(
    ("how", "refused"),
    [
        (unequal, "piece . makes call 1 of the partition, and piece . does not make this call there: expected the same calls"),
        (unused, "piece 0 of 2 made 2 calls of the partition, and in the backward pass 1: expected the loss to use the result"),
        (unused_by_one, "piece . makes call 0 of the partition in the backward pass, and piece|piece 0 of 2 made 2 calls"),
        (lambda partition, passed: passed, "no call of its partition joins all pieces: expected at least one gather or sum"),
        (
            lambda partition, passed: partition.sum(passed) * (1 + partition.place),
            "piece 1 computed the loss .*, piece 0 .*: expected the same whole output in all pieces",
        ),
        (lambda partition, passed: partition.sum(passed) * torch.rand(1), "piece 1 computed the loss"),
        (
            lambda partition, passed: partition.sum(partition.exchange(passed, 4)),
            r"exchange: halo = 4: piece 0 of 2 has a tensor of shape \(4, 3\): expected a halo from 0 to the tensor's size along"
            " dim -1, 3",
        ),
        (lambda partition, passed: partition.sum(passed[:, : 1 + partition.place]), "fails at the first mini-batch"),
        (
            lambda partition, passed: partition.sum(passed).detach(),
            "piece 0 of 2 made 1 calls|does not depend on the model's weights",
        ),
    ],
)
def test_pieces_that_do_not_go_together_are_refused(how: Any, refused: str) -> None:
    """In one process, and by ranks that have one piece each, of which none waits in vain."""

    def factory(partition: Partition) -> nn.Module:
        return Piece(partition, how)

    with pytest.raises(ConfigError, match=refused):
        tensors_of(factory).check()
    found = checked_apart(factory)
    assert any(isinstance(each, ConfigError) and re.search(refused, str(each)) for each in found), found
    assert all(each is None or isinstance(each, ConfigError) for each in found)


class Meeting:
    """What ranks give to each other all at once, where they are threads."""

    def __init__(self, size: int) -> None:
        self.barrier, self.given = threading.Barrier(size, timeout=20), list[Any]([None] * size)

    def end_of(self, rank: int) -> Any:
        def alltoall(given: list[Any]) -> list[Any]:
            self.given[rank] = given
            self.barrier.wait()
            taken = [each[rank] for each in self.given]
            self.barrier.wait()
            return taken

        return SimpleNamespace(rank=rank, size=len(self.given), alltoall=alltoall)


def checked_apart(factory: Any, places: int = 2, **options: Any) -> list[Any]:
    """What comes of the check on each of so many ranks: the loss, None where another has failed, or what is raised."""
    config, found, meeting = of_pieces(places, **options), list[Any]([None] * places), Meeting(places)
    roles = of_job(config, "n" * 2 * places)
    ranks = [tensors_of(factory, pieces_needed_by(config, roles, places + at), **options) for at in range(places)]

    def check(place: int) -> None:
        rounds = Rounds(meeting.end_of(place))
        try:
            found[place] = rounds.run(lambda: check_piece(ranks[place], place, rounds))
        except ConfigError as error:
            found[place] = error

    threads = [threading.Thread(target=check, args=(place,)) for place in range(places)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return found


def test_ranks_with_a_piece_each_come_to_the_loss_of_all() -> None:

    def factory(partition: Partition) -> nn.Module:
        return Piece(partition, lambda partition, passed: partition.sum(partition.exchange(passed, 1).tanh()))

    assert checked_apart(factory) == [tensors_of(factory).check()] * 2


def test_a_rank_makes_its_own_piece_alone() -> None:
    """To the same bits, also where a factory cannot do without values; the evaluator makes all."""
    made = list[tuple[int, bool]]()

    def factory(partition: Partition) -> nn.Module:
        piece = Draws(partition)
        made.append((partition.place, not piece.layer.weight.is_meta))
        return piece

    def with_values(partition: Partition) -> nn.Module:
        piece = Draws(partition)
        assert len(piece.layer.weight.detach().numpy())
        return piece

    config, whole = of_pieces(3, evaluator=True), tensors_of(Draws, group_size=3, shards=3)
    roles, weights = of_job(config, "n" * 10), dict(whole.model.module.named_parameters())
    for rank in range(10):
        needed, place = pieces_needed_by(config, roles, rank), rank % 3
        for each in (factory, with_values):
            made.clear()
            tensors = tensors_of(each, needed=needed, group_size=3, shards=3)
            assert tensors.model.fingerprint == whole.model.fingerprint and tensors.stages == whole.stages
            for name, parameter in tensors.model.module.named_parameters():
                mine = rank == 9 or name.startswith(str(place))
                assert mine != parameter.is_meta and (not mine or torch.equal(parameter, weights[name]))
            if each is factory:
                assert [at for at, values in made if values] == ([0, 1, 2] if rank == 9 else [place])
    tensors = tensors_of(Draws, needed=pieces_needed_by(config, roles, 3), group_size=3, shards=3)
    assert tensors.partly is not None
    tensors.partly.complete()
    assert all(torch.equal(parameter, weights[name]) for name, parameter in tensors.model.module.named_parameters())


@pytest.mark.parametrize(
    ("model", "options", "refused"),
    [
        (lambda: nn.Linear(4, 3), {}, "group_form = 'partition': expected a factory with a parameter `partition`, model has none"),
        (lambda partition: "piece", {}, "model: piece 0 of 2 is str, expected a torch.nn.Module"),
        (lambda partition: nn.ReLU(), {}, "model: piece 0 of 2 has no parameters to train"),
        (tied, {}, "piece 1 of 2: parameter 0.weight is in piece 0, too: expected each parameter in one piece"),
        (None, {"model": MlpOptions()}, "model 'mlp' has no pieces, expected 'speech' or 'local', or a factory of your own"),
        (None, {"model": SpeechOptions(hidden=(1,))}, "group_size = 2: expected at most the units of a layer, 1"),
        (None, {"model": LocalOptions()}, r"model = 'local': inputs of shape \(4,\), expected \(channels, height, width\)"),
    ],
)
def test_models_that_have_no_such_pieces_are_refused(model: Any, options: dict[str, Any], refused: str) -> None:
    with pytest.raises(ConfigError, match=refused):
        tensors_of(model, **options)


def test_options_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"model\.field = 2: expected an odd number >= 1"):
        LocalOptions(field=2)
    with pytest.raises(ConfigError, match=r"model.channels = \(\): expected positive numbers"):
        LocalOptions(channels=())
    with pytest.raises(ConfigError, match=r"model.hidden = \(0,\): expected positive numbers"):
        SpeechOptions(hidden=(0,))


def test_a_call_outside_of_a_pass_is_refused() -> None:
    with pytest.raises(ConfigError, match="piece 1 of 2 made a call outside of a pass of the model"):
        Partition(1, 2).sum(torch.zeros(2))
    assert torch.equal(Partition().exchange(torch.ones(2), 1), torch.tensor([0.0, 1.0, 1.0, 0.0])), "one alone needs no others"
