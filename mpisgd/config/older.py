"""Options of earlier versions in a file, in today's words."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

_AHEAD = {"duplex": 1, "prefetch": 2}
_EXCHANGES = ("auto", "whole", "in-place", "layerwise", "streamed", *_AHEAD)
_RECEIVES = ("in-turn", "gathered")


def renewed(table: Mapping[str, Any]) -> dict[str, Any]:
    """Return a table without `exchange`, `receive`, an allreduce's `aggregation`; a run's [environment] has `way`."""
    given = dict(table)
    exchange, receive = given.get("exchange", "whole"), given.get("receive", "in-turn")
    if exchange not in _EXCHANGES or receive not in _RECEIVES:
        return given
    kept = {key: value for key, value in given.items() if key not in ("exchange", "receive")}
    protocol = given.get("protocol")
    name = protocol.get("name") if isinstance(protocol, Mapping) else protocol
    if exchange in _AHEAD:
        kept.setdefault("ahead", _AHEAD[exchange])
    elif exchange == "layerwise" and name != "allreduce":
        kept.setdefault("per_layer", True)
    shares = name == "allreduce" and given.get("aggregation") == "node"
    if shares:
        del kept["aggregation"]
    environment = given.get("environment")
    if isinstance(environment, Mapping):
        kept["environment"] = _of_run(environment, "in-place" if shares else exchange, receive, collective=name == "allreduce")
    return kept


def _of_run(environment: Mapping[str, Any], exchange: str, receive: str, *, collective: bool) -> dict[str, Any]:
    def told(entries: Any, exchange: str) -> Any:
        if not isinstance(entries, Mapping) or "way" in entries:
            return entries
        named = exchange if exchange == "in-place" else entries.get("exchange", exchange)
        rest = {key: value for key, value in entries.items() if key != "exchange"}
        return rest | {"way": _way(named, receive, collective=collective) if named in _EXCHANGES else named}

    kept = told(environment, exchange)
    if isinstance(kept.get("attempts"), list):
        kept["attempts"] = [told(each, exchange) for each in kept["attempts"]]
    return dict(kept)


def _way(exchange: str, receive: str, *, collective: bool) -> str:
    if exchange == "layerwise" and collective:
        return "buckets"
    if exchange in ("in-place", "streamed"):
        return exchange
    return "gathered" if receive == "gathered" else "whole"
