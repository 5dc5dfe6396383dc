"""What the doctor says of one thing that it looked at."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Level = Literal["ok", "warning", "fault"]

HOSTS_SHOWN = 4
"""Hosts of which a finding tells each rank; of the others it tells how many there are."""


@dataclass(frozen=True)
class Finding:
    """Result of one check, and what mends it."""

    name: str
    level: Level
    text: str
    mend: str = ""
