"""An allreduce in memory that the ranks of one node share: no slice is sent, or copied [Chen16 5, 6].

                each rank
    calculate   the gradient at the weights, which lie there once for all, into a slot of its own
    meet        all slots are full, and all headers are told
    update      its slice: the sum over all slots, in the order of learner_id, and the weights where they lie
    meet        the weights of all slices are new; the slots may be written again

To `channel.TeamChannel` it is a team like one that sends (`communicator.Team`), with the same bits.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from mpisgd.comm.communicator import Communicator, Part, Team
from mpisgd.comm.messages import LAYOUTS, Fields
from mpisgd.exchange.collectives.buckets import BucketChannel
from mpisgd.exchange.collectives.channel import TeamChannel
from mpisgd.exchange.collectives.held import Gathered
from mpisgd.exchange.roles import Roles
from mpisgd.gradient.aggregate import SharedMemory
from mpisgd.vectors.computing import Travels, Updates

_WORD = 8


class SharedTeam(Team):
    """All learners, each with its gradient, which lies in the shared memory, and its shard's update, which moves there.

    Args:
        shared: by all of them, in the order of learner_id.
        gradient, update: of this rank; over (parameters,) and (slice,) float32, or what stands for them where only sizes travel.
        bounds: the slice of each.

    Raises ProtocolError for a gradient in memory of its own.
    """

    def __init__(self, shared: SharedMemory, gradient: Travels, update: Updates, bounds: list[tuple[int, int]]) -> None:
        shared.require(gradient)
        self._node = node = shared.node
        self._slots = shared.slots
        self._gradient = gradient
        self._update = update
        self._bounds = bounds
        self._settled = not gradient.memory.has_numbers
        room = max(-(-layout.nbytes // _WORD) for layout in LAYOUTS.values())
        self._told = node.words(2 * node.places * room).view(np.uint8).reshape(2, node.places, room * _WORD)
        self._turn = 0

    def tell(self, tag: int, fields: Fields) -> list[Fields]:
        """The headers of all. Who comes late reads them still when others tell the next ones, but not the ones after."""
        layout, told = LAYOUTS[tag], self._told[self._turn]
        told[self._node.place, : layout.nbytes] = np.frombuffer(layout.pack(fields), np.uint8)
        self._turn = 1 - self._turn
        self._node.meet()
        return [layout.unpack(bytearray(each[: layout.nbytes]), place) for place, each in enumerate(told)]

    def exchange(self, vector: Any, received: Any) -> None:
        """All have met in `tell`: the slots are full."""

    def share(self, own: Any, vector: Any) -> None:
        """The new weights lie where all look for them; the first ones are put there, now that all have moved."""
        if not self._settled:
            start, end = self._bounds[self._node.place]
            self._update.live_in(self._gradient.memory.weights[start:end], [slot.gradients[start:end] for slot in self._slots])
            self._settled = True

    def finish(self, shared: None, meanwhile: Callable[[], None], arrived: Callable[[slice], None] | None = None) -> None:
        """Before all have met, others may yet sum what lies in this rank's slot. Nothing is gathered."""
        self._node.meet()
        meanwhile()

    def disband(self) -> None:
        """Weights and model move to memory of their own; the shared memory goes."""
        self._update.renew_weights()
        self._gradient.move_out()
        self._node.disband()


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
    """Both ends of a learner that is a shard, too: slices are sent, or lie in memory that all learners share.

    `rounded`: weights are gathered as bfloat16; `buckets`: slices leave in these parts.
    """
    team: Team
    memory, held = gradient.memory, None
    if shared is not None:
        team, received = SharedTeam(shared, gradient, update, bounds), None
    else:
        team, received = wire.team(roles.learner_ranks, bounds, memory.cuts), update.make_room(roles.lambda_)
    if rounded:
        start, end = bounds[learner_id]
        held = Gathered(memory.weights, memory.weights[start:end].nbytes)
    named: dict[str, Any] = {"team": team, "memory": memory, "received": received, "held": held}
    if buckets:
        return BucketChannel(wire, roles, learner_id, bounds[learner_id], **named, buckets=buckets)
    return TeamChannel(wire, roles, learner_id, bounds[learner_id], **named)
