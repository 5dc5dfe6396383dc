"""How the user's objects (`user_code.NAMED`) get into a replay: by name, from the run's modules."""

from __future__ import annotations

import dataclasses
import shlex
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from mpisgd.base.errors import ConfigError
from mpisgd.base.imports import file_of
from mpisgd.config import Config, CustomDataOptions, CustomModelOptions, CustomScheduleOptions, trust
from mpisgd.job.parts import UNNAMED, UserObjects
from mpisgd.job.user_code import NAMED, PARTS, sha256_of
from mpisgd.protocols import OwnProtocolOptions
from mpisgd.records import initial
from mpisgd.records.log.reader import Run
from mpisgd.replay.checks.proof import Proof
from mpisgd.replay.checks.record import Record

_PLACEHOLDER = "MODULE:NAME"


def check_consent(record: Record, user_objects: UserObjects, named: Mapping[str, str]) -> None:
    """Raise ConfigError if the run names code neither brought nor `named` (part -> package.module:attribute)."""
    names = trust.names_of(record.config)
    parts = {field: field.removesuffix(".factory") for field in names}
    consented = {
        field: names[field] for field, part in parts.items() if getattr(user_objects, part, None) is not None or named.get(part)
    }
    told = {part: entry["object"] for part, entry in _entries(record.run).items()}
    same = {parts[field]: spec for field, spec in names.items()} == told
    trust.check(record.path, record.config, consented, line(record.run) if same else "")


def renamed(record: Record, named: Mapping[str, str]) -> Record:
    """Rename the user's objects in all attempts."""
    config = renamed_in(record.config, {part: name for part, name in named.items() if name})
    return dataclasses.replace(record, config=config, earlier=tuple(renamed(each, named) for each in record.earlier))


def renamed_in(config: Config, named: Mapping[str, str]) -> Config:
    changes: dict[str, Any] = {part: named.get(part, getattr(config, part)) for part in ("loss", "step")}
    for part, kind in (("model", CustomModelOptions), ("data", CustomDataOptions)):
        if part in named:
            changes[part] = kind(factory=named[part], kwargs=getattr(getattr(config, part), "kwargs", {}))
    if "protocol" in named:
        own = config.protocol if isinstance(config.protocol, OwnProtocolOptions) else OwnProtocolOptions()
        changes["protocol"] = dataclasses.replace(own, factory=named["protocol"])
    if "schedule" in named:
        rate = config.schedule if isinstance(config.schedule, CustomScheduleOptions) else CustomScheduleOptions()
        changes["schedule"] = dataclasses.replace(rate, factory=named["schedule"])
    return dataclasses.replace(config, **changes)


def with_initial(record: Record, where: str, proof: Proof) -> Record:
    """Give a run its initial weights again; `where`: their place, if moved.

    Raises DataError: the file is gone, or has changed.
    """
    if not record.config.init_from or not record.computed:
        return record
    path = initial.same(record.run, where)
    proof.seams.append(f"begins with the weights of {path}, with the sha256 noted by the run")
    return _with_initial(record, str(path))


def _with_initial(record: Record, path: str) -> Record:
    config = dataclasses.replace(record.config, init_from=path, overwrite=False)
    return dataclasses.replace(record, config=config, earlier=tuple(_with_initial(each, path) for each in record.earlier))


@contextmanager
def saying_how(record: Record, user_objects: UserObjects) -> Iterator[None]:
    """Tell in a ConfigError how to bring the user's missing objects."""
    config, entries = record.config, _entries(record.run)
    unnamed = {
        "model": isinstance(config.model, CustomModelOptions) and not config.model.factory,
        "data": isinstance(config.data, CustomDataOptions) and not config.data.factory,
        "loss": config.loss == UNNAMED,
        "step": config.step == UNNAMED,
    }
    missing = [part for part in PARTS if unnamed[part] and getattr(user_objects, part) is None]
    if missing:
        what = "; ".join(f"the {part} was {entries.get(part, {}).get('qualified_name', 'an object')}" for part in missing)
        raise ConfigError(
            f"{record.path}: {what}, without a name to import: give the maker a name in a module, and\n"
            f"{line(record.run)}\n"
            "or, from Python: from mpisgd.replay import UserObjects, replay;"
            f" print(*replay({str(record.path)!r}, UserObjects({', '.join(f'{part}=...' for part in missing)})).lines(), sep='\\n')"
        )
    try:
        yield
    except ConfigError as error:
        mine = [part for part in NAMED if part in entries and getattr(user_objects, part, None) is None]
        if not mine:
            raise
        raise ConfigError(f"{error}\nto bring the objects of the run:\n{line(record.run)}") from error


def line(run: Run) -> str:
    """Return a shell line to replay a run with its objects."""
    entries, directory = _entries(run), str(run.environment.get("directory", ""))
    words = ["mpisgd", "replay", str(run.path.absolute())]
    for part, entry in entries.items():
        words += [f"--{part}", entry["object"] or _PLACEHOLDER]
    roots = dict.fromkeys(_root(entry) for entry in entries.values() if entry["object"] and entry["file"])
    search = [shlex.quote(root) for root in roots if root != directory and "site-packages" not in root]
    path = [f"PYTHONPATH={':'.join(search)}${{PYTHONPATH:+:$PYTHONPATH}}"] if search else []
    return " ".join([*(["cd", shlex.quote(directory), "&&"] if directory else []), *path, shlex.join(words)])


def changed(run: Run) -> list[str]:
    """Describe modules with other files than in the run."""
    notes = []
    for part, entry in _entries(run).items():
        module = entry["object"].partition(":")[0]
        here = file_of(module) if module else ""
        if here and entry["sha256"] and sha256_of(Path(here)) != entry["sha256"]:
            notes.append(f"{part} {entry['object']}: {here} is not the file of the run: the sha256 was {entry['sha256']}")
    return notes


def _root(entry: Mapping[str, str]) -> str:
    file, module = Path(entry["file"]), entry["object"].partition(":")[0]
    levels = module.count(".") + (file.stem == "__init__")
    return str(file.parents[levels])


def _entries(run: Run) -> dict[str, dict[str, str]]:
    said = run.environment.get("brought", {})
    fields = ("object", "qualified_name", "file", "sha256")
    return {part: {name: str(said[part].get(name, "")) for name in fields} for part in NAMED if part in said}
