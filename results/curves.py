"""The curves of a figure: each is a job, computed as a course, and a CSV that grows by a row an epoch.

A curve goes on where it was left, in whatever process comes to it next; several processes share a figure's curves. Until a curve is
done, its CSV and what it goes on from lie in a hidden folder.
"""

from __future__ import annotations

import argparse
import csv
import io
import json
import os
import platform
import shutil
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol, TypeVar

import numpy as np
import torch
from course import AVERAGED, ROW, Course
from matplotlib.figure import Figure
from virtual_runs import BEGUN, Job, show

from mpisgd.analysis.tables import Table
from mpisgd.base.errors import ConfigError, DataError
from mpisgd.records.lock import Lock

CHANCE = 0.9
"""The error of ten classes by chance."""
UNDER_WAY = "curve.csv"
HOPELESS = 5
"""A curve that has been at chance for so many epochs is given up."""


@dataclass(frozen=True)
class Curve:
    """A job that is computed under this name."""

    name: str
    job: Job


@dataclass(frozen=True)
class Trained:
    """A curve, as far as it is computed.

    Attributes:
        about: the job, the staleness, and what it was computed with.
        rows: (epochs evaluated, columns), as `course.ROW`, and `course.AVERAGED` where there is more.
    """

    curve: Curve
    about: dict[str, Any]
    rows: np.ndarray

    @property
    def lost(self) -> bool:
        """Whether no later epoch is worth computing: weights are not finite, or outputs have long been one class."""
        last = self.rows[-HOPELESS:]
        return not np.isfinite(last[-1, 2]) or (len(self.rows) > HOPELESS and bool((np.abs(last[:, 1] - CHANCE) < 1e-4).all()))

    @property
    def done(self) -> bool:
        return self.lost or bool(self.rows[-1, 0] >= self.about["job"]["epochs"] - 1e-9)

    def at(self, epochs: np.ndarray, column: str) -> np.ndarray:
        """Values at these numbers of epochs: after the last row chance where the curve is lost, else NaN."""
        found = np.full(len(epochs), np.nan)
        numbers = np.rint(self.rows[:, 0]).astype(int)
        for at, epoch in enumerate(epochs):
            same = np.flatnonzero(numbers == epoch)
            if len(same) and np.isfinite(self.rows[same[0], 2]):
                found[at] = self.rows[same[0], (*ROW, *AVERAGED).index(column)]
            elif self.lost and column.endswith("error"):
                found[at] = CHANCE
        return found

    @property
    def error(self) -> float:
        """Percent of the test images, at the end."""
        return 100 * (float(self.rows[-1, 1]) if not self.lost else CHANCE)


def make(folder: Path, curves: Sequence[Curve], device: str = "cpu") -> None:
    """Compute what is left of each curve that no other process computes, on a GPU in windows (`windows.py`).

    Raises DataError where data are missing.
    """
    for curve in curves:
        found = read(folder, curve)
        if found is not None and found.done:
            continue
        with claimed(folder, curve.name) as place:
            if place is not None:
                _compute(folder, curve, place, device)
                found = read(folder, curve)
                assert found is not None
                print(f"{curve.name}: test error {found.error:.2f} %, {found.about['seconds']} s", file=sys.stderr, flush=True)
                if found.done:
                    write(folder / f"{curve.name}.csv", found)
        if found is not None and found.done:
            shutil.rmtree(folder / f".{curve.name}", ignore_errors=True)


@contextmanager
def claimed(folder: Path, name: str) -> Iterator[Path | None]:
    """The hidden folder of what is computed under this name, for this process alone; None: another process has it."""
    place = folder / f".{name}"
    place.mkdir(parents=True, exist_ok=True)
    try:
        lock = Lock(place)
    except ConfigError:
        print(f"{name}: another process computes it", file=sys.stderr, flush=True)
        yield None
        return
    try:
        yield place
    finally:
        lock.release()


def _compute(folder: Path, curve: Curve, place: Path, device: str) -> None:
    told = place / "job.json"
    if told.is_file() and json.loads(told.read_text("utf-8")) != _plain(curve.job):
        raise SystemExit(f"{place} is of another job: remove it to begin {curve.name} anew")
    told.write_text(json.dumps(curve.job), "utf-8")
    course, found = Course(curve.job, place, device, "windows" if device != "cpu" else "same weights"), read(folder, curve)
    staleness, began, done = course.staleness, time.monotonic(), len(course.state.rows)
    commits = list(dict.fromkeys([*(found.about["commits"] if found is not None else []), BEGUN.name]))
    for row in course.run():
        about = {
            "job": curve.job,
            "epochs_done": round(row[0], 4),
            "gradients": len(staleness),
            "updates": int(course.order["clock"][-1]) + 1,
            "mean_staleness": round(float(staleness.mean()), 4),
            "max_staleness": int(staleness.max()),
            "seconds": round(course.state.seconds),
            "device": torch.cuda.get_device_name() if device != "cpu" else _processor(),
            "date": time.strftime("%Y-%m-%d"),
            "commits": commits,
            "versions": {"python": platform.python_version(), "torch": str(torch.__version__), "numpy": np.__version__},
        }
        trained = Trained(curve, about, np.array(course.state.rows))
        write(place / UNDER_WAY, trained)
        rate = course.train_samples * (len(course.state.rows) - done) / (time.monotonic() - began) if done else 0.0
        done, told_rate = done or 1, f", {rate:.0f} samples/s" if rate else ""
        print(f"{curve.name}: {row[0]:.1f} epochs, test error {100 * row[1]:.2f} %{told_rate}", file=sys.stderr, flush=True)
        if trained.lost:
            return


def _plain(job: Job) -> Any:
    """A job as JSON gives it back."""
    return json.loads(json.dumps(job))


def _processor() -> str:
    """The processor's name, as Linux has it."""
    try:
        lines = Path("/proc/cpuinfo").read_text("utf-8").splitlines()
    except OSError:
        return platform.processor()
    return next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), platform.processor())


def write(path: Path, trained: Trained) -> None:
    """Write a curve's CSV: whole or not at all."""
    sink = io.StringIO()
    sink.write(f"# {json.dumps(trained.about)}\n")
    writer = csv.writer(sink, lineterminator="\n")
    writer.writerow((*ROW, *AVERAGED)[: trained.rows.shape[1]])
    writer.writerows([f"{value:.6g}" for value in row] for row in trained.rows.tolist())
    aside = path.with_name(f".{path.name}.{os.getpid()}")
    aside.write_text(sink.getvalue(), encoding="utf-8")
    aside.replace(path)


def read(folder: Path, curve: Curve) -> Trained | None:
    """Read a curve, as far as it is computed; None where there is none, or one of another job."""
    paths = (folder / f"{curve.name}.csv", folder / f".{curve.name}" / UNDER_WAY)
    path = next((path for path in paths if path.is_file()), None)
    if path is None:
        return None
    first, *lines = path.read_text(encoding="utf-8").splitlines()
    about = json.loads(first.removeprefix("# "))
    if about["job"] != _plain(curve.job):
        return None
    return Trained(curve, about, np.array([[float(cell) for cell in row] for row in list(csv.reader(lines))[1:]]))


def there(folder: Path, curves: Sequence[Curve]) -> list[Trained]:
    """Those curves of which a row is there."""
    found = (read(folder, curve) for curve in curves)
    return [each for each in found if each is not None]


class Named(Protocol):
    """What a script trains; `settings`: parts of a job."""

    @property
    def name(self) -> str: ...

    @property
    def settings(self) -> Job: ...


S = TypeVar("S", bound=Named)


def script(
    text: str | None,
    scales: tuple[S, S],
    curves: Callable[[S], list[Curve]],
    draw: Callable[[S, list[Trained], Path], tuple[Sequence[Table], Figure]],
) -> None:
    """Run a script: compute the curves, and draw what there is of them.

    Args:
        scales: what is trained, and in the quick form.
        draw: makes tables and the figure; the path is that of the folder of the curves.
    """
    parser = argparse.ArgumentParser(description=text, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="the 8x8 digits and a small CNN, in a minute")
    parser.add_argument("--device", default="cpu", help="cuda: a GPU, where gradients of many learners are computed at once")
    parser.add_argument("--draw", action="store_true", help="compute no curve, draw what there is")
    parser.add_argument("--curves", type=Path, help="folder of the CSVs; default: beside this file")
    parser.add_argument("--out", type=Path, help="folder of the figure; default: figures/, with --quick that of the CSVs")
    options = parser.parse_args()
    scale, here = scales[options.quick], Path(__file__).parent
    folder, wanted = options.curves or here / scale.name, curves(scale)
    try:
        if not options.draw:
            make(folder, wanted, options.device)
        found = there(folder, wanted)
        if not found:
            raise SystemExit(f"{folder} has no curve of these settings")
        tables, figure = draw(scale, found, folder)
    except DataError as error:
        raise SystemExit(f"this script trains on {scale.settings['data']['name']}: {error}") from error
    show(scale.name, options.out or (folder if options.quick else here / "figures"), tables, figure)
    print(f"curves: {sum(each.done for each in found)} of {len(wanted)} are done")
