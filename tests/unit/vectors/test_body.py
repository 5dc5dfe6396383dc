"""Bodies: memory that is received into, summed in, given back, and never used by two at a time."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from mpisgd.vectors import body as module
from mpisgd.vectors.body import Body, WholePool
from mpisgd.vectors.memory import SizedVector
from mpisgd.vectors.push_format import BFLOAT16, PushFormat
from mpisgd.vectors.skipped import NOTHING

SIZE = 8


def came(pool: WholePool, value: float) -> Body:
    body = pool.take()
    body.memory[:] = value if body.memory.dtype == np.float32 else words(value)
    assert body.arrive(NOTHING) == ""
    return body


def words(value: float) -> np.ndarray:
    return torch.full((SIZE,), value).to(torch.bfloat16).view(torch.int16).numpy()


def where(body: Body) -> int:
    return int(body.view.ctypes.data)


@pytest.mark.parametrize("push_format", [PushFormat(), BFLOAT16], ids=["float32", "bfloat16"])
def test_what_is_kept_stays_as_it_is(push_format: PushFormat) -> None:
    """Whatever comes, is given back or summed in the meantime."""
    pool = WholePool(torch.zeros(SIZE), push_format)
    kept = [came(pool, float(value)) for value in range(4)]
    for _ in range(2):
        came(pool, 99.0).release()
    for value, body in enumerate(kept):
        assert body.view.tolist() == [value] * SIZE
        body.release()
    assert (pool.out, pool.made) == (0, 5)


def test_memory_given_back_last_is_taken_first() -> None:
    pool = WholePool(torch.zeros(SIZE))
    one, other = came(pool, 1.0), came(pool, 2.0)
    places = where(one), where(other)
    one.release()
    other.release()
    other.release()  # and once only
    assert (where(pool.take()), where(pool.take())) == places[::-1]
    assert pool.made == 2


def test_a_gradient_is_given_back_with_its_last_element() -> None:
    pool = WholePool(torch.zeros(SIZE))
    body = came(pool, 1.0)
    body.release(SIZE - 1)
    assert (pool.out, body.chunk(slice(2, 4)).tolist()) == (1, [1.0, 1.0])
    body.release(SIZE)
    assert pool.out == 0


def test_a_sum_takes_no_room_of_gradients_before_their_turn(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "PARKED_NBYTES", 2 * 4 * SIZE)
    pool = WholePool(torch.zeros(SIZE))
    first = came(pool, 1.0)
    assert pool.has_room
    second = came(pool, 2.0)
    assert not pool.has_room
    vector, view, home = first.adopt()
    assert pool.has_room
    assert home is not None
    assert np.shares_memory(view, vector.numpy())
    home.append((vector, view))
    second.lose()
    assert pool.has_room
    assert np.shares_memory(pool.take().memory, view)


def test_a_lost_gradients_memory_is_never_used_again() -> None:
    for push_format in (PushFormat(), BFLOAT16):
        pool = WholePool(torch.zeros(SIZE), push_format)
        torn = pool.take()
        torn.lose()
        torn.release()
        assert not any(np.shares_memory(pool.take().memory, torn.memory) for _ in range(3))


@pytest.mark.parametrize("push_format", [PushFormat(), BFLOAT16], ids=["float32", "bfloat16"])
def test_gradients_that_come_at_once_have_a_lasting_place(push_format: PushFormat) -> None:
    pool = WholePool(torch.zeros(SIZE), push_format)
    room, bodies = pool.row(3)
    for start in (1.0, 10.0):
        for place in range(3):
            room[place * SIZE : (place + 1) * SIZE] = start + place if push_format.name == "float32" else words(start + place)
        for place, body in enumerate(bodies):
            assert body.arrive(NOTHING) == ""
            assert body.squared is None
            assert body.view.tolist() == [start + place] * SIZE
            assert body.is_finite()
        vector, view, home = bodies[0].adopt()
        if home is not None:
            home.append((vector, view))
        for body in bodies[1:]:
            body.release()
    assert (pool.out, pool.made) == (0, 0 if push_format.name == "float32" else 3)
    place = np.ones(SIZE, np.float32)
    assert np.shares_memory(pool.at(place).memory, place)


def test_of_a_size_there_is_nothing_to_look_at() -> None:
    pool = module.Pool(SizedVector(SIZE))
    body = pool.take()
    assert (pool.nbytes, pool.has_room, body.arrive(NOTHING), body.is_finite()) == (4 * SIZE, True, "", True)
    room, bodies = pool.row(3)
    assert (room.nbytes, len(bodies), pool.at(room)) == (12 * SIZE, 3, body)
    body.release()
    body.lose()
