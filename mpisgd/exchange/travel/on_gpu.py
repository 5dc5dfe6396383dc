"""Vectors in a GPU's memory that ranks of a node share, by handles between processes.

The first rank allocates, on the shards' GPU. Learners there compute in place (`in_place.py`), others in their own memory, and copy
by peer access. A header leaves once the sender's GPU is done.
"""

from __future__ import annotations

import contextlib
import pickle
from multiprocessing.reduction import ForkingPickler

import numpy as np
import torch
from torch import Tensor

from mpisgd.base.errors import ConfigError
from mpisgd.comm.communicator import Communicator, Segment
from mpisgd.exchange.roles import Roles
from mpisgd.exchange.travel.in_place import OUTBOXES, ranks_of
from mpisgd.gradient.aggregate import SharedMemory
from mpisgd.vectors.memory import Memory, wait_for

_TOLD_NBYTES = 2**14
"""Room for a handle."""
_ALIGNED = 128
"""Elements; kernels load several at once."""
_IMPOSSIBLE = RuntimeError, OSError, ValueError, AttributeError  # torch's


class GpuSegment(Segment):
    """A segment of the host, and `vectors` on a GPU."""

    def __init__(self, words: Segment, vectors: Tensor) -> None:
        self.place, self.places = words.place, words.places
        self._words = words
        self._vectors = vectors

    def bytes_of(self, place: int) -> np.ndarray:
        return self._words.bytes_of(place)

    def meet(self) -> None:
        wait_for(self._vectors)
        self._words.meet()

    def disband(self) -> None:
        del self._vectors
        self._words.disband()


def share(wire: Communicator, roles: Roles, words: int, size: int, device: str) -> SharedMemory:
    """Return memory for `size` parameters, for a rank on `device`; collective. Raises ConfigError: ranks that cannot share."""
    ranks, alone = ranks_of(roles), roles.shard_ranks == roles.learner_ranks
    outboxes, room = 1 if alone else OUTBOXES, -(-size // _ALIGNED) * _ALIGNED
    segment = wire.segment(ranks, [_TOLD_NBYTES + 8 * words * (place == 0) for place in range(len(ranks))])
    vectors: Tensor | None = None
    if segment is not None:
        serves = ranks[segment.place] in roles.shard_ranks
        vectors = _vectors(segment, (1 + outboxes * len(roles.learner_ranks)) * room, torch.device(device), serves=serves)
    if segment is None or vectors is None:
        if segment is not None:
            segment.disband()
        raise ConfigError("the ranks of a node cannot share a GPU's memory: expected MPISGD_TRAVEL=in-place, or messages")
    rooms = iter([vectors[start : start + size] for start in range(0, len(vectors), room)])
    weights, slots = next(rooms), []
    for rank in ranks:
        own = [next(rooms) for _ in range(outboxes)] if rank in roles.learner_ranks else [weights[:0]]
        slots.append(Memory(weights, own[0], shared=True, outboxes=() if alone else own))
    told = segment.bytes_of(0)[_TOLD_NBYTES:].view(np.float64)
    return SharedMemory(GpuSegment(segment, vectors), told, slots)


def _vectors(segment: Segment, size: int, device: torch.device, *, serves: bool) -> Tensor | None:
    """Return the first rank's zeros, (size,) float32, on all ranks, or on none."""
    vectors: Tensor | None = None
    own, told = (segment.bytes_of(place)[:_TOLD_NBYTES] for place in (segment.place, 0))
    with contextlib.suppress(*_IMPOSSIBLE):
        if segment.place == 0:
            vectors = torch.zeros(size, device=device)
            wait_for(vectors)
            handle = pickle.dumps((_name(device), device.index, bytes(ForkingPickler.dumps(vectors))))  # torch's, for processes
            own[8 : 8 + len(handle)] = np.frombuffer(handle, np.uint8)
            own[0] = 1
    segment.meet()
    with contextlib.suppress(*_IMPOSSIBLE):
        if segment.place > 0 and told[0]:
            name, index, handle = pickle.loads(told[8:].tobytes())
            if _reaches(device, index, name, serves=serves):
                vectors = pickle.loads(handle)
                own[0] = 1
    segment.meet()
    return vectors if all(segment.bytes_of(place)[0] for place in range(segment.places)) else None


def _name(device: torch.device) -> str:
    return str(torch.cuda.get_device_properties(device).uuid)


def _reaches(device: torch.device, index: int, name: str, *, serves: bool) -> bool:
    """Return whether the GPU of this name has this number here, and is this rank's own, or a learner's peer."""
    if index >= torch.cuda.device_count() or _name(torch.device("cuda", index)) != name:
        return False
    return device.index == index or (not serves and torch.cuda.can_device_access_peer(device, index))
