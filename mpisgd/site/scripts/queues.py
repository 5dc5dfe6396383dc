"""What became of a job that a batch system has taken: asked for, in its own words, and told in ours."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from mpisgd.base.errors import ConfigError
from mpisgd.site.scripts.submission import call
from mpisgd.site.scripts.systems import SystemName

State = Literal["pending", "running", "ended", "cancelled"]


@dataclass(frozen=True)
class Queue:
    """How one batch system is asked.

    Attributes:
        ask: the command that tells a job's state; its number is the last word.
        told: pattern of the state in what that prints.
        means: the system's word -> ours; "ended" for all that are not here.
        unknown: pattern of what it says of a job that it has forgotten, which is then long at its end.
        cancel: the command that ends a job; its number is the last word.
        output: what the job's own words go to, with {name} and {number}.
    """

    ask: tuple[str, ...]
    told: str
    means: Mapping[str, State]
    unknown: str
    cancel: tuple[str, ...]
    output: str = "{name}-{number}.out"

    def state(self, number: str) -> State:
        """Raises ConfigError: the batch system cannot be asked, in its own words."""
        try:
            told = call([*self.ask, number])
        except ConfigError as error:
            if re.search(self.unknown, str(error)):
                return "ended"
            raise
        found = re.search(self.told, told, re.MULTILINE)
        return self.means.get(found[1], "ended") if found else "ended"


def _means(pending: str, running: str, cancelled: str = "") -> Mapping[str, State]:
    said: dict[str, State] = {}
    said |= dict.fromkeys(pending.split(), "pending")
    said |= dict.fromkeys(running.split(), "running")
    return said | dict.fromkeys(cancelled.split(), "cancelled")


_LSF = Queue(
    ("bjobs", "-noheader", "-o", "stat"),
    r"^\s*(\w+)",
    _means("PEND PSUSP WAIT PROV", "RUN USUSP SSUSP UNKWN"),
    "not found",
    ("bkill",),
)
QUEUES: Mapping[SystemName, Queue] = {
    "slurm": Queue(
        ("squeue", "--noheader", "--states=all", "--format=%T", "--jobs"),
        r"^\s*(\w+)",
        _means(
            "PENDING CONFIGURING REQUEUED REQUEUE_HOLD REQUEUE_FED SPECIAL_EXIT RESV_DEL_HOLD",
            "RUNNING COMPLETING SUSPENDED STOPPED SIGNALING RESIZING STAGE_OUT",
            "CANCELLED",
        ),
        "Invalid job id",
        ("scancel",),
    ),
    "lsf": _LSF,
    "jsrun": _LSF,
    "pbs": Queue(
        ("qstat", "-x", "-f"),
        r"^\s*job_state = (\w)",
        _means("Q H W T M", "R E B S U"),
        "Unknown Job",
        ("qdel",),
        "{name}.o{number}",
    ),
    "flux": Queue(
        ("flux", "jobs", "--no-header", "--format={status}"),
        r"^\s*(\w+)",
        _means("DEPEND PRIORITY SCHED", "RUN CLEANUP", "CANCELED"),
        "unknown|not found",
        ("flux", "cancel"),
    ),
}
