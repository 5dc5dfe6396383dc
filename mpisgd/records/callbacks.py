"""Callbacks of the user, told of a run on the ranks where news arises.

Learners wait for shard 0: a thread of its rank calls `on_update`, with the sum of updates between calls. The evaluating rank calls
`on_evaluation`, rank 0 `on_end` once the run is DONE.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

from mpisgd.base.checks import require
from mpisgd.base.errors import ConfigError
from mpisgd.base.imports import call_factory, load_attribute
from mpisgd.config import Part
from mpisgd.records.log.schema import EVALUATIONS


@dataclass(frozen=True)
class Update:
    """Updates of shard 0 since the last call.

    Attributes:
        clock: after the last update.
        epochs: applied samples / training samples.
        loss: mean, each update counting alike; NaN if any had none.
        now_s: end of the last update, since the run began.
    """

    clock: int
    updates: int
    epochs: float
    loss: float
    now_s: float


@dataclass(frozen=True)
class Evaluation:
    """A row of `evaluations` (docs/reference/log-format.md).

    Attributes:
        last: of the run's last weights.
        metrics: of an own step.
        data: "test", "training" or "validation".
    """

    snapshot: int
    clock_min: int
    clock_max: int
    samples: int
    epochs: float
    taken_s: float
    averaged: bool
    train: bool
    loss: float
    error: float
    evaluate_s: float
    last: bool
    metrics: Mapping[str, float] = field(default_factory=dict)
    data: str = "test"


@dataclass(frozen=True)
class End:
    """End of a run that is DONE; fields as of `mpisgd.train`."""

    path: Path
    clocks: tuple[int, ...]
    samples: tuple[int, ...]
    diverged: bool
    training_s: float


@dataclass(frozen=True)
class Callbacks:
    """Functions to call, or None. Raises ConfigError if not callable."""

    on_update: Callable[[Update], Any] | None = None
    on_evaluation: Callable[[Evaluation], Any] | None = None
    on_end: Callable[[End], Any] | None = None

    def __post_init__(self) -> None:
        for name, function in vars(self).items():
            require(function is None or callable(function), name, function, "a function of one argument, or None")

    def tell_evaluation(self, rows: list[dict[str, Any]], states: object, last: bool) -> None:
        own = EVALUATIONS.names or ()
        for row in rows:
            metrics = {name: float(value) for name, value in row.items() if name not in own}
            part = Part(row["train"])
            told = {name: row[name] for name in own} | {"averaged": bool(row["averaged"]), "train": part is Part.TRAINING}
            call("on_evaluation", self.on_evaluation, Evaluation(**told, data=str(part), last=last, metrics=metrics))


NO_CALLBACKS = Callbacks()


def given(spec: str, user_objects: Callbacks) -> Callbacks:
    """Return the callbacks given, or the methods of the class `package.module:Class`.

    Raises ConfigError for both, and for missing or unknown `on_` methods.
    """
    if not spec:
        return user_objects
    field_ = f"callbacks = {spec!r}"
    if user_objects != NO_CALLBACKS:
        names = ", ".join(name for name, function in vars(user_objects).items() if function is not None)
        raise ConfigError(f"{field_}: expected none beside {names} of mpisgd.train")
    kind = load_attribute(spec, "callbacks")
    if not isinstance(kind, type):
        raise ConfigError(f"{field_}: found {type(kind).__name__}, expected a class")
    known = [each.name for each in fields(Callbacks)]
    has = [name for name in dir(kind) if name.startswith("on_")]
    if not has or set(has) - set(known):
        found = ", ".join(name for name in has if name not in known) or "no method on_..."
        raise ConfigError(f"{field_}: found {found}, expected some of {', '.join(known)}")
    made = call_factory(kind, {}, {}, field_)
    return Callbacks(**{name: getattr(made, name) for name in has})


def call(name: str, function: Callable[[Any], Any] | None, told: object) -> None:
    """Call a callback, if any. Raises RuntimeError with its name."""
    if function is None:
        return
    try:
        function(told)
    except Exception as error:
        raise RuntimeError(f"the callback {name} failed: {type(error).__name__}: {error}") from error


class UpdateTeller:
    """Thread that calls `on_update` with the sum since its last call; training waits only in `close`.

    Calls raise an earlier failure.
    """

    def __init__(self, function: Callable[[Update], Any]) -> None:
        self._function = function
        self._news = threading.Condition()
        self._last: tuple[int, float, float] | None = None
        self._updates = 0
        self._losses = 0.0
        self._closed = False
        self._failure: RuntimeError | None = None
        self._thread = threading.Thread(target=self._tell, name="on_update", daemon=True)
        self._thread.start()

    def __call__(self, clock: int, epochs: float, loss: float, now_s: float) -> None:
        self._raise()
        with self._news:
            self._last = (clock, epochs, now_s)
            self._updates += 1
            self._losses += loss
            self._news.notify()

    def close(self) -> None:
        with self._news:
            self._closed = True
            self._news.notify()
        self._thread.join()
        self._raise()

    def _raise(self) -> None:
        failure, self._failure = self._failure, None
        if failure is not None:
            raise failure

    def _tell(self) -> None:
        while True:
            with self._news:
                self._news.wait_for(lambda: self._last is not None or self._closed)
                if self._last is None:
                    return
                (clock, epochs, now_s), updates, losses = self._last, self._updates, self._losses
                self._last, self._updates, self._losses = None, 0, 0.0
            try:
                call("on_update", self._function, Update(clock, updates, epochs, losses / updates, now_s))
            except RuntimeError as failure:
                self._failure = failure
                return
