"""The bench of thousands of ranks: what it counts, and that the aims are looked at."""

from __future__ import annotations

import numpy as np
import pytest

from mpisgd.base.errors import ConfigError
from mpisgd.job.run import rank
from tests.bench import crowd


def test_what_ranks_send_and_are_told_grows_by_little_with_their_number() -> None:
    small, large = ({row["part"]: row for row in crowd.measure([size])} for size in (64, 256))
    assert set(small) == {"start", "heartbeat, 60 s", "end", "end, fault-tolerant"}
    for part in small:
        assert small[part]["messages"] <= large[part]["messages"] <= 2 * small[part]["messages"], part
        assert large[part]["messages_of_rank_0"] <= 4.1 * small[part]["messages_of_rank_0"], part
        assert large[part]["most_told_nbytes"] <= 5 * small[part]["most_told_nbytes"], part


def test_a_meeting_that_tells_all_a_row_of_each_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    """As the last one did: nine numbers of each rank, on all."""

    def told_all(wire: object, said: np.ndarray, shard_ranks: object) -> tuple[bool, np.ndarray]:
        every = wire.settle(said, np.ravel, 256 * len(said)).reshape(256, len(said))  # type: ignore[attr-defined]
        return False, every[list(shard_ranks)]  # type: ignore[call-overload]

    monkeypatch.setattr(crowd, "MOST_NBYTES", 90_000)
    crowd.measure([256])
    monkeypatch.setattr(rank, "accounts_of", told_all)
    with pytest.raises(ConfigError, match=r"256 ranks, end: most_sent_nbytes = 12\d,\d\d\d, at most 90,000 are wanted"):
        crowd.measure([256])
