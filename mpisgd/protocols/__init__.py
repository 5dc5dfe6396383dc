"""Protocols of the papers: a short file for each, its options beside its rules.

A new protocol is a file here and a name below; a user's own needs only `--protocol package.module:Class`.
"""

from __future__ import annotations

from collections.abc import Mapping

from mpisgd.protocols.async_opt import AsyncOptions
from mpisgd.protocols.backup import BackupOptions
from mpisgd.protocols.downpour import DownpourOptions
from mpisgd.protocols.hardsync import AllreduceOptions, HardsyncOptions
from mpisgd.protocols.own import OwnProtocolOptions
from mpisgd.protocols.sandblaster import SandblasterOptions
from mpisgd.protocols.softsync import SoftsyncOptions
from mpisgd.protocols.ssp import SspOptions
from mpisgd.protocols.timeout import TimeoutOptions
from mpisgd.protocols.versioned import VersionedOptions
from mpisgd.rules.protocol import Protocol
from mpisgd.rules.protocol_options import ProtocolOptions
from mpisgd.rules.verdict import Verdict

__all__ = [
    "BATCH_PROTOCOLS",
    "PROTOCOLS",
    "AllreduceOptions",
    "AsyncOptions",
    "BackupOptions",
    "DownpourOptions",
    "HardsyncOptions",
    "OwnProtocolOptions",
    "Protocol",
    "ProtocolOptions",
    "SandblasterOptions",
    "SoftsyncOptions",
    "SspOptions",
    "TimeoutOptions",
    "Verdict",
    "VersionedOptions",
]

PROTOCOLS: Mapping[str, type[ProtocolOptions]] = {
    "hardsync": HardsyncOptions,
    "softsync": SoftsyncOptions,
    "backup": BackupOptions,
    "timeout": TimeoutOptions,
    "versioned": VersionedOptions,
    "async": AsyncOptions,
    "downpour": DownpourOptions,
    "ssp": SspOptions,
    "allreduce": AllreduceOptions,
}

BATCH_PROTOCOLS: Mapping[str, type[ProtocolOptions]] = {"sandblaster": SandblasterOptions}
"""Batch optimisation: no shard decides, and no gradient is stale."""
