"""Findings of the doctor."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Level = Literal["ok", "warning", "fault"]

HOSTS_SHOWN = 4
"""Hosts listed rank by rank; further hosts are counted."""


@dataclass(frozen=True)
class Finding:
    name: str
    level: Level
    text: str
    mend: str = ""
