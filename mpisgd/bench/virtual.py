"""`bench virtual`: gradients per real second of a virtual cluster, in one process.

Without tensors: 1-softsync, one shard, log-normal mini-batches, growing lambda; all of `simulate` counts.
With gradients: all learners' gradients as one batch (torch.func.vmap) over one by one.
"""

from __future__ import annotations

import resource
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from mpisgd.bench.parts.measured import over, show, spread
from mpisgd.config import Config, EvaluationOptions, LogOptions, MlpOptions, ModelOptions, SmallCnnOptions, SoftmaxOptions, replace
from mpisgd.config.config_virtual import LognormalComputeOptions, VirtualOptions
from mpisgd.protocols import SoftsyncOptions
from mpisgd.simulate import simulate

PARAMETERS = 89_578
"""Parameters of the CIFAR-10 network [Zhang16 4.1]: 358 kB."""
SHARD_S = 4e-4
"""Virtual seconds of compute per learner and gradient: about four times the shard's time per gradient."""
#: lambda -> gradients
SIZES = {30: 1_000_000, 100: 200_000, 1_000: 200_000, 10_000: 200_000, 100_000: 300_000}
MODELS: dict[str, ModelOptions] = {
    "softmax": SoftmaxOptions(),
    "mlp": MlpOptions(),
    "small_cnn": SmallCnnOptions(),
}


def measure(repetitions: int) -> Iterator[dict[str, Any]]:
    yield from _of_sizes(repetitions)
    yield from _of_models(repetitions)


def _of_sizes(repetitions: int) -> Iterator[dict[str, Any]]:
    for learners, gradients in SIZES.items():
        for log in (False, True) if learners == min(SIZES) else (False,):
            seconds = [_seconds(_timing(learners, gradients, log)) for _ in range(repetitions)]
            yield {
                "learners": learners,
                "gradients": gradients,
                "log": log,
                "real_s": spread(seconds),
                "gradients_per_s": spread([gradients / each for each in seconds]),
                "peak_nbytes": _peak_nbytes(),
            }


def _of_models(repetitions: int) -> Iterator[dict[str, Any]]:
    for name, model in MODELS.items():
        single, batched = [], []
        for _ in range(repetitions):
            single.append(_seconds(_training(model, batched=False)))
            batched.append(_seconds(_training(model, batched=True)))
        seconds = {"one_by_one_s": spread(single), "batched_s": spread(batched)}
        yield {"model": name, **seconds, "speed_up": over(single, batched)}


def lines_of(rows: Sequence[Mapping[str, Any]]) -> list[str]:
    lines = [f"{'learners':>9} {'gradients':>10} {'log':>4} {'real':>9} {'gradients/s':>32} {'peak':>9}"]
    for row in (each for each in rows if "learners" in each):
        log, peak = "on" if row["log"] else "off", f"{row['peak_nbytes'] / 1e9:.2f} GB"
        real, rate = f"{row['real_s']['median']:.2f} s", show(row["gradients_per_s"], 0)
        lines.append(f"{row['learners']:9,} {row['gradients']:10,} {log:>4} {real:>9} {rate:>32} {peak:>9}")
    return lines + [
        f"gradients of 30 learners in batches, over one by one, {row['model']}: {show(row['speed_up'])}"
        for row in rows
        if "speed_up" in row
    ]


def _timing(learners: int, gradients: int, log: bool) -> Config:
    return Config(
        protocol=SoftsyncOptions(n=1),
        mu=1,
        epochs=gradients / 50_000,
        virtual=VirtualOptions(learners=learners, gradients=False, parameters=PARAMETERS),
        compute=LognormalComputeOptions(mean_s=SHARD_S * learners),
        log=LogOptions(enabled=log, progress="off", flush_rows=4096, flush_s=1e9),
    )


def _training(model: ModelOptions, *, batched: bool) -> Config:
    return Config(
        protocol=SoftsyncOptions(n=15),
        model=model,
        mu=4,
        epochs=1,
        virtual=VirtualOptions(learners=30, batched=batched),
        compute=LognormalComputeOptions(),
        evaluation=EvaluationOptions(every_epochs=0),
        log=LogOptions(enabled=False, progress="off"),
    )


def _seconds(config: Config) -> float:
    with tempfile.TemporaryDirectory() as directory:
        start_s = time.perf_counter()
        simulate(replace(config, out=str(Path(directory) / "run")))
        return time.perf_counter() - start_s


def _peak_nbytes() -> int:
    """Return peak memory; ru_maxrss is in kilobytes, on macOS in bytes."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)
