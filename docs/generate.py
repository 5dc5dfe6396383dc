"""`python docs/generate.py` renews the pages of docs/reference that come from the code; a test compares them."""

from __future__ import annotations

import ast
import importlib
import inspect
import re
import sys
import types
import typing
from collections.abc import Iterator, Mapping
from dataclasses import MISSING, Field, fields, is_dataclass
from pathlib import Path
from typing import Any, Literal, get_args, get_origin, get_type_hints

import numpy as np

from mpisgd.__main__ import COMMANDS, module_of
from mpisgd.base import errors
from mpisgd.cli import bench, help, run
from mpisgd.config import KINDS, Config, compatibility
from mpisgd.records.log import schema
from mpisgd.rules import verdict

DOCS = Path(__file__).parent
PACKAGE = DOCS.parent / "mpisgd"

#: What the code names without a comment.
EVENTS = {
    "STARTED": "the shard began, at this clock",
    "STOPPED": "the shard gives out no more weights: the run is at its end",
    "DEPARTED": "a learner left while the others go on",
    "NONFINITE": "a gradient was not finite; `value` is its loss",
    "SNAPSHOT": "weights were copied for evaluation",
}
OUTCOMES = {"GOES_ON": "it was not the last one"}
REASONS = {
    "NONE": "it was applied",
    "STALE": "too old for the protocol",
    "NONFINITE": "not finite",
    "FINISHED": "the shard had finished",
}

#: What each environment variable does; the test looks for all that the package names.
VARIABLES = {
    "MPISGD_CACHE": "Directory of decoded data sets. Default: `$XDG_CACHE_HOME/mpisgd`, else `~/.cache/mpisgd`.",
    "MPISGD_DATA": "Directory below which data files lie, where `data_dir` says nothing.",
    "MPISGD_GPU_MEMORY": "`direct`: give MPI a GPU's memory; the default where MPI is CUDA-aware. `staged`: pinned host memory.",
    "MPISGD_RANKS": "How many ranks were started, for a launcher that does not say: batch scripts with `aprun` set it.",
    "MPISGD_START_S": "Leave after waiting so many seconds for other ranks, in MPI or `mpisgd.train`; 0 = never. Default: 600.",
    "MPISGD_STARTED_BY": "The command that started the ranks, for messages that name the one to go on with. `mpisgd run` sets it.",
    "MPISGD_HANG_S": "Dump the Python stack of every rank after each so many seconds. Default: never.",
    "MPISGD_MESSAGES": "`1`: print every message: `r3 -> 0 PUSH 12.4 MB`.",
    "MPISGD_TRAVEL": "How vectors travel, for measuring: `messages` (not in shared memory), `whole`, `in-place`, `streamed`,"
    " `gathered` or `buckets`, as rank 0 says. Default: the program's [choice](../howto/fewer-bytes.md#what-mpisgd-chooses).",
    "MPISGD_SSEND": "`1`: make every send synchronous, so that nothing rests on MPI's buffering.",
    "MPISGD_WAIT": "`blocking` or `polite`: how ranks wait. Default: `polite` where a node has more ranks than cores.",
}


_CONFIGURATION = """Every key of a job file, `job.toml`, and every option: `alpha0` is `--alpha0`, `protocol.n` is `--protocol.n`,
`log.flush_s` is `--log.flush-s`. A component that comes in kinds is chosen by its name: `[protocol]` with `name = "softsync"`, or
`--protocol softsync`. `[Zhang16]` and its like are in [Design](../explanation/design.md#sources).
"""
_STATUSES = """A second signal, or whatever kills a rank, ends a job with 128 + the signal's number, or with what the launcher makes
of it. A launcher may return 0 although a node was lost: believe `DONE`. `replay` and `doctor` return 1 where they find a fault,
`report` where the books of a run that has ended do not balance.
"""
_OTHER_VARIABLES = """The launcher's variables (`OMPI_COMM_WORLD_RANK`, `PMI_RANK`, `SLURM_STEP_NUM_TASKS` and their like) tell
a process its rank before MPI is initialised. `HDF5_USE_FILE_LOCKING`, `OMP_NUM_THREADS`, `OMPI_MCA_*` and `PRTE_MCA_*` mean what
their own documentation says.
"""
_COMBINATIONS = """`mpisgd train`, `simulate`, `submit`, `--print-config` and `mpisgd.train()` refuse these pairs alike, before
anything starts. A configuration that has several of them is told of all at once. What depends on the number of ranks (n, N, b,
stragglers, shards) is checked where that is known: by `submit`, by `simulate`, and by `train` when it starts.
"""


def _cell(text: str) -> str:
    return " ".join(text.split()).replace("|", "\\|").replace("<", "&lt;") or " "


def _table(head: tuple[str, ...], rows: typing.Iterable[tuple[str, ...]]) -> str:
    lines = ["| " + " | ".join(head) + " |", "|" + "---|" * len(head)]
    return "\n".join([*lines, *("| " + " | ".join(map(_cell, row)) + " |" for row in rows), ""])


def _type(hint: Any) -> str:
    """What a user writes: `int`, `"drop" or "apply"`, `list of int`."""
    origin, arguments = get_origin(hint), get_args(hint)
    if origin is typing.Annotated:
        return _type(arguments[0])
    if origin is Literal:
        return ", ".join(f'"{each}"' if isinstance(each, str) else str(each) for each in arguments)
    if origin in (typing.Union, types.UnionType):
        return " or ".join(_type(each) for each in arguments if each is not types.NoneType)
    if origin is tuple:
        return f"list of {_type(arguments[0])}"
    if origin is dict:
        return f"table of {_type(arguments[1])}"
    return {"str": "string", "Path": "path", "bool": "bool", "PathLike": "path"}.get(hint.__name__, hint.__name__)


def _default(field: Field[Any]) -> str:
    value = field.default
    if value is MISSING:
        return "" if field.default_factory is MISSING else "none" if not field.default_factory() else "…"
    if value is None or value == "":
        return ""
    if isinstance(value, bool):
        return f"`{str(value).lower()}`"
    if isinstance(value, tuple):
        return f"`{list(value)}`"
    return f"`{value}`" if not isinstance(value, str) else f'`"{value}"`'


def _fields(cls: type, prefix: str = "", names: tuple[str, ...] | None = None) -> str:
    hints, texts = get_type_hints(cls), help.texts(cls)
    chosen = [field for field in fields(cls) if names is None or field.name in names]
    rows = ((f"`{prefix}{each.name}`", _type(hints[each.name]), _default(each), texts[each.name]) for each in chosen)
    return _table(("key", "type", "default", ""), rows) if chosen else ""


def configuration() -> str:
    parts = [_CONFIGURATION]
    for heading, names in {**help.GROUPS, **help.VIRTUAL}.items():
        own = tuple(name for name in names if name not in KINDS and not is_dataclass(getattr(Config(), name)))
        if own:
            parts += [f"## {heading}\n", _fields(Config, names=own)]
        for name in names:
            if name in KINDS:
                parts += [f"## {name}\n", help.texts(Config)[name] + "\n"]
                for kind, cls in KINDS[name].items():
                    parts += [f'### {name} = "{kind}"\n', inspect.cleandoc(cls.__doc__ or "") + "\n", _fields(cls, f"{name}.")]
            elif is_dataclass(getattr(Config(), name)):
                cls = type(getattr(Config(), name))
                simulate = "Read by `simulate` alone; `train` ignores it.\n" if name in _virtual() else ""
                parts += [f"## {name}\n", inspect.cleandoc(cls.__doc__ or "") + "\n", simulate, _fields(cls, f"{name}.")]
    return _page("Configuration", "the dataclasses of `mpisgd/config/`", *parts)


def _virtual() -> set[str]:
    return {name for names in help.VIRTUAL.values() for name in names}


def command_line() -> str:
    parts = [_table(("command", ""), ((f"[`mpisgd {name}`](#mpisgd-{name})", text) for name, text in COMMANDS.items()))]
    parts.append("`mpisgd --version` prints the version.\n")
    for name, text in COMMANDS.items():
        parts += [f"## mpisgd {name}\n"]
        if name in ("run", "train", "simulate"):
            parts += [_run(name, text)]
            continue
        cls = importlib.import_module(module_of(name)).Options
        if name == "bench":
            rows = ((f"`{each}`", str(one.ranks) if one.ranks > 1 else "", one.about) for each, one in bench.BENCHES.items())
            parts += ["`[mpirun -n RANKS] mpisgd bench WHAT [options]`: " + text + ".\n", _table(("WHAT", "ranks", ""), rows)]
        else:
            parts += [inspect.cleandoc(cls.__doc__ or "") + "\n"]
        parts.append(_options(cls))
    return _page("Command line", "`mpisgd/cli/`", *parts)


def _run(name: str, text: str) -> str:
    usage = {"run": "mpisgd run -n RANKS", "train": "mpirun -n RANKS mpisgd train", "simulate": "mpisgd simulate"}[name]
    usage += " [job.toml] [options]"
    if name == "run":
        rows = ((f"`{option} {value}`", said) for option, (value, said) in run.OPTIONS.items())
        return f"`{usage}`: {text}. All other options are those of [train](#mpisgd-train).\n\n" + _table(("option", ""), rows)
    more = ([("`--resume RUN`", "go on with an interrupted run, from its newest checkpoint")] if name == "train" else []) + [
        ("`--print-config`", "print the resulting configuration, as TOML, and stop"),
        ("`--help`", "one line per option, in groups, with those of the kinds that are chosen"),
        ("`--help-all`", "explain every option"),
    ]
    also = "without `[virtual]`, `[compute]`, `[network]`, `[service]` and `[failures]`" if name == "train" else "all tables"
    return f"`{usage}`: {text}. Options: every key of [Configuration](configuration.md), {also}.\n\n" + _table(("option", ""), more)


def _options(cls: type) -> str:
    hints, texts = get_type_hints(cls, include_extras=True), help.texts(cls)
    rows = []
    for field in sorted(fields(cls), key=lambda each: each.kw_only):  # what commands have in common, last
        required = field.default is MISSING and field.default_factory is MISSING
        dashed = f"--{field.name.replace('_', '-')}"
        name = field.name.upper() if required else f"--[no-]{dashed[2:]}" if field.default is True else dashed
        shown = "" if field.default in (False, MISSING, Path(), sys.executable) else _default(field)
        rows.append((f"`{name}`", _type(hints[field.name]), shown, texts[field.name]))
    return _table(("option", "type", "default", ""), rows)


def log_format() -> str:
    text = inspect.cleandoc(schema.__doc__ or "").replace("(DESIGN 6)", "([Design, section 6](../explanation/design.md))")
    comments = _comments(PACKAGE / "records" / "log" / "schema.py")
    parts = [text + "\n", f"This is version {schema.SCHEMA_VERSION} of the format.\n"]
    for name, about in schema.ABOUT.items():
        rows = ((f"`{each.name}`", str(np.dtype(each.type)), each.unit, each.meaning) for each in schema.COLUMNS[name])
        parts += [f"## {name}\n", about + "\n", _table(("column", "type", "unit", ""), rows)]
    events = ((str(each.value), each.name, comments["Event", each.name] or EVENTS[each.name]) for each in schema.Event)
    parts += ["## Kinds of events\n", _table(("`kind`", "", ""), events)]
    for cls, column in ((schema.Outcome, "outcome"), (schema.Why, "why")):
        kinds = ((str(each.value), each.name, comments[cls.__name__, each.name] or OUTCOMES[each.name]) for each in cls)
        parts += [f"## {column}\n", inspect.cleandoc(cls.__doc__ or "") + "\n", _table((f"`{column}`", "", ""), kinds)]
    for heading, members in (("Verdicts", verdict.Kind), ("Reasons", verdict.Reason)):
        texts = {**REASONS, **help.texts(members)}
        column = heading.lower().removesuffix("s")
        rows = ((str(each.value), each.name, texts[each.name]) for each in members)
        parts += [f"## {heading}\n", inspect.cleandoc(members.__doc__ or "") + "\n", _table((f"`{column}`", "", ""), rows)]
    return _page("Log format", "`mpisgd/records/log/schema.py`", *parts)


def _comments(path: Path) -> Mapping[tuple[str, str], str]:
    """(enumeration, member) -> the comment behind it, in this file."""
    found, where = {}, ""
    for line in path.read_text().splitlines():
        if match := re.match(r"class (\w+)", line):
            where = match[1]
        elif match := re.match(r"    ([A-Z_]+) = \d+\s*(?:# (.*))?$", line):
            found[where, match[1]] = match[2] or ""
    return found


def exit_statuses() -> str:
    tree = ast.parse((PACKAGE / "base" / "errors.py").read_text())
    said = {
        "EXIT_OK": "finished; `DONE` is in the run's directory",
        "EXIT_FAILED": "failed in mid-run; the last lines say why, on which rank and host, and how to go on",
        "EXIT_USAGE": "refused: options, data, or a checkpoint that cannot be read",
        "EXIT_INTERRUPTED": "interrupted by a signal, with a checkpoint: `--resume` goes on. In Python: `RunInterrupted`",
        "EXIT_STOPPED": "Ctrl-C, at a command that is one process, or before ranks have begun to train",
    }
    names = [node.targets[0].id for node in tree.body if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name)]
    rows = [(str(getattr(errors, name)), said[name]) for name in names if name.startswith("EXIT_")]
    kinds = [each for each in vars(errors).values() if isinstance(each, type) and issubclass(each, errors.MpisgdError)]
    return _page(
        "Exit statuses",
        "`mpisgd/base/errors.py`",
        _table(("status", ""), rows),
        _STATUSES,
        "## Exceptions\n",
        "From Python, `mpisgd.train` and `mpisgd.launch` raise these, all of them an `MpisgdError`. `mpisgd` has those to catch"
        " (`mpisgd.DataError`), and `RunInterrupted`; `mpisgd.base.errors` has all. Of what all ranks of a script"
        " raise, and none catches, the first rank prints the traceback, and leaves with this status:\n",
        _table(("exception", "status", ""), ((f"`{each.__name__}`", str(each.exit_status), each.__doc__ or "") for each in kinds)),
    )


def environment() -> str:
    rows = ((f"`{name}`", text) for name, text in sorted(VARIABLES.items()))
    return _page("Environment variables", "the list in `docs/generate.py`", _table(("variable", ""), rows), _OTHER_VARIABLES)


def _pairs() -> Iterator[str]:
    pairs, needs = compatibility.tables()
    yield from (pairs, "## Options that need another\n", needs)


def combinations() -> str:
    return _page("What does not go together", "`RULES` of `mpisgd/config/compatibility.py`", _COMBINATIONS, *_pairs())


def _page(title: str, source: str, *parts: str) -> str:
    first = f"<!-- Made by `python docs/generate.py` from {source}: edit that. -->\n\n# {title}\n"
    return "\n".join([first, *(part for part in parts if part)])


_LOOP = """
A run of one learner (hardsync, or allreduce of one process; virtual or real) has the bits of the plain PyTorch loop over the same
mini-batches: parameters, buffers, what the optimiser keeps, losses and evaluations. The loop is

```python
# loop.py
model.train()
for batch in batches:
    optimizer.zero_grad()
    loss = step(model, batch)  # or loss(model(inputs), targets)
    loss.backward()
    optimizer.step()
    scheduler.step()
```

`python -m pytest tests/virtual/test_torch_law.py` runs each idiom below both ways, and compares.
"""
_OTHERWISE = """
## Is otherwise than in the loop

- Several learners: the loop is that over their mean gradient. Each has buffers of its own; evaluations, and what is saved, have
  those of learner 0, as of when it first pulled the weights (`evaluation.buffers`).
- A parameter that a mini-batch does not use is passed over, as torch does where `grad` is None: where no learner's gradient of an
  update has it. Pipelines, partitioned models and `virtual.batched` refuse such a model, unless zeros move nothing (SGD without
  momentum and weight decay).
- Sparse gradients (`nn.Embedding(sparse=True)`) are added to dense ones, whose last bits may be others.
- Inputs and targets of other float types become float32, and classes int64: a loss of float64 targets has other last bits.
- `memory_format = "contiguous"` has the loop's bits; the default is channels_last, which convolutions compute faster.
- Shards on a GPU step by torch's fused kernels (`fused=True`), whose last bits are others than those of its default.
"""


def torchs_loop() -> str:
    """The idioms of PyTorch that the conformance suite runs."""
    sys.path.append(str(DOCS.parent))
    zoo = importlib.import_module("tests.torch_law").ZOO
    taken = "; ".join(name for name, idiom in zoo.items() if not idiom.refused)
    rows = [f"| {name} | `{idiom.refused}` | {idiom.instead} |" for name, idiom in zoo.items() if idiom.refused]
    refused = "\n".join(["## Is refused by name", "", "| idiom | told | write instead |", "|---|---|---|", *rows])
    return _page("PyTorch's own loop", "`tests/torch_law`", _LOOP, f"## Goes in as it is\n\n{taken}.\n", refused, _OTHERWISE)


PAGES = {
    "torch": torchs_loop,
    "command-line": command_line,
    "configuration": configuration,
    "compatibility": combinations,
    "log-format": log_format,
    "exit-statuses": exit_statuses,
    "environment": environment,
}


def pages() -> Iterator[tuple[Path, str]]:
    """Every generated page's path and text."""
    for name, page in PAGES.items():
        yield DOCS / "reference" / f"{name}.md", page()


if __name__ == "__main__":
    for path, text in pages():
        path.write_text(text)
