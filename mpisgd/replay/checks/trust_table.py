"""Claims: parts of a log proved, checked, or on trust in a replay; source of `mpisgd replay`'s table.

proved     computed again from configuration, seed and data: another value is refused
checked    must agree with the rest of the log, and seconds with each other; consistent changes pass unseen
on trust   not computable; seconds spent must fit the available time
"""

from __future__ import annotations

import enum
from dataclasses import dataclass


class Standing(enum.Enum):
    PROVED = "proved"
    CHECKED = "checked"
    TRUST = "on trust"


@dataclass(frozen=True)
class Claim:
    """A claim about columns or entries of a table or file.

    Attributes:
        of: kinds of events; empty = all.
        simulated: proved by a simulation.
        evaluated: result of an evaluation.
    """

    where: str
    names: tuple[str, ...]
    standing: Standing
    of: tuple[str, ...] = ()
    simulated: bool = True
    evaluated: bool = False


def _claim(where: str, names: str, standing: Standing, of: str = "", *, simulated: bool = True, evaluated: bool = False) -> Claim:
    return Claim(where, tuple(names.split()), standing, tuple(of.split()), simulated, evaluated)


_P, _C, _T = Standing

#: All columns of `records.log.schema`, entries of DONE, and keys of [environment] in config.toml.
CLAIMS: tuple[Claim, ...] = (
    _claim(
        "pushes",
        "shard clock timestamp staleness learner_id seq samples gradients verdict reason weight learning_rate loss rounded delay_s",
        _P,
    ),
    _claim("pushes", "arrival_s answer_s", _C),
    _claim("pushes", "compute_s push_s wait_s pull_s", _T),
    _claim("updates", "shard clock gradients samples learning_rate mean_loss gradient_sq sum_sq", _P),
    _claim("updates", "time_s", _C),
    _claim("updates", "update_s", _T),
    _claim("evaluations", "snapshot clock_min clock_max samples epochs averaged train", _P),
    _claim("evaluations", "loss error", _P, evaluated=True),
    _claim("evaluations", "taken_s", _C),
    _claim("evaluations", "evaluate_s", _T),
    _claim("events", "shard", _P),
    _claim("events", "kind learner_id value", _P, "STARTED RESUMED STOPPED SNAPSHOT NONFINITE"),
    _claim("events", "clock time_s", _C),
    _claim(
        "events",
        "kind learner_id value",
        _C,
        "GOODBYE DEPARTED TIMEOUT LOST MISSED RETURNED PASSED STUCK GAVE_UP ENOUGH INTERRUPTED",
    ),
    _claim("events", "kind learner_id value", _T, "CHECKPOINT SKIPPED UNSAVED REFUSED"),
    _claim("summary", "shard final_clock samples received diverged", _P),
    _claim("summary", "pushed", _C),
    _claim("DONE", "clock samples diverged books_balanced", _P),
    _claim("DONE", "seconds weights best log files", _C),
    _claim("weights.pt", "theta thetabar buffers", _P, simulated=False),
    _claim(
        "[environment]",
        "parameters parameter_nbytes train_samples test_samples gradients_per_update batch_norm_policy layers",
        _P,
    ),
    _claim("[environment]", "learners teams groups stages slices world_size shard_ranks evaluator_rank attempts", _C),
    _claim("[environment]", "hosts way", _T),
    _claim(
        "[environment]",
        "chunks virtual threads cores cores_per_node rules versions brought git_commit git_dirty mpisgd_git_commit mpisgd_git_dirty"
        " command_line directory started",
        _T,
        simulated=False,
    ),
)

SOME = {
    name: _claim("pushes", name, how) for name, how in (("portion", _C), ("neighbour_s", _T), ("scale", _P), ("backward_s", _T))
}
"""Columns of some runs: with dealt data, groups of ranks, scaled losses, or chunks that leave early."""

BATCH: tuple[Claim, ...] = (
    _claim("portions", "clock portion learner_id seq samples loss outcome", _P),
    _claim("portions", "dealt_s done_s compute_s delay_s copy", _T),
    _claim("iterations", "iteration clock loss gradient_max step evaluations history why", _P),
    _claim("iterations", "time_s evaluating_s commanding_s", _T),
    _claim("commands", "clock op out a b alpha value", _P),
    _claim("commands", "took_s", _T),
    _claim(
        "pushes", "shard clock timestamp staleness learner_id seq samples gradients verdict reason weight learning_rate loss", _P
    ),
    _claim("pushes", "rounded delay_s arrival_s answer_s compute_s push_s wait_s pull_s", _T),
    _claim("updates", "shard clock gradients samples learning_rate mean_loss sum_sq", _P),
    _claim("updates", "gradient_sq time_s update_s", _T),
    _claim("evaluations", "snapshot clock_min clock_max samples epochs averaged train", _P),
    _claim("evaluations", "loss error", _P, evaluated=True),
    _claim("evaluations", "taken_s evaluate_s", _T),
    _claim("events", "shard clock kind learner_id value time_s", _T),
    _claim("summary", "final_clock samples", _C),
    _claim("DONE", "clock samples books_balanced", _C),
    _claim("DONE", "diverged seconds", _T),
    _claim("weights.pt", "theta", _P),
    _claim("[environment]", "learners shard_ranks hosts versions brought started", _T),
)
"""Claims of a batch optimisation; uncounted portions are on trust."""


Table = list[tuple[str, list[str], list[str], list[str]]]
"""Table or file, and its proved, checked and trusted entries."""


def table(
    *,
    computed: bool = True,
    simulated: bool = False,
    evaluations: str = "all",
    finished: bool = True,
    metrics: tuple[str, ...] = (),
    batch: bool = False,
    commands: bool = False,
    columns: tuple[str, ...] = (),
) -> Table:
    """Return the claims of a replay (see `Proof`).

    Args:
        evaluations: snapshots evaluated again: "all", "last" or "none".
        metrics: of an own step; with the standing of an evaluation's loss.
        columns: of pushes; adds columns of `SOME`.
    """

    def standing_of(claim: Claim) -> Standing:
        if claim.evaluated and evaluations == "none":
            return Standing.TRUST
        return Standing.PROVED if simulated and claim.simulated else claim.standing

    found: dict[str, dict[Standing, list[str]]] = {}
    for claim in BATCH if batch else (*CLAIMS, *(SOME[name] for name in SOME if name in columns)):
        if claim.where in ("DONE", "weights.pt") and not finished:
            continue
        if claim.where in ("weights.pt", "evaluations") and not computed:
            continue
        if claim.where == "commands" and not commands:
            continue
        rows = found.setdefault(claim.where, {standing: [] for standing in Standing})
        names = (*claim.names, *metrics) if claim.evaluated else claim.names
        if claim.evaluated and evaluations == "last":
            rows[Standing.PROVED] += [f"{name} of the last" for name in names]
            rows[Standing.TRUST] += [f"{name} of the others" for name in names]
        else:
            rows[standing_of(claim)] += claim.of or names
    return [(where, rows[_P], rows[_C], rows[_T]) for where, rows in found.items()]
