"""Loggers of others as callbacks: TensorBoard, W&B offline, MLflow's file store.

Shard 0's rank and the evaluator's each open their own writer.
"""

from __future__ import annotations

import importlib
import importlib.util
import math
import os
import threading
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

from mpisgd.base.errors import ConfigError
from mpisgd.records.callbacks import Callbacks, Evaluation, Update


class Writer(Protocol):
    def write(self, values: Mapping[str, float], clock: int) -> None:
        """Write values, safe against any end of the process."""

    def close(self) -> None: ...


class TensorBoard:
    """Event files in `tensorboard/updates` or `tensorboard/evaluations`: a directory has one writer."""

    module = "tensorboard"

    def __init__(self, run: Path, part: str) -> None:
        from torch.utils.tensorboard import SummaryWriter

        self._writer = SummaryWriter(run / "tensorboard" / part)

    def write(self, values: Mapping[str, float], clock: int) -> None:
        for name, value in values.items():
            self._writer.add_scalar(name, value, clock)
        self._writer.flush()

    def close(self) -> None:
        self._writer.close()


class WandB:
    """An offline run of W&B, for `wandb sync`; nothing here contacts another machine.

    `wandb/` lies beside the run's directory: W&B makes links, refused inside (`safe_read`).
    """

    module = "wandb"

    def __init__(self, run: Path, part: str) -> None:
        os.environ.update(WANDB_MODE="offline", WANDB_ERROR_REPORTING="false")
        import wandb

        settings = wandb.Settings(mode="offline", console="off", silent=True)
        run = run.resolve()
        self._run = wandb.init(project="mpisgd", group=run.name, name=f"{run.name} {part}", dir=str(run.parent), settings=settings)
        self._run.define_metric("clock")
        self._run.define_metric("*", step_metric="clock")

    def write(self, values: Mapping[str, float], clock: int) -> None:
        self._run.log({**values, "clock": clock})

    def close(self) -> None:
        self._run.finish()


class MLflow:
    """A run of MLflow's in `mlflow/updates` or `mlflow/evaluations`: two ranks cannot begin a run together."""

    module = "mlflow"

    def __init__(self, run: Path, part: str) -> None:
        os.environ.update(MLFLOW_DISABLE_TELEMETRY="true", MLFLOW_ALLOW_FILE_STORE="true")
        from mlflow.tracking import MlflowClient

        run = run.resolve()
        self._client = MlflowClient((run / "mlflow" / part).as_uri())
        self._run_id = self._client.create_run("0", run_name=f"{run.name} {part}").info.run_id

    def write(self, values: Mapping[str, float], clock: int) -> None:
        for name, value in values.items():
            self._client.log_metric(self._run_id, name, value, step=clock)

    def close(self) -> None:
        self._client.set_terminated(self._run_id)


KINDS: Mapping[str, Any] = {"tensorboard": TensorBoard, "wandb": WandB, "mlflow": MLflow}


def check(names: Sequence[str], *, used: bool) -> None:
    """Raise ConfigError if a logger is not installed, or, where `used`, not importable."""
    for name in names:
        module = KINDS[name].module
        try:
            if importlib.util.find_spec(module) is None:
                raise ConfigError(f"loggers: {name} is not installed: pip install 'mpisgd[{name}]', or pip install {module}")
            if used:
                importlib.import_module(module)
        except ImportError as error:
            raise ConfigError(f"loggers: {name} cannot be imported: {error}") from error


class Loggers:
    def __init__(self, names: Sequence[str], run: Path) -> None:
        self._names, self._run = names, run
        self._writers: list[Writer] = []
        self._turn = threading.Lock()
        """Updates may be told in a thread, beside evaluations."""

    def with_own(self, callbacks: Callbacks) -> Callbacks:
        if not self._names:
            return callbacks
        return Callbacks(
            _both(self.on_update, callbacks.on_update), _both(self.on_evaluation, callbacks.on_evaluation), callbacks.on_end
        )

    def on_update(self, update: Update) -> None:
        values = {"updates/loss": update.loss, "updates/epochs": update.epochs, "updates/seconds": update.now_s}
        self._write("updates", values, update.clock)

    def on_evaluation(self, evaluation: Evaluation) -> None:
        where = ("train" if evaluation.train else evaluation.data) + ("_averaged" if evaluation.averaged else "")
        errors = {} if math.isnan(evaluation.error) else {"error": evaluation.error}  # targets may be no classes
        values = {"loss": evaluation.loss, **errors, "epochs": evaluation.epochs, **evaluation.metrics}
        self._write("evaluations", {f"{where}/{name}": value for name, value in values.items()}, evaluation.clock_max)

    def _write(self, part: str, values: Mapping[str, float], clock: int) -> None:
        with self._turn:
            if not self._writers:
                self._writers = [KINDS[name](self._run, part) for name in self._names]
            for writer in self._writers:
                writer.write(values, clock)

    def close(self) -> None:
        with self._turn:
            for writer in self._writers:
                writer.close()
            self._writers = []


def _both(first: Callable[[Any], Any], second: Callable[[Any], Any] | None) -> Callable[[Any], Any]:
    def told(record: object) -> None:
        first(record)
        if second is not None:
            second(record)

    return told
