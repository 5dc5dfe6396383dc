"""Groups of parameters with their own optimiser settings: segments of the flat vector.

A slice may cut a segment, even a layer: optimisers work element by element. LARS and LAMB do not, and have a segment per parameter.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from fnmatch import fnmatchcase
from typing import NamedTuple

from mpisgd.base.errors import ConfigError
from mpisgd.config import GroupOptions

_LISTED = 12


class Segment(NamedTuple):
    """Elements `start` to `stop` of a vector. `rate`: factor of the learning rate; `weight_decay`: None = the optimiser's."""

    start: int
    stop: int
    rate: float = 1.0
    weight_decay: float | None = None


def segments_of(options: GroupOptions, sizes: Mapping[str, int], each_parameter: bool = False) -> list[Segment]:
    """Return a flat vector's segments, in order, from sizes by parameter name.

    There are none without groups, unless `each_parameter` has its own; else equal neighbours merge. Raises ConfigError if a pattern
    decides for no parameter.
    """
    if not (options.rate or options.weight_decay or each_parameter):
        return []
    rates, decays = _decided("rate", options.rate, sizes), _decided("weight_decay", options.weight_decay, sizes)
    found: list[Segment] = []
    start = 0
    for name, size in sizes.items():
        each = Segment(start, start + size, rates.get(name, 1.0), decays.get(name))
        start += size
        if found and found[-1][2:] == each[2:] and not each_parameter:
            each = each._replace(start=found.pop().start)
        found.append(each)
    return found


def within(segments: Sequence[Segment], start: int, stop: int) -> Iterator[Segment]:
    """Yield parts of segments inside a slice, counted from its begin."""
    for each in segments:
        if each.start < stop and start < each.stop:
            yield each._replace(start=max(each.start, start) - start, stop=min(each.stop, stop) - start)


def in_pieces(segments: Sequence[Segment], pieces: Sequence[tuple[int, int]]) -> list[Segment]:
    """Cut segments at the borders of pieces, as each piece's owner would step."""
    whole = segments or [Segment(start, stop) for start, stop in pieces]
    cut = ((start, each) for start, stop in pieces for each in within(whole, start, stop))
    return [each._replace(start=start + each.start, stop=start + each.stop) for start, each in cut] or list(segments)


def _decided(field: str, values: Mapping[str, float], names: Mapping[str, int]) -> dict[str, float]:
    """Return each parameter's value: the last matching pattern decides."""
    deciding = {name: pattern for name in names for pattern in values if fnmatchcase(name, pattern)}
    for pattern, value in values.items():
        if pattern not in deciding.values():
            by_others = any(fnmatchcase(name, pattern) for name in names)
            why = (
                "a later pattern decides for all parameters of this pattern"
                if by_others
                else f"this pattern matches none of {_listed(list(names))}"
            )
            raise ConfigError(f"groups.{field}[{pattern!r}] = {value!r}: expected a pattern of parameters' names; {why}")
    return {name: values[pattern] for name, pattern in deciding.items()}


def _listed(names: Sequence[str]) -> str:
    return ", ".join(names[:_LISTED]) + (f" and {len(names) - _LISTED:,} more" if len(names) > _LISTED else "")
