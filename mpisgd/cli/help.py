"""`--help` of `train` and `simulate`: a line per option, in groups; `--help-all` is tyro's."""

from __future__ import annotations

import ast
import inspect
import re
import textwrap
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import fields, is_dataclass
from functools import cache
from typing import Literal, get_args, get_origin, get_type_hints

from mpisgd.config import KINDS, Config, kind_of

#: Heading -> fields of `Config`, each in one group; a component brings its options along.
GROUPS: Mapping[str, tuple[str, ...]] = {
    "Run": ("out", "overwrite", "epochs", "seed"),
    "Model and data": ("model", "init_from", "data", "data_dir", "loss", "step", "mu", "accumulation", "sampling", "epoch_samples"),
    "Protocol": ("protocol",),
    "Rate and optimiser": (
        "alpha0",
        "linear_scaling",
        "optimizer",
        "groups",
        "schedule",
        "clip_norm",
        "clip_average",
        "clip_average_of",
        "nonfinite",
    ),
    "Own steps of learners": ("local_steps", "inner_alpha0", "inner_optimizer"),
    "Staleness and averages": ("modulate", "compensation", "compensation_memory", "averaging", "averaging_bias_correction"),
    "Ranks": (
        "shards",
        "group_size",
        "group_form",
        "micro_batches",
        "pipeline",
        "stages",
        "evaluator",
        "placement",
        "binding",
        "device",
        "shard_device",
        "deterministic",
        "threads",
        "memory_format",
        "autocast",
    ),
    "Exchange": ("aggregation", "team_size", "ahead", "per_layer", "push_format", "topk_share", "pull_format"),
    "Evaluation and log": ("evaluation", "log", "loggers", "callbacks"),
    "Checkpoints and faults": ("checkpoint", "faults"),
    "Stragglers put in on purpose": ("straggler",),
}
#: Groups of a virtual cluster alone.
VIRTUAL: Mapping[str, tuple[str, ...]] = {
    "Virtual cluster": ("virtual",),
    "Virtual seconds": ("compute", "network", "service"),
    "Virtual failures": ("failures",),
}

#: Option -> field without which it has no effect, and is shown by `--help-all` alone.
BESIDE: Mapping[str, str] = {
    "inner_alpha0": "local_steps",
    "inner_optimizer": "local_steps",
    "averaging_bias_correction": "averaging",
    "compensation_memory": "compensation",
    "team_size": "aggregation",
    "micro_batches": "group_size",
    "pipeline": "group_size",
    "group_form": "group_size",
    "stages": "group_size",
    "clip_average_of": "clip_average",
    "deterministic": "device",
    "modulate": "protocol.modulation",
    "evaluation.higher": "evaluation.best",
    "evaluation.patience": "evaluation.best",
    "evaluation.min_delta": "evaluation.patience",
    "straggler.delay_mean_s": "straggler.delay",
    "straggler.delay_spread": "straggler.delay",
    "straggler.delay_probability": "straggler.delay",
    "topk_share": "push_format",
    "epoch_samples": "sampling",
    "checkpoint.keep": "checkpoint.every_updates",
    "checkpoint.partner_updates": "checkpoint.every_updates",
    "straggler.pause_every": "straggler.pause_learner",
    "straggler.pause_s": "straggler.pause_learner",
    "straggler.rest_deviation_s": "straggler.rest_mean_s",
}
#: Options that most runs leave alone; `--help-all` shows them.
LEFT: frozenset[str] = frozenset(
    {
        "data.subtract_mean",
        "data.validation",
        "schedule.warmup_updates",
        "schedule.warmup_samples",
        "memory_format",
        "binding",
        "evaluation.batch",
        "evaluation.buffers",
        "evaluation.recalibrate_batches",
        "log.flush_rows",
        "log.flush_s",
        "log.progress_s",
    }
)

_OPTION, _WIDTH = 36, 100
_NAMED = {"custom": "your own a.b:factory", "torch": "torch's (OneCycleLR ...)"}
"""Kinds with other names in the help."""


@cache
def texts(cls: type) -> Mapping[str, str]:
    """Return each field's docstring (inherited first), or enumeration member's, on a line."""
    found = {field.name: texts(base)[field.name] for base in cls.__bases__ if is_dataclass(base) for field in fields(base)}
    (tree,) = ast.parse(textwrap.dedent(inspect.getsource(cls))).body
    assert isinstance(tree, ast.ClassDef)
    for field, text in zip(tree.body, tree.body[1:], strict=False):
        targets = [field.target] if isinstance(field, ast.AnnAssign) else field.targets if isinstance(field, ast.Assign) else []
        if targets and isinstance(targets[0], ast.Name) and isinstance(text, ast.Expr):
            found[targets[0].id] = " ".join(str(ast.literal_eval(text.value)).split())
    return found


def brief(text: str) -> str:
    """Return the first sentence without bracketed sources."""
    first = re.split(r"\.(?=\s+\S)(?!\s+\d)", text, maxsplit=1)[0].rstrip(".")
    return re.sub(r" \[(?=[A-Z])[^\]]*\]", "", first)


def usage(config: Config, command: str, words: Sequence[str] = (), *, virtual: bool = False) -> str:
    """Return `mpisgd COMMAND --help`; `config`: defaults and chosen kinds; `words`: other words."""
    launch = "" if virtual else "mpirun -n RANKS "
    lines = [
        f"usage: {launch}mpisgd {command} [job.toml] [options]",
        "",
        "The first word may be a TOML file; options override the file. In parentheses: the present value.",
        *_line("--help-all", "Explain every option, common or rare, with units and sources"),
        *_line("--print-config", "Print the resulting configuration and stop"),
        *([] if virtual else _line("--resume RUN", "Go on with an interrupted run, from the newest checkpoint")),
    ]
    for heading, names in {**(VIRTUAL if virtual else {}), **GROUPS}.items():
        shown = (name for name in names if _says(config, name, words))
        lines += [f"{heading}:", *(line for name in shown for line in _lines(config, name, words))]
    return "\n".join(lines)


def _says(config: Config, name: str, words: Sequence[str]) -> bool:
    if name in LEFT:
        return False
    if name not in BESIDE or any(word.partition("=")[0] == f"--{BESIDE[name]}".replace("_", "-") for word in words):
        return True
    component, _, field = BESIDE[name].rpartition(".")
    value = getattr(getattr(config, component) if component else config, field, 0)
    return value not in (0, -1, "none", "", "auto") if component else value != getattr(Config, field)


def _lines(config: Config, name: str, words: Sequence[str]) -> Iterator[str]:
    value = getattr(config, name)
    if name in KINDS:
        names = [_NAMED.get(kind, kind) for kind in KINDS[name]]
        chosen = getattr(value, "factory", "") or getattr(value, "scheduler", "") or kind_of(value)
        yield from _line(f"--{name} NAME", f"{', '.join(names)} ({chosen})")
    if is_dataclass(value):
        for field in fields(value):
            if _says(config, f"{name}.{field.name}", words):
                yield from _option(type(value), field.name, getattr(value, field.name), f"{name}.")
    elif name not in KINDS:
        yield from _option(Config, name, value)


def _option(cls: type, name: str, value: object, prefix: str = "") -> Iterator[str]:
    text = brief(texts(cls)[name])
    said = f"{value:g}" if isinstance(value, float) else str(value)
    text, meaning, rest = text.partition(f"; {said} = ")  # what 0 means
    said = f"{said} = {rest}" if meaning else said
    hint = get_type_hints(cls)[name]
    if get_origin(hint) is Literal:
        said = ", or ".join([said, ", ".join(str(other) for other in get_args(hint) if other != value)])
    elif isinstance(value, bool):
        said = "yes" if value else "no"
    elif isinstance(value, tuple):
        said = " ".join(map(str, value))
    elif isinstance(value, dict):
        said = " ".join(f"{key} {item}" for key, item in value.items())
    said = "" if value is None else said
    option = f"--{prefix}{'[no-]' if isinstance(value, bool) else ''}{name}".replace("_", "-")
    yield from _line(option, f"{text} ({said})" if said else text)


def _line(option: str, text: str) -> list[str]:
    first = f"  {option:<{_OPTION - 3}} "
    return textwrap.wrap(text, _WIDTH, initial_indent=first, subsequent_indent=" " * _OPTION, break_on_hyphens=False)
