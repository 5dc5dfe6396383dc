"""Initial weights of a run from a file (`init_from`)."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from pathlib import Path

import torch
from torch import Tensor, nn

from mpisgd.base.errors import CheckpointError, ConfigError, DataError
from mpisgd.config import Config
from mpisgd.records import weights
from mpisgd.records.log import schema
from mpisgd.records.log.reader import Directory
from mpisgd.records.weights import State

NAME = "init_from"
"""Entry of `brought` in [environment] of config.toml."""


def described(config: Config) -> dict[str, dict[str, str]]:
    if not config.init_from:
        return {}
    file = _file(config).absolute()
    return {NAME: {"file": str(file), "sha256": _sha256(file)}}


def same(run: Directory, where: str = "") -> Path:
    """Return a run's initial file; `where`: its new place. Raises DataError if gone, changed, or not named."""
    entry = run.environment.get("brought", {}).get(NAME)
    if not isinstance(entry, dict) or not all(isinstance(entry.get(key), str) for key in ("file", "sha256")):
        raise DataError(f"{run.path / schema.CONFIG}: {NAME} is given, but the name or sha256 of the file is missing")
    path = weights.file_of(Path(where or entry["file"]))
    if not path.is_file():
        raise DataError(f"{path} is not there: {run.path} began with the weights of this file (sha256 {entry['sha256']})")
    found = _sha256(path)
    if found != entry["sha256"]:
        raise DataError(f"{path} has changed since {run.path} began with the weights: the sha256 was {entry['sha256']}, is {found}")
    return path


def load(module: nn.Module, config: Config) -> None:
    """Load the weights; buffers missing in the file stay as made. Raises ConfigError for a misfit."""
    field = f"{NAME} = {config.init_from!r}"
    path, out = _file(config), Path(config.out).resolve()
    if config.overwrite and out in path.resolve().parents:
        raise ConfigError(f"{field} lies in out = {config.out!r}, and overwrite empties this directory: expected another out")
    try:
        state = weights.read(Path(config.init_from))
    except (CheckpointError, DataError) as error:
        raise ConfigError(f"{field}: {error}") from error
    problems = list(_problems(module, state))
    if problems:
        raise ConfigError(f"{field} is not of this model: {'; '.join(problems)}")
    try:
        module.load_state_dict(state, strict=False)
    except RuntimeError as error:  # of a module's own reader
        raise ConfigError(f"{field} cannot be loaded: {error}") from error


def holds_more(module: nn.Module) -> bool:
    """Return whether a model has untrained state: no checkpoint has it."""
    trained = {name for name, each in module.named_parameters(remove_duplicate=False) if each.requires_grad}
    return bool(set(module.state_dict()) - trained)


def _problems(module: nn.Module, state: State) -> Iterator[str]:
    """Yield misfits: the first of each kind, with a count."""
    own = {name: each for name, each in module.state_dict(keep_vars=True).items() if isinstance(each, Tensor)}
    parameters = {name: id(each) for name, each in own.items() if isinstance(each, nn.Parameter)}
    by_parameter: dict[int, list[str]] = {}  # of shared weights one name is enough
    for name, parameter in parameters.items():
        by_parameter.setdefault(parameter, []).append(name)
    lacking = [names[0] for names in by_parameter.values() if not any(name in state for name in names)]
    if lacking:
        yield f"the file lacks {lacking[0]!r}{_count(lacking)}"
    foreign = [name for name in state if name not in own]
    if foreign:
        yield f"the file has {foreign[0]!r}, unknown to the model{_count(foreign)}"
    other = [name for name in state if name in own and _kind(state[name]) != _kind(own[name])]
    if other:
        yield f"{other[0]!r} of the file is {_kind(state[other[0]])}, expected {_kind(own[other[0]])}{_count(other)}"
    for names in by_parameter.values():
        first, *others = [name for name in names if name in state] or [""]
        apart = [name for name in others if name not in other and not torch.equal(state[name], state[first])]
        if apart:
            yield f"{apart[0]!r} and {first!r} of the file have different values, but are the same parameter"


def _kind(tensor: Tensor) -> str:
    """Return type and shape; floats of any size are converted."""
    what = "float" if tensor.is_floating_point() else str(tensor.dtype).removeprefix("torch.")
    return f"{what} {tuple(tensor.shape)}"


def _count(names: list[str]) -> str:
    return f" (and {len(names) - 1:,} more)" if len(names) > 1 else ""


def _file(config: Config) -> Path:
    return weights.file_of(Path(config.init_from))


def _sha256(path: Path) -> str:
    try:
        with path.open("rb") as file:
            return hashlib.file_digest(file, "sha256").hexdigest()
    except OSError:
        return ""
