"""Summary of a run: protocol, sizes, progress, ending."""

from __future__ import annotations

import collections
import time
from dataclasses import dataclass
from typing import Any

import numpy as np

from mpisgd.analysis.tables import Table, columns_of
from mpisgd.config import footprint
from mpisgd.records.checkpoint.checkpoint import way_on
from mpisgd.records.log import schema
from mpisgd.records.log.reader import Run

#: Most hosts named; more are counted.
_HOSTS_NAMED = 8
#: Digits of a checksum that tell files apart.
_DIGITS = 16


@dataclass(frozen=True)
class Status:
    """State of a run. `ended`: all shards left in order, so books must balance; `done`: DONE exists."""

    done: bool
    ended: bool
    diverged: bool
    text: str


def protocol_name(run: Run) -> str:
    return str(run.config.get("protocol", {}).get("name", "unknown protocol"))


def protocol_options(run: Run) -> dict[str, object]:
    """Return the protocol's options; for backup, the resulting N and b [Chen16 3]."""
    options = {name: value for name, value in run.config.get("protocol", {}).items() if name != "name"}
    wanted = options.get("N", run.environment.get("gradients_per_update"))
    if protocol_name(run) == "backup" and wanted is not None:
        late = {"late": "apply", "modulation": options.get("modulation")} if options.get("late") == "apply" else {}
        abort = {"abort": True} if options.get("abort") else {}
        return {"N": wanted, "b": options.get("b", run.lambda_ - int(wanted)), **late, **abort}
    return options


def protocol_label(run: Run) -> str:
    """Return e.g. `softsync n=2 modulation=inverse`."""
    of_rate = {"modulate": "rate"} if run.config.get("modulate") == "rate" else {}
    options = protocol_options(run) | of_rate
    return " ".join([protocol_name(run), *(f"{name}={value}" for name, value in options.items())])


def doubled(run: Run) -> bool:
    """Return whether learners double as shards: learner l and shard l share a rank."""
    return protocol_name(run) == "allreduce"


def layerwise(run: Run) -> bool:
    """Return whether slices, cut by layers, were exchanged within the passes of a mini-batch."""
    return bool(run.config.get("per_layer"))


def splitting(run: Run) -> int | None:
    """Return n of n-softsync [Zhang16 2.2]."""
    return int(run.config["protocol"].get("n", 1)) if protocol_name(run) == "softsync" else None


def label(run: Run) -> str:
    sizes = f"λ={run.lambda_} · shards={run.shards} · μ={run.config.get('mu', '?')}"
    return f"{run.name}\n{protocol_label(run)} · {sizes}"


def epochs_reached(run: Run) -> float | None:
    size = run.environment.get("train_samples")
    return max(run.begins.samples, run.counts[0].updates.samples) / size if size else None


def status(run: Run) -> Status:
    """Return the state; call first. DONE and summaries are written last: with them, later reads are complete."""
    done, summaries = run.done, run.summaries
    ended = done is not None or (len(summaries) >= run.shards and bool(np.all(summaries["final_clock"] >= 0)))
    diverged = bool(done and done.get("diverged")) or bool(np.any(summaries["diverged"]))
    if done is not None:
        text = "stopped early" if np.any(run.events["kind"] == schema.Event.ENOUGH) else "finished"
    elif ended:
        text = "UNFINISHED: all shards left in order, but there is no DONE"
    else:
        text = f"UNFINISHED: no DONE; under way or killed (log last written {_ago(run)})"
    return Status(done is not None, ended, diverged, f"{text}, DIVERGED" if diverged else text)


def header(run: Run, state: Status, final_error: str) -> Table:
    environment, config = run.environment, run.config
    reached, wanted = epochs_reached(run), config.get("epochs", "?")
    lines: list[tuple[str, str]] = [
        ("run", run.name),
        ("protocol", protocol_label(run)),
        ("learners λ", str(run.lambda_)),
        *_exchange(run),
        *_teams(run),
        *_groups(run),
        ("shards", str(run.shards)),
        ("mini-batch μ", f"{config.get('mu', '?')} samples"),
        ("learning rate α₀", str(config.get("alpha0", "?"))),
        ("model", f"{_kind(run, 'model')}, {environment.get('parameters', '?')} parameters"),
        ("data", f"{_kind(run, 'data')}, {environment.get('train_samples', '?')} training samples"),
        ("step", _kind(run, "step")) if config.get("step") else ("loss", _kind(run, "loss")),
        ("epochs", f"{'?' if reached is None else f'{reached:.2f}'} of {wanted}"),
        ("status", state.text),
        *_way_on(run, state),
        *_attempts(run),
        *_compensation(run),
        *_rounded(run),
        *_pulled(run),
        *_virtual(run),
        ("hosts", hosts(run)),
        ("started", str(environment.get("started", "?"))),
        ("batch norm", str(environment.get("batch_norm_policy", "?"))),
        ("mpisgd", str(environment.get("versions", {}).get("mpisgd", "?"))),
        ("git commit", _commits(environment)),
        ("final test" if final_error.startswith("loss") else "final test error", final_error),
    ]
    return Table("run", f"Run {run.name}", columns_of("what | value"), tuple(lines))


def _way_on(run: Run, state: Status) -> list[tuple[str, str]]:
    options = run.config.get("checkpoint", {})
    near = bool(options.get("partner_updates"))
    if state.ended or state.diverged or not (options.get("every_updates") or near):
        return []
    words = way_on(run.path, max(run.final_clock(shard) for shard in range(run.shards)), near=near)
    return [("if it was killed", words)] if words else []


def _attempts(run: Run) -> list[tuple[str, str]]:
    clocks = [clock for layout in run.earlier for clock in _resumed(layout.table("events"))] + _resumed(run.events)
    if not clocks:
        return []
    lines = [("continued", f"from the checkpoint{'s' * (len(clocks) > 1)} of clock {', '.join(f'{clock:,}' for clock in clocks)}")]
    if run.earlier:
        before = "; ".join(
            f"{each.learners} learner{'s' * (each.learners > 1)} and {each.shards} shard{'s' * (each.shards > 1)}"
            f" until clock {each.last_clock:,}"
            for each in run.earlier
        )
        lines.append(("before", f"{before}: below, evaluations are of the whole run, all else of the time after"))
    return lines


def _resumed(events: schema.LogRows) -> list[int]:
    clocks: list[int] = events["clock"][(events["kind"] == schema.Event.RESUMED) & (events["shard"] == 0)].tolist()
    return clocks


def _compensation(run: Run) -> list[tuple[str, str]]:
    strength, parameters = run.config.get("compensation", 0), run.environment.get("parameters")
    if not strength or parameters is None:
        return []
    return [("delay compensation", f"{strength}: {footprint.of_compensation(run.lambda_, parameters, run.shards)}")]


def _rounded(run: Run) -> list[tuple[str, str]]:
    if run.config.get("push_format", "float32") == "float32":
        return []
    rounded = run.table("pushes")["rounded"]
    rounded = rounded[np.isfinite(rounded)]
    name = run.config["push_format"]
    words = f"as {name}; the part {'left out' if name == 'topk' else 'rounded off'} was added to the next gradient"
    if rounded.any():
        words += f": {np.median(rounded):.2%} of the norm (median; {rounded.max():.2%} at most)"
    return [("gradients pushed", words)]


def _pulled(run: Run) -> list[tuple[str, str]]:
    if run.config.get("pull_format", "float32") == "float32":
        return []
    return [("weights pulled", f"as {run.config['pull_format']}; the part rounded off came with the next pull")]


def virtual(run: Run) -> bool:
    return bool(run.environment.get("virtual", False))


def _virtual(run: Run) -> list[tuple[str, str]]:
    if not virtual(run):
        return []
    compute = dict(run.config.get("compute", {}))
    kind = compute.pop("name", "?")
    options = ", ".join(f"{key} = {value}" for key, value in compute.items())
    with_gradients = run.config.get("virtual", {}).get("gradients", True)
    what = "" if with_gradients else "; no gradients were computed, only sizes travelled: losses say nothing"
    return [("virtual cluster", f"all seconds are virtual; mini-batches: {kind} ({options}){what}")]


def groups_of(run: Run) -> list[list[int]]:
    """Return each learner's ranks, by part of the model."""
    return [list(group) for group in run.environment.get("groups", [])]


def partitioned(run: Run) -> bool:
    """Return whether a learner's ranks all work on the same layer."""
    return bool(run.config.get("group_form", "stages") == "partition")


def _groups(run: Run) -> list[tuple[str, str]]:
    size, parts = run.config.get("group_size", 1), run.config.get("micro_batches", 1)
    passed = f"mini-batches are passed in {parts} parts"
    if size == 1:
        return [("micro-batches", passed)] if parts > 1 else []
    own = "a piece of each layer" if partitioned(run) else "a stage of the model"
    return [("groups", f"learners are groups of {size} ranks, each with {own}; {passed}")]


def _exchange(run: Run) -> list[tuple[str, str]]:
    memory = {"in-place": "memory", "on-gpu": "a GPU's memory"}.get(str(run.environment.get("way")))
    return [("exchange", f"gradients and weights lie in {memory} that all ranks share")] if memory else []


def _teams(run: Run) -> list[tuple[str, str]]:
    if not run.teams:
        return []
    sizes = [len(team) for team in run.teams]
    each = f"{min(sizes)}" if len(set(sizes)) == 1 else f"{min(sizes)} to {max(sizes)}"
    return [("aggregation", f"learners are teams of {each} rank{'s' * (max(sizes) > 1)}; {sum(sizes):,} ranks compute")]


def hosts(run: Run) -> str:
    """Return e.g. `n1 (3 ranks), n2 (2 ranks)`, or counts."""
    counted = collections.Counter(str(host) for host in run.environment.get("hosts", []))
    if len(counted) > _HOSTS_NAMED:
        least, most = min(counted.values()), max(counted.values())
        return f"{len(counted):,}, of {least if least == most else f'{least} to {most}'} rank{'s' * (most > 1)} each"
    return ", ".join(f"{host} ({ranks} rank{'s' if ranks > 1 else ''})" for host, ranks in counted.items()) or "?"


def _kind(run: Run, part: str) -> str:
    table = run.config.get(part, {})
    entry = run.environment.get("brought", {}).get(part)
    if entry is None:
        return str(table.get("factory") or table.get("name", "?")) if isinstance(table, dict) else str(table)
    name = entry["object"] or f"{entry['qualified_name']} of {entry['module']}, not importable by a name"
    return f"{name} ({entry['file']}, sha256 {entry['sha256'][:_DIGITS]})" if entry["sha256"] else name


def _commits(environment: dict[str, Any]) -> str:
    said = []
    for prefix, of in (("", ""), ("mpisgd_", "; mpisgd: ")):
        commit = environment.get(f"{prefix}git_commit")
        if commit:
            said.append(f"{of}{commit}{', and changes' if environment.get(f'{prefix}git_dirty') else ''}")
    return "".join(said).removeprefix("; ") or "?"


def _ago(run: Run) -> str:
    newest = max(path.stat().st_mtime for path in run.path.glob("shard-*.h5"))
    seconds = max(0.0, time.time() - newest)
    for unit, length in (("days", 86400), ("h", 3600), ("min", 60)):
        if seconds >= 2 * length:
            return f"{seconds / length:.0f} {unit} ago"
    return f"{seconds:.0f} s ago"
