"""User's own protocol: a subclass of `Protocol` in the user's module."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any

from mpisgd.base.checks import at_least
from mpisgd.base.errors import ConfigError
from mpisgd.base.imports import load_attribute
from mpisgd.rules.protocol import Protocol
from mpisgd.rules.protocol_options import ProtocolOptions


@dataclass(frozen=True)
class OwnProtocolOptions(ProtocolOptions):
    """The user's own protocol, from a class."""

    factory: str = ""
    """package.module:Class, a subclass of mpisgd.protocols.Protocol; made with the number of learners and `kwargs`."""
    kwargs: dict[str, Any] = field(default_factory=dict)
    """Keyword arguments of the class."""
    timeout_s: float = 0.0
    """Seconds from an update to the call of `on_timeout`; 0 = never."""

    def __post_init__(self) -> None:
        at_least(self, "protocol.", timeout_s=0)

    @property
    def fresh(self) -> bool:
        return self._class.fresh

    @property
    def rejects(self) -> bool:
        return self._class.rejects

    @property
    def aborts(self) -> bool:
        return self._class.aborts

    @property
    def teams(self) -> bool:
        return self._class.teams

    @property
    def deadline_s(self) -> float:
        return self.timeout_s or math.inf

    @property
    def _class(self) -> type[Protocol]:
        """User's class. Raises ConfigError where it cannot be imported, or is no protocol."""
        found = load_attribute(self.factory, "protocol.factory")
        if not (isinstance(found, type) and issubclass(found, Protocol)):
            raise ConfigError(f"protocol.factory = {self.factory!r}: expected a subclass of mpisgd.protocols.Protocol")
        missing = sorted(found.__abstractmethods__)
        if missing:
            raise ConfigError(f"protocol.factory = {self.factory!r}: missing {', '.join(missing)}, expected in every protocol")
        return found

    def make(self, lambda_: int) -> Protocol:
        try:
            return self._class(lambda_, **self.kwargs)
        except TypeError as error:
            raise ConfigError(f"protocol.factory = {self.factory!r}: called with (lambda_, **{self.kwargs}): {error}") from error
