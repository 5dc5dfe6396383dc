"""Refused pairs of features, for train, simulate, submit, `--print-config` and the API.

A feature is a wish of a configuration; the user is told to change a pair's first. Checks by the number of ranks: `placement`.
"""

from __future__ import annotations

import contextlib
import dataclasses
import typing
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from mpisgd.base.errors import ConfigError
from mpisgd.config import KINDS, AdagradOptions, Config, TrustRatioOptions, kind_of, replace
from mpisgd.protocols import PROTOCOLS, ProtocolOptions


@dataclass(frozen=True)
class Feature:
    """A wish of a configuration.

    Attributes:
        words: the user's words, after "beside"; {} = the protocol's name.
        field: the field to change; empty = never first of a pair.
    """

    asked: Callable[[Config], bool]
    words: str
    field: str = ""
    expected: str = ""


_DEFAULT = Config()


def _value_of(config: Config, field: str) -> Any:
    """Return a field's value; of an argument not given to torch's scheduler None."""
    value: Any = config
    for name in field.split("."):
        value = value.get(name) if isinstance(value, Mapping) else getattr(value, name)
    return value


def _other_than_default(field: str) -> Feature:
    value = getattr(_DEFAULT, field)
    said = kind_of(value) if field in KINDS else "none" if field == "groups" else value
    return Feature(lambda config: getattr(config, field) != value, f"{field}, other than by default", field, f"{said!r}")


def _given(field: str, expected: str = "") -> Feature:
    """Return the feature of a simple field off its default."""
    default = _value_of(_DEFAULT, field)
    return Feature(lambda config: _value_of(config, field) != default, field, field, expected or repr(default))


def _chosen(field: str, value: str | int, expected: str = "") -> Feature:
    """Return the feature of a field of this value; `expected`: else the default."""
    expected = expected or repr(_value_of(_DEFAULT, field))
    return Feature(lambda config: _value_of(config, field) == value, f"{field} = {value!r}", field, expected)


def _above(field: str, bound: int = 0) -> Feature:
    return Feature(lambda config: _value_of(config, field) > bound, f"{field} > {bound}", field, f"{bound}")


def _own_steps(field: str) -> Callable[[Config], bool]:
    return lambda config: getattr(config.protocol, field, None) not in (None, 1)


#: Features of real and of virtual ranks.
FEATURES: Mapping[str, Feature] = {
    "fresh": Feature(lambda config: config.protocol.fresh, "{} (applies no stale gradients)"),
    "aborts": Feature(lambda config: config.protocol.aborts, "{} (learners give up)"),
    "collective": Feature(lambda config: config.protocol.collective, "{} (learners double as shards)"),
    "no sums": Feature(lambda config: not config.protocol.teams, "{} (takes no team's sum as one gradient)"),
    "n_push": Feature(_own_steps("n_push"), "protocol.n_push", "protocol.n_push", "1"),
    "n_fetch": Feature(_own_steps("n_fetch"), "protocol.n_fetch", "protocol.n_fetch", "1"),
    "own steps": Feature(_own_steps("get_model_frequency"), "protocol.get_model_frequency", "protocol.get_model_frequency", "1"),
    "autocast": Feature(lambda config: config.autocast != "off", "autocast = 'bfloat16' or 'float16'", "autocast", "'off'"),
    "float16": _chosen("autocast", "float16", "'off' or 'bfloat16'"),
    "accumulation": _above("accumulation", 1),
    "local steps": _above("local_steps"),
    "no local steps": Feature(lambda config: config.local_steps == 0, "local_steps = 0"),
    "inner optimizer": _given("inner_optimizer", "the default"),
    "inner rate": _given("inner_alpha0"),
    "waits": Feature(lambda config: not config.protocol.duplex, "{} (pulls wait for the learner's own push)"),
    "ahead": _above("ahead"),
    "per layer": _given("per_layer"),
    "whole layers": Feature(
        lambda config: not (config.per_layer or config.protocol.collective), "per_layer = false, but for protocol allreduce"
    ),
    "bfloat16": _chosen("push_format", "bfloat16"),
    "topk": _chosen("push_format", "topk", "'float32' or 'bfloat16'"),
    "no topk": Feature(lambda config: config.push_format != "topk", "a push_format other than 'topk'"),
    "topk share": _given("topk_share"),
    "rounded pulls": _chosen("pull_format", "bfloat16"),
    "compensation": _above("compensation"),
    "rates": _chosen("modulate", "rate"),
    "no weights": Feature(lambda config: getattr(config.protocol, "modulation", "") == "none", "protocol.modulation = 'none'"),
    "cycled momentum": Feature(
        lambda config: getattr(config.schedule, "cycles_momentum", False),
        "a schedule that cycles the momentum",
        "schedule.kwargs.cycle_momentum",
        "false",
    ),
    "adagrad": Feature(
        lambda config: isinstance(config.optimizer, AdagradOptions), "optimizer = 'adagrad'", "optimizer", "another"
    ),
    "trust ratios": Feature(
        lambda config: isinstance(config.optimizer, TrustRatioOptions), "optimizer = 'lars' or 'lamb'", "optimizer", "another"
    ),
    "agrees": Feature(lambda config: config.agrees, "clip_average_of = 'model', of several shards", "clip_average_of", "'slice'"),
    "not alike": Feature(lambda config: not config.protocol.alike, "{} (shards make updates of different gradients)"),
    "node": _chosen("aggregation", "node"),
    "team size": _above("team_size"),
    "no teams": Feature(lambda config: not config.in_teams, "learners in no teams (aggregation = 'node')"),
    "stages": Feature(lambda config: config.in_groups, "group_size > 1", "group_size", "1"),
    "no stages": Feature(lambda config: not config.in_groups, "group_size = 1"),
    "partition": _chosen("group_form", "partition"),
    "1f1b": _chosen("pipeline", "1f1b"),
    "cuts": Feature(lambda config: bool(config.stages.at), "stages.at", "stages.at", "none"),
    "balance": _given("stages.balance"),
    "micro-batches": _above("micro_batches", 1),
    "drops": _chosen("nonfinite", "drop", "'stop' or 'continue'"),
    "step": _given("step"),
    "loss": Feature(lambda config: config.loss != Config.loss, "a loss", "loss", repr(Config.loss)),
    "batch": Feature(lambda config: config.protocol.batch, "protocol sandblaster"),
    "partner": _given("checkpoint.partner_updates"),
    "several portions": Feature(_own_steps("push_every"), "protocol.push_every", "protocol.push_every", "1"),
    "in order": Feature(lambda config: getattr(config.protocol, "order", "") == "portions", "protocol.order = 'portions'"),
    "weights' average": _above("averaging"),
    "clip average": _above("clip_average"),
    "clipping": _above("clip_norm"),
    "scaling": _given("linear_scaling"),
    "nonfinite": _given("nonfinite"),
    **{field: _other_than_default(field) for field in ("optimizer", "schedule", "groups", "alpha0", "epochs", "sampling")},
    "epoch samples": _above("epoch_samples"),
    "no stream": Feature(lambda config: config.sampling != "stream", "a sampling other than 'stream'"),
    "dealt": _chosen("sampling", "dealt"),
    "several pushes": Feature(
        lambda config: config.protocol.mini_batches_per_pull > config.protocol.mini_batches_per_push,
        "several pushes between two pulls (protocol.n_fetch, get_model_frequency)",
    ),
    "best": _given("evaluation.best"),
    "patience": _above("evaluation.patience"),
    "no evaluator": Feature(lambda config: not config.evaluator, "evaluator = false"),
    "cuda": _chosen("device", "cuda"),
    "cuda shards": _chosen("shard_device", "cuda"),
}

#: Features of real ranks alone, and of virtual ranks alone; each kind ignores the other's tables of a job file.
REAL: Mapping[str, Feature] = {
    "tolerant": _chosen("faults.mode", "tolerant", "'auto' or 'fail-fast'"),
    "fail-fast": Feature(lambda config: config.faults.mode == "fail-fast", "faults.mode = 'fail-fast'"),
}
VIRTUAL: Mapping[str, Feature] = {
    "virtual": Feature(lambda config: True, "a virtual cluster"),
    "parameters": Feature(
        lambda config: bool(config.virtual.parameters or config.virtual.layers) and not config.virtual.gradients,
        "virtual.parameters > 0, or virtual.layers",
        "virtual.parameters",
        "0",
    ),
    "layer seconds": Feature(lambda config: bool(config.virtual.forward_s), "virtual.forward_s", "virtual.forward_s", "none"),
    "sizes": Feature(
        lambda config: not config.virtual.gradients,
        "virtual.gradients = false, where nothing is evaluated",
        "virtual.gradients",
        "True",
    ),
    "batched": _given("virtual.batched"),
    "leaving": Feature(
        lambda config: config.failures.then == "leave" and bool(config.failures.at_s or config.failures.mean_s > 0),
        "failures.then = 'leave'",
        "failures.then",
        "'stop'",
    ),
}

_OWN_STEPS = ("n_push", "n_fetch", "own steps")
_FORMATS = ("bfloat16", "topk", "rounded pulls")

#: Features, features that exclude each of them, and the law.
RULES: Sequence[tuple[tuple[str, ...], tuple[str, ...], str]] = (
    (("ahead",), ("waits",), "a learner asks for weights before pushing, and the weights must contain the gradient"),
    (("ahead",), ("tolerant",), "a shard does not wait until answers have left, so a hanging learner stays unseen"),
    (("ahead",), ("stages",), "a group's ranks push, then pull, then agree on the answers: nothing travels both ways at once"),
    (("ahead",), ("per layer",), "a layer leaves, and comes, at its place in the passes"),
    (("per layer",), ("aborts",), "a pushed layer cannot be given up"),
    (("per layer",), ("collective",), "slices are equal; parts travel behind the passes where links are slow"),
    ((*_OWN_STEPS, "local steps"), ("per layer",), "own steps need all layers, and pull for, or push, several mini-batches as one"),
    (("node", "micro-batches"), ("per layer",), "the sum is there after the last backward pass, for all layers at once"),
    (("stages",), ("per layer",), "stages already pull and push separately, each with own shards"),
    (
        ("ahead", "topk", "rounded pulls"),
        ("compensation",),
        "a gradient is squared at its learner's own weights",
    ),
    (("compensation", "rates"), ("fresh",), "a fresh gradient has the weight 1, and needs no compensation"),
    (("local steps",), _OWN_STEPS, "both are own steps of a learner between two pulls"),
    (("local steps",), ("aborts",), "own steps given up half-way have moved the inner optimiser"),
    (("local steps",), ("collective", "node"), "learners have weights in common, and none may step alone"),
    (
        ("trust ratios",),
        ("local steps",),
        "own steps push a way, not a gradient; lars or lamb may be the inner_optimizer",
    ),
    (("cycled momentum",), ("local steps",), "the schedule is of own steps: the inner optimiser's momentum stays constant"),
    (("cycled momentum",), ("adagrad",), "torch refuses the schedule: adagrad has no momentum"),
    (("dealt",), ("collective", "node", "stages"), "a portion is dealt to a learner of one rank that pulls from all shards"),
    (
        ("dealt",),
        ("per layer", "ahead"),
        "a learner computes, or asks for weights, before its next portion has come",
    ),
    (("dealt",), ("several pushes",), "a portion comes with each pull"),
    (("dealt",), ("drops",), "a portion without a finite gradient would be dealt for ever"),
    (("agrees",), ("not alike", "stages"), "there is no single averaged gradient to take the norm of"),
    (("agrees",), ("tolerant",), "a learner back late would change a sum after the shards told the norm"),
    (("node",), ("no sums",), "a team's sum must be of gradients of one clock, and taken or dropped as a whole"),
    (("node",), ("collective",), "learners of one node share memory by themselves"),
    (("tolerant", "leaving"), ("collective", "node"), "no rank can leave alone: a slice, or a part of a sum, would be missing"),
    (("stages",), ("collective", "node"), "a slice, or a team's sum, is of all layers"),
    (("partition",), ("leaving", "aborts"), "the others would wait in the middle of a layer"),
    (
        ("cuts", "balance", "1f1b"),
        ("partition",),
        "each rank has a piece of all layers, at work on the same micro-batch",
    ),
    (("accumulation",), ("stages",), "micro_batches are parts of a batch too large for memory"),
    (("cuda",), ("stages",), "ranks of a group pass on tensors in the host's memory"),
    (("float16",), ("stages", "micro-batches"), "no stage knows whether another's pass overflowed"),
    (
        ("batched", "step"),
        ("stages", "micro-batches"),
        "torch.func.vmap, or a step, runs the whole model on a whole mini-batch",
    ),
    (("parameters",), ("stages",), "stages are parts of a real model"),
    (("batched",), ("step",), "torch.func.vmap takes a model and a loss, not a step"),
    (("autocast",), ("batched",), "torch.func.vmap computes in float32"),
    (("accumulation",), ("batched",), "a learner computes the mini-batches of a gradient one after the other"),
    (("step",), ("loss",), "a step computes the loss itself"),
    (("cuda shards",), ("virtual",), "virtual shards lie where learners compute: set device"),
    (("patience",), ("collective",), "learners agree on the end among themselves; protocol hardsync computes the same"),
    (("best",), ("sizes",), "only sizes travel, and there are no weights to keep"),
    (("several portions",), ("in order",), "each portion is summed by itself"),
    (
        ("optimizer", "schedule", "groups", "alpha0", "scaling", "weights' average", "local steps"),
        ("batch",),
        "torch.optim.LBFGS makes each step, and chooses the length",
    ),
    (("epochs", "patience", "partner"), ("batch",), "the coordinator knows when an iteration, and the run, ends"),
    (
        (*_FORMATS, "float16", "accumulation", "per layer", "compensation", "clipping", "clip average", "nonfinite", "sampling"),
        ("batch",),
        "the sum is the exact gradient of one function, in full, of the same batch at each evaluation",
    ),
    (("micro-batches", "batched"), ("batch",), "the last portion may be shorter"),
    (("stages",), ("batch",), "each learner computes portions on the whole model"),
    (("sizes",), ("batch",), "a line search needs losses"),
)

#: Features that another needs: the feature, its absence, why.
NEEDS: Sequence[tuple[tuple[str, ...], tuple[str, ...], str]] = (
    (("inner optimizer", "inner rate"), ("no local steps",), "only own steps use this option, and there are none"),
    (("topk share",), ("no topk",), "only topk uses topk_share"),
    (("rates",), ("no weights",), "'none' makes all weights 1; choose a modulation, e.g. 'inverse'"),
    (
        ("team size",),
        ("no teams",),
        "team_size is the most ranks of a team; say aggregation = 'node', with a protocol that has teams",
    ),
    (("partition", "1f1b", "cuts", "balance"), ("no stages",), "one rank alone has the whole model, and passes nothing on"),
    (("layer seconds",), ("whole layers",), "the gradient leaves as a whole, and the seconds count as a whole"),
    (("patience",), ("no evaluator",), "an evaluation after training can end nothing"),
    (("epoch samples",), ("no stream",), "an epoch is all samples of the data set"),
)

REFUSED: Mapping[tuple[str, str], str] = {
    (one, other): why for ones, others, why in (*RULES, *NEEDS) for one in ones for other in others
}


def features(config: Config, *, virtual: bool = False) -> set[str]:
    """Return the names of all features asked for."""
    known = {**FEATURES, **(VIRTUAL if virtual else REAL)}
    return {name for name, feature in known.items() if feature.asked(config)}


def refused(config: Config, *, virtual: bool = False) -> list[tuple[str, str]]:
    """Return the refused pairs, in the table's order."""
    asked = features(config, virtual=virtual)
    return [(one, other) for one, other in REFUSED if one in asked and other in asked]


def check(config: Config, *, virtual: bool = False) -> None:
    """Raise ConfigError naming all refused pairs, a line each."""
    known = {**FEATURES, **REAL, **VIRTUAL}
    lines = []
    for one, other in refused(config, virtual=virtual):
        feature = known[one]
        value = _value_of(config, feature.field)
        beside = known[other].words.format(f"protocol {getattr(config.protocol, 'factory', kind_of(config.protocol))}")
        why = REFUSED[one, other] + _way_out(config, one, known[other], virtual)
        lines.append(f"{feature.field} = {value!r}: expected {feature.expected} beside {beside}: {why}")
    if lines:
        raise ConfigError("\n".join(lines))


def tables() -> tuple[str, str]:
    """Return tables of pairs, and of options that need another, a row for each law."""
    known = {**FEATURES, **REAL, **VIRTUAL}

    def table(head: str, rules: Sequence[tuple[tuple[str, ...], tuple[str, ...], str]]) -> str:
        lines = [head, "|---|---|---|"]
        for ones, others, why in rules:
            beside = "; ".join(known[other].words.format(_protocols(known[other])) for other in others)
            lines.append(f"| {'; '.join(known[one].words for one in ones)} | {beside} | {why} |")
        return "\n".join([*lines, ""])

    return table("| not any of | beside any of | since |", RULES), table("| not | beside | since |", NEEDS)


def _way_out(config: Config, one: str, feature: Feature, virtual: bool) -> str:
    """Name this protocol's options, or else protocols, without the feature; "" unless protocols ask for it."""
    if "{}" not in feature.words:
        return ""
    protocol = config.protocol
    ways = [f"protocol.{words}" for words, other in _variants(protocol) if not feature.asked(replace(config, protocol=other))]
    others = {name: replace(config, protocol=kind()) for name, kind in PROTOCOLS.items()}
    ways = ways or [name for name, other in others.items() if all(first != one for first, _ in refused(other, virtual=virtual))]
    return f"; allowed with {', '.join(ways)}"


def _protocols(feature: Feature) -> str:
    """Name the protocols that ask for a feature, with deciding options."""
    said = []
    for name, kind in PROTOCOLS.items():
        asks = feature.asked(Config(protocol=kind()))
        other = [words for words, changed in _variants(kind()) if feature.asked(Config(protocol=changed)) != asks]
        if asks or other:
            said.append(name + f" {'unless' if asks else 'with'} {' or '.join(other)}" * bool(other))
    return f"protocol {', '.join(said)}"


def _variants(protocol: ProtocolOptions) -> Iterator[tuple[str, ProtocolOptions]]:
    """Yield the protocol with a single option changed: bool, Literal, or int of default 0."""
    hints = typing.get_type_hints(type(protocol))
    for field in dataclasses.fields(protocol):
        value, hint = getattr(protocol, field.name), hints[field.name]
        others: tuple[Any, ...] = ()
        if hint is bool:
            others = (not value,)
        elif typing.get_origin(hint) is Literal:
            others = tuple(each for each in typing.get_args(hint) if each != value)
        elif hint is int and field.default == 0:
            others = (0,) if value else (1,)
        for other in others:
            with contextlib.suppress(ConfigError):  # options that the protocol itself refuses
                yield (
                    f"{field.name} {'> 0' if hint is int and other else f'= {other!r}'}",
                    dataclasses.replace(protocol, **{field.name: other}),
                )
