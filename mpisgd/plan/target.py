"""Updates to a test error or loss, over the number N of gradients per update [Chen16 3.1, Fig. 5].

Measured at several N by synchronous runs (thetabar's if kept): linear in N between, unknown beyond. Measured at one N or none: by
the gradient noise scale, S(N mu) ~ 1 + B_noise / (N mu) [McCandlish18 eq. 2.11; `analysis/noise_scale.py`], or updates ~ 1/N where
B_noise is unknown.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from mpisgd.analysis import arrivals
from mpisgd.analysis.noise_scale import noise_scale
from mpisgd.analysis.training import Target, on_test_data
from mpisgd.base.errors import ConfigError
from mpisgd.records.log.reader import Run


@dataclass(frozen=True)
class Convergence:
    """Updates to the target.

    `measured`: N -> updates, by N. `absolute`: else relative to N = λ. `noise_samples`: B_noise if used.
    """

    measured: dict[int, float]
    absolute: bool
    noise_samples: float | None
    mu: int
    source: str

    def updates(self, wanted: int) -> float | None:
        """Return updates at N = `wanted`; None outside several measured N."""
        if self.noise_samples is None:
            known = list(self.measured)
            inside = known[0] <= wanted <= known[-1]
            return float(np.interp(wanted, known, list(self.measured.values()))) if inside else None
        ((at, count),) = self.measured.items()
        return count * self._ratio(wanted) / self._ratio(at)

    def _ratio(self, wanted: int) -> float:
        """Return 1 + B_noise/B, or 1/B for infinite B_noise."""
        assert self.noise_samples is not None
        batch = wanted * self.mu
        return 1 / batch if math.isinf(self.noise_samples) else 1 + self.noise_samples / batch


def convergence(runs: Sequence[Run], target: Target | None, noise_samples: float | None) -> Convergence:
    """Return the convergence of a model's runs; `noise_samples` overrides the log's.

    Raises ConfigError: no run reaches the target.
    """
    measured = {} if target is None else _measured(runs, target)
    first, mu = runs[0], int(runs[0].config.get("mu", 1))
    if len(measured) > 1 and noise_samples is None:
        numbers = ", ".join(str(wanted) for wanted in measured)
        return Convergence(measured, True, None, mu, f"updates to {target} measured at N = {numbers}, linear between")
    how = "noise scale given"
    if noise_samples is None:
        found = noise_scale(first)
        error = f" ± {found.error:.2g}" if math.isfinite(found.error) else ""
        noise_samples, how = found.samples, f"noise scale of {first.name}, {found.samples:.4g}{error} samples"
        if not math.isfinite(noise_samples):
            noise_samples, how = math.inf, f"noise scale of {first.name} unknown: as many samples whatever N is assumed"
    if measured:
        at = arrivals.wanted(first) if arrivals.wanted(first) in measured else next(iter(measured))
        source = f"updates to {target} measured at N = {at}; elsewhere by the {how}"
        return Convergence({at: measured[at]}, True, noise_samples, mu, source)
    return Convergence({first.lambda_: 1.0}, False, noise_samples, mu, f"relative to N = λ, by the {how}")


def _measured(runs: Sequence[Run], target: Target) -> dict[int, float]:
    """Return N -> mean updates to the target. Raises ConfigError: unreached, or met at first."""
    reached: dict[int, list[float]] = {}
    best = []
    for run in runs:
        curve = on_test_data(run, averaged=True) or on_test_data(run)  # thetabar's if kept, as in the paper
        if curve is None:
            continue
        found, least = curve.reached(target), curve.least(target.what)
        if least is not None:
            shown = f"{100 * least:.2f} %" if target.what == "error" else f"{least:.4g}"
            best.append(f"{run.name}: {shown} of {curve.weights}")
        if found is not None and arrivals.synchronous(run):
            reached.setdefault(arrivals.wanted(run), []).append(found.updates)
        if found is not None and found.updates == 0:
            raise ConfigError(f"--target-{target.what} {target.value:g}: met by the initial weights of {run.name}; expected less")
    if not reached:
        raise ConfigError(
            f"--target-{target.what} {target.value:g}: {target} is reached by no run of hardsync or backup;"
            f" the least of each was {', '.join(best) or 'never measured, for nothing was evaluated'}"
        )
    return {wanted: float(np.mean(counts)) for wanted, counts in sorted(reached.items())}
