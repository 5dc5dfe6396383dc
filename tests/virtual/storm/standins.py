"""What a virtual rank has in the place of seconds, threads and signals of its own (`ranks.py`)."""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from mpisgd.config.config_file import from_mapping
from mpisgd.gradient.gradient import Gradient
from mpisgd.job import parts
from mpisgd.job.parts import NO_OBJECTS
from mpisgd.pipeline.micro_batches import StagePasses
from mpisgd.records.checkpoint.checkpoints import Checkpoints
from mpisgd.records.log.progress import Evaluations
from mpisgd.vectors.computing import Travels
from mpisgd.vectors.flat import FlatModel
from tests.virtual.storm import package
from tests.virtual.storm.draw import COMPUTE_S, DATA, MODEL, MODEL_OF_GROUPS, PATIENCE_S
from tests.virtual.storm.machine import Process
from tests.virtual.storm.package import VIRTUAL


class Delayed(Checkpoints):
    """Writes its checkpoints a while later, in virtual time, unless the rank is killed before: the thread beside the loop.

    `broken`: whether the disk takes none now; `hangs_ns`: for how long it takes nothing yet.
    """

    process: Process
    broken: Callable[[], bool]
    hangs_ns: Callable[[], int]
    _pending: Callable[[], None] | None = None

    def _begin(self, action: Callable[[], None]) -> None:
        if self._thread is None:
            self._thread = threading.current_thread()
            action()  # makes room
            return
        assert self._pending is None
        self._pending = action
        machine = self.process.machine
        machine.at(machine.dice.randrange(100_000, 30_000_000), self._do)

    def _do(self) -> None:
        if self._pending is not None and self.hangs_ns() > 0:
            self.process.machine.at(self.hangs_ns(), self._do)
            return
        action, self._pending = self._pending, None
        if action is not None and not self.process.dead:
            action()

    def busy(self) -> bool:
        return self._pending is not None or super().busy()

    def wait(self) -> None:
        while self._pending is not None and self.hangs_ns() > 0:
            self.process.machine.pause(self.hangs_ns())
        self._do()
        super().wait()

    def _write_part(self, path: Path, account: Any) -> None:
        if self.broken():
            raise OSError(28, "No space left on device", str(path))
        super()._write_part(path, account)


class Computing(Travels):
    """A learner's gradient, which takes its virtual seconds; the model is that of all."""

    def __init__(self, gradient: Gradient, next_s: Callable[[], float]) -> None:
        self._gradient, self._next_s = gradient, next_s
        self.memory = gradient.memory
        self.samples = 0
        self._check: Callable[[], None] | None = None

    def prepare(self, seq: int) -> None:
        """There is nothing to prepare."""

    def interrupt_by(self, check: Callable[[], None]) -> None:
        self._check = check

    def compute(self, seq: int) -> float:
        seconds = self._next_s()
        for _ in range(8 if self._check is not None else 1):
            package.sleep(seconds / (8 if self._check is not None else 1))
            if self._check is not None:
                self._check()
        loss, self.samples = self._gradient.compute(seq), self._gradient.samples
        return loss


class Works:
    """A rank that computes."""

    def work(self, nanoseconds: int) -> None:
        package.sleep(nanoseconds * 1e-9)


class Takes(Evaluations):
    """An evaluation takes a while."""

    def begin(self, number: int) -> None:
        package.sleep(0.5 * COMPUTE_S)


class Heartbeat(VIRTUAL.heartbeat.Heartbeat):  # type: ignore[misc, name-defined]
    """Beats when it is told to, and says who ends the job for what."""

    def __init__(self, process: Process, fails: Callable[[Process, str], None]) -> None:
        super().__init__(
            process.machine.comms[0][process.rank], PATIENCE_S, lambda: "", now_s=lambda: process.machine.now_ns * 1e-9
        )
        self._comm = process.machine.comms[1][process.rank]
        self._fails, self._process = fails, process

    def serve(self) -> None:
        while not self._process.gone:
            package.sleep(1.0)
            self.look()

    def end(self, silent_s: dict[int, float]) -> None:
        machine = self._process.machine
        who = ", ".join(f"{rank}" for rank in sorted(silent_s))
        if machine.tells:
            self._fails(self._process, f"rank {self._rank} has heard nothing of {who}")
            machine.revoke(self._rank)
            self._heard_s = dict.fromkeys(self._heeds, self._lived_s)  # once
        else:
            machine.end(f"rank {self._rank} has heard nothing of {who}")


class Passing:
    """The passes of a stage, each of which takes its virtual seconds forward."""

    def __init__(self, passes: StagePasses, next_s: Callable[[], float]) -> None:
        self._passes, self._next_s = passes, next_s
        self._check: Callable[[], None] | None = None

    def __getattr__(self, name: str) -> Any:
        return getattr(self._passes, name)

    def interrupt_by(self, check: Callable[[], None]) -> None:
        self._check = check

    def pass_on(self, micro: int, received: Any) -> Any:
        package.sleep(self._next_s())
        if self._check is not None:
            self._check()
        return self._passes.pass_on(micro, received)


@functools.cache
def computing(samples: int, *, in_groups: bool = False) -> tuple[Any, FlatModel, Any, torch.Tensor]:
    """Data, model, loss and initial weights: the same for all jobs."""
    model_options = MODEL_OF_GROUPS if in_groups else MODEL
    config = from_mapping({"out": "nowhere", "data": {**DATA, "samples": samples}, "model": model_options, "seed": 1})
    data = parts.load_data(config, NO_OBJECTS)
    model = parts.build_model(config, parts.meta_of(data), NO_OBJECTS)
    return data, model, parts.load_loss(config, NO_OBJECTS), model.weights.clone()
