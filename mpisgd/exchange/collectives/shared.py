"""Allreduce in memory shared by the ranks of a node: no slice is sent or copied [Chen16 5, 6].

            each rank
calculate   the gradient at the shared weights, into its own slot
meet        all slots are full, all headers told
update      its slice, in place: the sum over all slots in the order of learner_id
meet        all slices are new; slots may be written again
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from mpisgd.comm.communicator import Communicator, Part, Team
from mpisgd.comm.messages import LAYOUTS, Fields
from mpisgd.exchange.collectives.bucket_channel import BucketChannel
from mpisgd.exchange.collectives.team_channel import TeamChannel
from mpisgd.exchange.roles import Roles
from mpisgd.gradient.aggregate import SharedMemory
from mpisgd.vectors.computing import Travels, Updates

_WORD = 8
_ROOM = max(-(-layout.nbytes // _WORD) for layout in LAYOUTS.values())
"""Words of a header."""


class SharedTeam(Team):
    """All learners, with gradients and updates in shared memory.

    `gradient`, `update`: over (parameters,) and (slice,) float32, or sizes alone. Raises ProtocolError: a gradient outside shared
    memory.
    """

    @staticmethod
    def words_of(places: int) -> int:
        """Return a team's shared words."""
        return 2 * places * _ROOM

    def __init__(self, shared: SharedMemory, gradient: Travels, update: Updates, bounds: list[tuple[int, int]]) -> None:
        shared.require(gradient)
        self._segment = segment = shared.segment
        self._gradient = gradient
        self._update = update
        self._bounds = bounds
        self._settled = not gradient.memory.has_numbers
        self._told = shared.words.view(np.uint8).reshape(2, segment.places, _ROOM * _WORD)
        self._turn = 0

    def tell(self, tag: int, fields: Fields) -> list[Fields]:
        """Return all headers. Late ranks may read during the next call, not the call after: two buffers alternate."""
        layout, told = LAYOUTS[tag], self._told[self._turn]
        told[self._segment.place, : layout.nbytes] = np.frombuffer(layout.pack(fields), np.uint8)
        self._turn = 1 - self._turn
        self._segment.meet()
        return [layout.unpack(bytearray(each[: layout.nbytes]), place) for place, each in enumerate(told)]

    def exchange(self, vector: Any, received: Any) -> None:
        """Do nothing: the slots are full since `tell`."""

    def share(self, own: Any, vector: Any) -> None:
        """Put the first weights into shared memory, once all ranks have moved; later weights are made there."""
        if not self._settled:
            start, end = self._bounds[self._segment.place]
            self._update.live_in(self._gradient.memory.weights[start:end])
            self._settled = True

    def finish(self, shared: None, meanwhile: Callable[[], None], arrived: Callable[[slice], None] | None = None) -> None:
        """Meet, then call `meanwhile`: others may sum this rank's slot until then."""
        self._segment.meet()
        meanwhile()

    def disband(self) -> None:
        self._update.renew_weights()
        self._gradient.move_out()
        self._segment.disband()


def team_channel(  # noqa: PLR0913 - each by name
    wire: Communicator,
    roles: Roles,
    learner_id: int,
    gradient: Travels,
    update: Updates,
    bounds: list[tuple[int, int]],
    shared: SharedMemory | None = None,
    *,
    rounded: bool = False,
    buckets: Sequence[Part] = (),
) -> TeamChannel:
    """Return both ends of a learner doubling as a shard.

    `rounded`: weights are gathered as bfloat16; `buckets`: travelling parts of slices.
    """
    team: Team
    if shared is not None:
        own, team = slice(*bounds[learner_id]), SharedTeam(shared, gradient, update, bounds)
        row = None, [update.bodies.at(slot.gradients[own]) for slot in shared.slots]
    else:
        team, row = wire.team(roles.learner_ranks, bounds, gradient.memory.cuts), update.bodies.row(roles.lambda_)
    named: dict[str, Any] = {"team": team, "memory": gradient.memory, "row": row, "rounded": rounded}
    if buckets:
        return BucketChannel(wire, roles, learner_id, bounds[learner_id], **named, buckets=buckets)
    return TeamChannel(wire, roles, learner_id, bounds[learner_id], **named)
