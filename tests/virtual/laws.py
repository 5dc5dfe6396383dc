"""What one log of a virtual run must prove: the laws of DESIGN 4."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import pytest

from mpisgd.records.log import schema
from mpisgd.records.log.reader import Run
from mpisgd.records.log.schema import Event, Reason, Verdict

Rows = np.ndarray

#: Of a gradient, by its staleness.
WEIGHTS: Mapping[str, Callable[[Any], Any]] = {
    "none": np.ones_like,
    "inverse": lambda tau: 1 / np.maximum(tau, 1),
    "inverse_plus_one": lambda tau: 1 / (tau + 1),
    "exponential:0.3": lambda tau: np.exp(-0.3 * tau),
}


class Laws:
    """What one log must prove."""

    def __init__(self, run: Run) -> None:
        self.run = run
        self.protocol = run.config["protocol"]
        self.name = self.protocol["name"]
        self.n_push = self.protocol.get("n_push", 1)
        self.pushes_per_pull = self.protocol.get("n_fetch", self.n_push) // self.n_push
        if self.name == "ssp":
            self.pushes_per_pull = self.protocol["get_model_frequency"]
        self.tolerant = self.protocol.get("tolerance", 0) > 0
        self.late = self.protocol.get("late", "drop") == "apply"
        self.consistent = self.name in ("hardsync", "allreduce", "backup", "timeout") or (
            self.name == "versioned" and not self.tolerant
        )
        self.exact = self.name == "versioned"
        in_parts = run.config["per_layer"] or run.environment["way"] == "buckets"
        self.own_seconds = in_parts or run.config["group_size"] > 1
        self.ahead = 1 + run.config["ahead"]
        """A pull may overtake all pushes but those so many before."""
        self.gathered = run.environment["way"] == "gathered"
        self.lambda_ = run.lambda_
        self.ranks = np.array([len(team) for team in run.teams] or [1] * run.lambda_)  # that compute for each learner
        self.uneven = self.name in ("timeout", "async")  # shards may sum different numbers of gradients
        self.uneven |= self.name == "backup" and len(set(self.ranks)) > 1
        self.late_count = self.name == "backup" and run.config["protocol"].get("late") == "apply"
        """A gradient that is late on one shard may be on time on another, and so in another update."""
        self.budget = run.config["epochs"] * run.environment["train_samples"]
        self.clocks = run.summaries["final_clock"].tolist()
        self.pushes = [run.pushes[run.pushes["shard"] == shard] for shard in range(run.shards)]
        self.updates = [run.updates[run.updates["shard"] == shard] for shard in range(run.shards)]
        self.departed = [
            run.events[(run.events["kind"] == Event.DEPARTED) & (run.events["shard"] == shard)] for shard in range(run.shards)
        ]

    def hold(self) -> None:
        self.the_end_is_orderly()
        self.shards_agree_on_what_was_pushed()
        for shard in range(self.run.shards):
            self.books_balance(shard)
            self.staleness_is_clock_minus_timestamp(shard)
            self.the_divisor_is_counted(shard)
            self.enough_gradients_make_an_update(shard)
            self.verdicts_are_the_protocols(shard)
            for learner_id in range(self.lambda_):
                self.a_learner_goes_on_in_order(self.pushes[shard][self.pushes[shard]["learner_id"] == learner_id])

    # ------------------------------------------------------------------------------------------------------ laws 8 and 4

    def the_end_is_orderly(self) -> None:
        """Everybody has left, DONE is written, and the run is as long as was asked for, where a learner is left."""
        run = self.run
        assert run.done is not None
        assert run.done["clock"] == self.clocks
        assert run.done["books_balanced"] is True
        assert not run.summaries["diverged"].any()
        for shard in range(run.shards):
            assert len(self.updates[shard]) == self.clocks[shard] >= 0
            finished = run.summaries["samples"][shard] >= self.budget and not self.exact
            cut_short = len(self.departed[shard]) > 0 or self.uneven or self.late_count
            assert finished or cut_short, "the first shard that is done ends the run"
            assert run.summaries["samples"].max() >= self.budget or len(self.departed[shard]) > 0 or self.uneven or self.exact
            stopped = (run.events["kind"] == Event.STOPPED) & (run.events["shard"] == shard)
            assert stopped.sum() == finished
            assert len(set(self.departed[shard]["learner_id"].tolist())) == len(self.departed[shard])
        files = {path.name for path in run.path.iterdir()} - {schema.WEIGHTS}
        shard_files = {schema.shard_file(shard) for shard in range(run.shards)}
        assert files == {schema.CONFIG, schema.LOG, schema.DONE, schema.evaluator_file(), *shard_files}, "no scratch is left"

    def books_balance(self, shard: int) -> None:
        books, summary, rows = self.run.books()[shard], self.run.summaries[shard], self.pushes[shard]
        assert books.balanced
        assert books.pushed == summary["received"] == summary["pushed"] == len(rows)
        assert books.rejected == np.count_nonzero(rows["verdict"] == Verdict.REJECT)
        assert self.exact or not books.rejected
        for learner_id in range(self.lambda_):
            own = rows[rows["learner_id"] == learner_id]
            kinds = [np.count_nonzero(own["verdict"] == kind) for kind in Verdict]
            assert sum(kinds) == len(own)
        late = rows["verdict"] == Verdict.LATE
        assert (rows["clock"][late] == self.clocks[shard]).all()
        if summary["samples"] >= self.budget and not self.exact:
            assert np.array_equal(late, rows["clock"] == self.clocks[shard]), "nothing is applied or dropped after the end"

    def shards_agree_on_what_was_pushed(self) -> None:
        """Each gradient goes to every shard; where that is promised, it is computed on one clock (law 2)."""
        first = self.of_mini_batches(0)
        for shard in range(1, self.run.shards):
            other = self.of_mini_batches(shard)
            assert other.keys() == first.keys()
            for mini_batch, (timestamp, compute_s) in other.items():
                assert compute_s == first[mini_batch][1] or self.own_seconds, (
                    "a slice has seconds of its own, else all have the same"
                )
                if self.consistent:
                    assert timestamp == first[mini_batch][0]
        if self.consistent and not self.uneven and not self.failed():
            assert len(set(self.clocks)) == 1

    def failed(self) -> bool:
        """Whether a learner left before its time."""
        return bool(self.run.config.get("failures", {}).get("at_s")) or (not self.exact and any(map(len, self.departed)))

    def of_mini_batches(self, shard: int) -> dict[tuple[int, int, int], tuple[int, float]]:
        """(learner_id, seq, number of the learner's push) -> (timestamp, compute_s)."""
        pushed = [0] * self.lambda_
        found = {}
        for row in self.pushes[shard]:
            learner_id = int(row["learner_id"])
            found[learner_id, int(row["seq"]), pushed[learner_id]] = (int(row["timestamp"]), float(row["compute_s"]))
            pushed[learner_id] += 1
        return found

    # ----------------------------------------------------------------------------------------------- staleness, verdicts

    def staleness_is_clock_minus_timestamp(self, shard: int) -> None:
        rows = self.pushes[shard]
        assert (rows["staleness"] >= 0).all()
        assert (rows["timestamp"] >= 0).all()
        assert np.array_equal(rows["staleness"], rows["clock"] - rows["timestamp"])
        assert (np.diff(rows["clock"]) >= 0).all()
        assert not len(rows) or rows["clock"][-1] <= self.clocks[shard]
        assert (np.diff(self.updates[shard]["time_s"]) >= 0).all()

    def verdicts_are_the_protocols(self, shard: int) -> None:
        rows = self.pushes[shard]
        applied, dropped, rejected = (rows[rows["verdict"] == kind] for kind in (Verdict.APPLY, Verdict.DROP, Verdict.REJECT))
        fresh = self.consistent and not self.late
        if fresh:
            assert not applied["staleness"].any(), "only fresh gradients are applied"
        modulation = "none" if fresh else self.protocol["modulation"]
        assert applied["weight"] == pytest.approx(WEIGHTS[modulation](applied["staleness"].astype(float)), abs=1e-15)
        match self.name:
            case "hardsync" | "allreduce":
                for clock in range(self.clocks[shard]):
                    order = applied["learner_id"][applied["clock"] == clock]
                    assert (np.diff(order) > 0).all(), "summed in the order of learners, each once (law 5)"
            case "backup" | "timeout":
                assert (dropped["staleness"] > 0).all(), "only late ones are dropped"
                assert not self.late or not len(dropped)
            case "async":
                most = self.protocol.get("most_staleness", np.inf)
                assert (applied["staleness"] <= most).all()
                assert (dropped["staleness"] > most).all()
            case "ssp":
                self.nobody_is_further_ahead_than_allowed(rows)
            case "versioned":
                tolerance = self.protocol.get("tolerance", 0)
                assert (applied["staleness"] <= tolerance).all()
                assert (rejected["staleness"] > tolerance).all()
                assert (dropped["reason"] == Reason.REPEATED).all()
                self.each_mini_batch_is_applied_once(rows, applied)
        if self.name in ("hardsync", "allreduce", "softsync", "ssp", "downpour"):
            assert not len(dropped)

    def nobody_is_further_ahead_than_allowed(self, rows: Rows) -> None:
        """At the moment a learner was given weights, by the shard's own account of pushes."""
        slack = self.protocol["slack"]
        shard = int(rows["shard"][0]) if len(rows) else 0
        for row in rows[~np.isnan(rows["answer_s"])]:
            gone = self.departed[shard]["learner_id"][self.departed[shard]["time_s"] <= row["answer_s"]]
            here = [learner_id for learner_id in range(self.lambda_) if learner_id not in gone]
            pushed = np.bincount(rows["learner_id"][rows["arrival_s"] <= row["answer_s"]], minlength=self.lambda_)
            least = min((pushed[learner_id] for learner_id in here), default=0)
            assert int(row["seq"]) + 1 - least <= slack

    def each_mini_batch_is_applied_once(self, rows: Rows, applied: Rows) -> None:
        """None is skipped: all of a learner's are applied, but perhaps the last of one that left before its time."""
        for learner_id in range(self.lambda_):
            own = applied["seq"][applied["learner_id"] == learner_id]
            assert np.array_equal(own, np.arange(len(own)))
            if not self.failed():
                mini_batches = math.ceil(math.ceil(self.budget) / self.run.config["mu"])
                assert len(own) == math.ceil((mini_batches - learner_id) / self.lambda_)

    # --------------------------------------------------------------------------------------------------- law 3: the divisor

    def the_divisor_is_counted(self, shard: int) -> None:
        rows, updates, clock = self.pushes[shard], self.updates[shard], self.clocks[shard]
        applied = rows[(rows["verdict"] == Verdict.APPLY) & (rows["clock"] < clock)]
        assert np.array_equal(updates["clock"], np.arange(1, clock + 1))
        assert np.array_equal(rows["gradients"], self.ranks[rows["learner_id"]])
        assert np.array_equal(updates["gradients"], np.bincount(applied["clock"], weights=applied["gradients"], minlength=clock))
        per_update = np.bincount(applied["clock"], weights=applied["samples"], minlength=clock)
        assert np.array_equal(updates["samples"], np.cumsum(per_update))

    def enough_gradients_make_an_update(self, shard: int) -> None:
        """c of softsync, lambda of hardsync, N of backup; in the update during which a learner leaves, anything in between."""
        rows = self.pushes[shard]
        for update in self.updates[shard]:
            left = self.departed[shard]["clock"]
            before, after = (
                self.lambda_ - int(np.count_nonzero(gone)) for gone in (left < update["clock"] - 1, left < update["clock"])
            )
            summed = rows[(rows["clock"] == update["clock"] - 1) & (rows["verdict"] != Verdict.REJECT)]
            counted = np.count_nonzero(summed["verdict"] == Verdict.APPLY)
            if self.name == "versioned":
                counted = np.count_nonzero(summed["staleness"] <= self.protocol.get("tolerance", 0))
            elif self.late:
                counted = np.count_nonzero(summed["staleness"] == 0)
            assert max(1, self.wanted(after, least=True)) <= counted <= max(1, self.wanted(before))

    def wanted(self, present: int, least: bool = False) -> int:
        """Of a time-out's update, the most, or the least."""
        match self.name:
            case "softsync":
                return present // int(self.protocol["n"])
            case "backup":
                return min(int(self.protocol.get("N") or self.lambda_ - self.protocol.get("b", 1)), present)
            case "timeout":
                return min(int(self.protocol["N_min" if least else "N"]), present)
            case "versioned":
                return min(int(self.protocol["grads_to_wait"]), present)
            case "async" | "ssp" | "downpour":
                return 1
        return present

    # ----------------------------------------------------------------------------------------------------- one learner

    def a_learner_goes_on_in_order(self, rows: Rows) -> None:
        """None of its mini-batches is lost, doubled or overtaken; a push is done before the pull that follows it."""
        assert not len(rows) or rows["seq"][0] == 0
        assert np.isin(np.diff(rows["seq"]), (0, 1) if self.exact else (1,)).all()
        assert (rows["samples"] == self.run.config["mu"] * self.n_push * rows["gradients"]).all()
        pulled = (rows["seq"][:-1] + 1) % self.pushes_per_pull == 0
        assert (np.diff(rows["timestamp"])[~pulled] == 0).all(), "without a pull it goes on from the same weights"
        if self.ahead > 1:
            overtakes = rows["timestamp"][self.ahead :] < rows["clock"][: -self.ahead]
            assert not overtakes.any(), "a pull never overtakes a push that had left"
        else:
            assert (rows["timestamp"][1:] >= rows["clock"][:-1])[pulled].all(), "a pull never overtakes the push before it"
        if self.consistent and not self.exact:
            assert (np.diff(rows["timestamp"]) > 0).all(), "new weights for each mini-batch"
        answered = rows["answer_s"][:-1]
        assert np.array_equal(np.isnan(answered), ~pulled)
        took_s = (rows["compute_s"] + rows["delay_s"])[1:]
        left_s = self.computed_s(rows)[:-1] if self.gathered else rows["arrival_s"][:-1]
        began_s = np.where(pulled, answered, left_s)
        assert self.ahead > 1 or (began_s >= left_s).all()
        assert self.ahead > 1 or (answered >= rows["arrival_s"][:-1])[pulled].all()
        assert (rows["arrival_s"][1:] >= began_s + took_s - 1e-9).all(), "a mini-batch takes its time"

    def computed_s(self, rows: Rows) -> np.ndarray:
        """The earliest second at which each gradient can have been there. A gathered one arrives when its shard sees that it is
        whole, and its learner may have gone on before."""
        there_s: np.ndarray = rows["compute_s"] + rows["delay_s"]
        for at in range(1, len(rows)):
            answer_s = rows["answer_s"][at - 1]
            there_s[at] += there_s[at - 1] if math.isnan(answer_s) else answer_s
        return there_s
