"""Refused pairs of features, for train, simulate, submit, `--print-config` and the API.

A feature is a wish of a configuration; the user is told to change a pair's first. Checks by the number of ranks: `placement`.
"""

from __future__ import annotations

import contextlib
import dataclasses
import typing
from collections.abc import Callable, Iterator, Mapping
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


def _chosen(field: str, value: str, expected: str = "") -> Feature:
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
    "in memory": Feature(
        lambda config: config.protocol.collective and config.aggregation == "node", "protocol allreduce with aggregation = 'node'"
    ),
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
    "duplex": Feature(lambda config: config.both_ways, "exchange = 'duplex' or 'prefetch'", "exchange", "'auto'"),
    "streamed": _chosen("exchange", "streamed"),
    "no streams": Feature(lambda config: not config.protocol.streams, "{} (updates do not wait for all begun pushes)"),
    "gathered": _chosen("receive", "gathered"),
    "prefetch": _chosen("exchange", "prefetch", "'duplex'"),
    "layerwise": _chosen("exchange", "layerwise"),
    "no layerwise": Feature(lambda config: config.exchange != "layerwise", "an exchange other than 'layerwise'"),
    "buckets": Feature(lambda config: config.in_buckets, "exchange = 'layerwise' of protocol allreduce", "exchange", "'auto'"),
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

_OWN_STEPS = "layers are exchanged in each mini-batch; own steps pull for, or push, several as one"
_TWICE = "both are own steps of a learner between two pulls"
_NONE = "only own steps use this option, and there are none"
_ONE_WAY = "a group's ranks push, then pull, then agree on the answers: nothing travels both ways at once"
_SUM = "a team's sum must be of gradients of one clock, and taken or dropped as a whole"

_BATCH_STEP = "torch.optim.LBFGS makes each step, and chooses the length"
_WHOLE = "the sum is the exact gradient of one function, in full"

REFUSED: Mapping[tuple[str, str], str] = {
    ("layerwise", "aborts"): "a pushed layer cannot be given up",
    ("n_push", "layerwise"): _OWN_STEPS,
    ("n_fetch", "layerwise"): _OWN_STEPS,
    ("own steps", "layerwise"): _OWN_STEPS,
    ("duplex", "waits"): "a learner asks for weights before pushing, and the weights must contain the gradient",
    ("duplex", "compensation"): "a shard gives new weights before the gradient of the old weights comes",
    ("duplex", "tolerant"): "a shard does not wait until answers have left, so a hanging learner stays unseen",
    ("topk", "buckets"): "the largest elements of a slice are known when the whole slice is there",
    ("streamed", "no streams"): "a learner's gradient would wait, half received, for the gradients of others",
    ("streamed", "topk"): "the largest elements of a slice form no chunks",
    ("streamed", "nonfinite"): "the first chunks are summed before the last have come",
    ("streamed", "tolerant"): "a dying learner would leave a part of a gradient in the weights",
    ("streamed", "dealt"): "a learner asks for weights before the gradient has come, and would have two portions",
    ("streamed", "stages"): _ONE_WAY,
    ("streamed", "cuda shards"): "chunks are received into the host's memory",
    ("gathered", "tolerant"): "a shard does not wait until answers have left, so a hanging learner stays unseen",
    ("gathered", "streamed"): "chunks of all gradients come at the same time already",
    ("gathered", "collective"): "learners exchange slices all at once",
    ("gathered", "batch"): "shards wait for the coordinator's portions",
    ("gathered", "cuda shards"): "gradients are received into the host's memory",
    ("prefetch", "cuda"): "messages under way while a GPU computes would need separate copies",
    ("autocast", "batched"): "torch.func.vmap computes in float32",
    **dict.fromkeys(
        (("float16", each) for each in ("stages", "micro-batches")), "no stage knows whether another's pass overflowed"
    ),
    ("float16", "batch"): "a gradient would depend on the learner's earlier gradients",
    ("accumulation", "batched"): "a learner computes the mini-batches of a gradient one after the other",
    ("local steps", "layerwise"): "own steps need all layers, and change all, before any is pushed",
    ("local steps", "n_push"): _TWICE,
    ("local steps", "n_fetch"): _TWICE,
    ("local steps", "own steps"): _TWICE,
    ("local steps", "aborts"): "own steps given up half-way have moved the inner optimiser",
    ("local steps", "collective"): "learners step together in every mini-batch",
    ("local steps", "node"): "a team's ranks have weights in common, and no rank may step alone",
    ("inner optimizer", "no local steps"): _NONE,
    ("inner rate", "no local steps"): _NONE,
    ("dealt", "collective"): "each learner is a shard, and would have to ask another shard for portions",
    ("dealt", "node"): "a team pushes as a whole, and a portion would have to be cut for the ranks",
    ("dealt", "layerwise"): "the answer with a portion may come after the start of the forward pass",
    ("dealt", "duplex"): "a learner asks for weights before the gradient has come, and would have two portions",
    ("dealt", "several pushes"): "a portion comes with each pull",
    ("dealt", "stages"): "the ranks of a group pull separately, from different shards",
    ("dealt", "drops"): "a portion without a finite gradient would be dealt for ever",
    ("cuda", "layerwise"): "a GPU computes behind the host: the host would have to wait at each layer",
    ("node", "layerwise"): "teams pull all weights at once, and their sum is of whole gradients: no layer would travel by itself",
    **dict.fromkeys(
        ((each, "in memory") for each in ("bfloat16", "topk", "rounded pulls")), "nothing is exchanged in shared memory"
    ),
    ("topk", "compensation"): "a pushed element may be of many mini-batches: the square says nothing of a single mini-batch",
    ("topk", "cuda shards"): "indices are looked at, and elements put in their places, on the host",
    ("topk share", "no topk"): "only topk uses topk_share",
    ("rounded pulls", "compensation"): "compensation needs one copy of the weights of a clock, and learners hold different copies",
    ("rounded pulls", "cuda shards"): "the host keeps, and rounds, the weights of learners",
    ("compensation", "fresh"): "a fresh gradient needs no compensation",
    ("rates", "fresh"): "a fresh gradient has the weight 1",
    ("rates", "no weights"): "'none' makes all weights 1; choose a modulation, e.g. 'inverse'",
    ("cycled momentum", "adagrad"): "torch refuses the schedule: adagrad has no momentum",
    ("cycled momentum", "local steps"): "the schedule is of own steps: the inner optimiser's momentum stays constant",
    ("trust ratios", "local steps"): "own steps push a way of weights, not a gradient; lars or lamb may be the inner_optimizer",
    ("agrees", "not alike"): "there is no single averaged gradient to take the norm of",
    ("agrees", "streamed"): "the first chunks of the new weights leave before the last of the gradients have come",
    ("agrees", "stages"): "the shards of one stage do not hear of another stage's shards",
    ("agrees", "tolerant"): "a learner back late would change a sum after the shards told the norm",
    ("node", "no sums"): _SUM,
    ("team size", "no teams"): "team_size is the most ranks of a team; say aggregation = 'node', with a protocol that has teams",
    ("tolerant", "collective"): "learners are shards, and a run needs every shard",
    ("tolerant", "node"): "a team cannot do without a rank",
    ("stages", "collective"): "learners are shards, each of all layers",
    ("stages", "layerwise"): "stages already pull and push separately, each with own shards",
    ("stages", "node"): "a team's ranks have whole models",
    ("leaving", "partition"): "a piece that leaves would leave the others waiting in the middle of a layer",
    ("partition", "aborts"): "a notice to one rank would have to stop the whole group in the middle of a layer",
    ("accumulation", "stages"): "micro_batches are parts of a batch too large for memory",
    ("duplex", "stages"): _ONE_WAY,
    ("cuda", "stages"): "ranks of a group pass on tensors in the host's memory",
    ("batched", "stages"): "torch.func.vmap computes whole models",
    ("batched", "micro-batches"): "torch.func.vmap computes a mini-batch as a whole",
    ("micro-batches", "layerwise"): "layers are pushed in each backward pass, and the mean is there after the last",
    ("partition", "no stages"): "one rank alone has no pieces of a layer",
    **dict.fromkeys((("cuts", "partition"), ("balance", "partition")), "each rank has a piece of all layers"),
    ("1f1b", "partition"): "all ranks are at work on the same micro-batch",
    ("1f1b", "no stages"): "one rank alone passes nothing on",
    **dict.fromkeys(((each, "no stages") for each in ("cuts", "balance")), "one rank alone has the whole model"),
    ("step", "stages"): "a step runs the whole model",
    ("step", "micro-batches"): "a step is given whole mini-batches",
    ("parameters", "stages"): "stages are parts of a real model",
    ("layer seconds", "no layerwise"): "the gradient leaves as a whole, and the seconds count as a whole",
    ("step", "loss"): "a step computes the loss itself",
    ("batched", "step"): "torch.func.vmap takes a model and a loss, not a step",
    ("cuda shards", "virtual"): "virtual shards lie where learners compute: set device",
    ("patience", "no evaluator"): "an evaluation after training can end nothing",
    ("patience", "collective"): "learners agree on the end among themselves; protocol hardsync computes the same",
    ("best", "sizes"): "only sizes travel, and there are no weights to keep",
    ("leaving", "collective"): "no learner can leave an allreduce alone: a slice would be missing",
    ("leaving", "node"): "no rank can leave a team alone: a part of the sum would be missing",
    **dict.fromkeys(((each, "batch") for each in ("optimizer", "schedule", "groups", "alpha0", "scaling")), _BATCH_STEP),
    ("several portions", "in order"): "each portion is summed by itself",
    ("patience", "batch"): "the tolerances of sandblaster say when training ends",
    ("partner", "batch"): "only the coordinator knows when an iteration ends and a checkpoint is due",
    ("epochs", "batch"): "protocol.iterations is the run's length",
    ("local steps", "batch"): "learners evaluate where the coordinator says, and nowhere else",
    ("weights' average", "batch"): "the result is the weights of the last iteration",
    **dict.fromkeys(
        (
            (each, "batch")
            for each in (
                "accumulation",
                "layerwise",
                "bfloat16",
                "topk",
                "rounded pulls",
                "compensation",
                "clipping",
                "clip average",
                "nonfinite",
            )
        ),
        _WHOLE,
    ),
    ("sampling", "batch"): "the batch is the same at each evaluation: protocol.share says how much of the training set",
    ("epoch samples", "no stream"): "an epoch is all samples of the data set",
    ("stages", "batch"): "each learner computes portions on the whole model",
    ("micro-batches", "batch"): "the last portion may be shorter, and no multiple of micro_batches",
    ("cuda", "batch"): "portions are summed in the host's memory",
    ("cuda shards", "batch"): "slots lie in the host's memory",
    ("sizes", "batch"): "a line search needs losses",
    ("batched", "batch"): "torch.func.vmap computes mini-batches of one size; the last portion may be shorter",
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
        why = REFUSED[one, other] + _way_out(config, known[other])
        lines.append(f"{feature.field} = {value!r}: expected {feature.expected} beside {beside}: {why}")
    if lines:
        raise ConfigError("\n".join(lines))


def table() -> str:
    """Return `docs/reference/compatibility.md`'s table; pairs of the same first feature and reason share a row."""
    known = {**FEATURES, **REAL, **VIRTUAL}
    rows: dict[tuple[str, str], list[str]] = {}
    for (one, other), why in REFUSED.items():
        rows.setdefault((known[one].words, why), []).append(known[other].words.format(_protocols(known[other])))
    lines = [f"| {one} | {'; '.join(others)} | {why} |" for (one, why), others in rows.items()]
    return "\n".join(["| not | beside any of | since |", "|---|---|---|", *lines, ""])


def _way_out(config: Config, feature: Feature) -> str:
    """Name this protocol's options, or else protocols, without the feature; "" unless protocols ask for it."""
    if "{}" not in feature.words:
        return ""
    protocol = config.protocol
    ways = [f"protocol.{words}" for words, other in _variants(protocol) if not feature.asked(replace(config, protocol=other))]
    ways = ways or [name for name, kind in PROTOCOLS.items() if not feature.asked(replace(config, protocol=kind()))]
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
