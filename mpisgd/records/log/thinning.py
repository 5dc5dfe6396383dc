"""Which rows a table of a bounded log keeps (`log.max_bytes`): integers alone, so that writer and reader agree without a word.

k is 1 at first, and four times what it was whenever half of the room that was left is filled; each row that is kept stands for
itself and the k - 1 rows after it. So half of the room has every row, a quarter every fourth, an eighth every sixteenth: r rows of
room are enough for r^2 / 2 rows and more. With twice for four times they would be for r log2(r) / 2: 10^9 rows would need 37
million rows of room. After the last row of room none is kept.
"""

from __future__ import annotations

import bisect

import numpy as np

_GROWS = 4
UNBOUNDED = 1 << 62
"""Room that no table fills."""


class Thinning:
    """The rule for one table. Rows are numbered as they come, 0, 1, 2 ...; those that are kept have places 0, 1, 2 ...

    Args:
        room: so many rows may be kept.

    Attributes:
        whole: so many rows come before the first that may be left out.
    """

    def __init__(self, room: int) -> None:
        self._places: list[int] = []
        """Of the first row of each stretch that has one k; then where the last stretch ends."""
        self._numbers: list[int] = []
        self._every: list[int] = []
        place = number = 0
        every = 1
        while place < room and number < UNBOUNDED:
            self._places.append(place)
            self._numbers.append(number)
            self._every.append(every)
            kept = (room - place + 1) // 2
            place, number, every = place + kept, number + kept * every, every * _GROWS
        self._places.append(place)
        self._numbers.append(number)
        self.whole = self._places[min(1, len(self._places) - 1)]

    def kept(self, number: int) -> int:
        """How many rows are kept of the first `number`."""
        at = bisect.bisect_right(self._numbers, number) - 1
        if at == len(self._every):
            return self._places[-1]
        return self._places[at] - (self._numbers[at] - number) // self._every[at]

    def is_kept(self, number: int) -> bool:
        """Whether the row of this number is kept; its place is `kept(number)`."""
        return self.kept(number + 1) > self.kept(number)

    def stretches(self, count: int) -> list[tuple[int, int]]:
        """Of the rows in the first `count` places, from which place on there is which k."""
        return [each for each in zip(self._places, self._every, strict=False) if each[0] < count]

    def numbers(self, start: int, stop: int) -> np.ndarray:
        """Numbers of the rows in places `start` to before `stop`: int64."""
        places = np.arange(start, stop)
        at = np.searchsorted(self._places, places, side="right") - 1
        found = np.array(self._numbers, np.int64)[at] + (places - np.array(self._places, np.int64)[at]) * self.every(start, stop)
        return np.asarray(found)

    def every(self, start: int, stop: int) -> np.ndarray:
        """k of the rows in these places: for how many rows each stands, int64."""
        at = np.searchsorted(self._places, np.arange(start, stop), side="right") - 1
        return np.asarray(np.array(self._every, np.int64)[at])

    def chosen(self, first: int, count: int) -> np.ndarray:
        """Which are kept of `count` rows, the first of which has the number `first`: their places among these, int64."""
        return self.numbers(self.kept(first), self.kept(first + count)) - first
