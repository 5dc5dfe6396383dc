"""Names of the user's parts, with file and checksum, for config.toml (DESIGN 6).

Objects given to `mpisgd.train` have their importable name; a lambda, an inner function or an instance has none.
"""

from __future__ import annotations

import hashlib
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from mpisgd.base.imports import file_of
from mpisgd.config import Config, CustomDataOptions, CustomModelOptions, replace
from mpisgd.job.parts import UNNAMED, UserObjects

PARTS = ("model", "data", "loss", "step")
"""Parts that may be objects."""
NAMED = (*PARTS, "protocol", "schedule")
"""Parts that may be named."""


def with_user_objects(config: Config, user_objects: UserObjects) -> Config:
    changes: dict[str, Any] = {}
    if user_objects.model is not None:
        changes["model"] = CustomModelOptions(factory=spec_of(user_objects.model))
    if user_objects.data is not None:
        changes["data"] = CustomDataOptions(factory=spec_of(user_objects.data), validation=config.data.validation)
    if user_objects.loss is not None:
        changes["loss"] = _name_in_torch(user_objects.loss) or spec_of(user_objects.loss) or UNNAMED
    if user_objects.step is not None:
        changes["step"] = spec_of(user_objects.step) or UNNAMED
    return replace(config, **changes)


def described(config: Config, user_objects: UserObjects) -> dict[str, dict[str, str]]:
    """Return each part's object (package.module:attribute), module, qualified_name, file and sha256; "" = none."""
    specs = {
        "model": getattr(config.model, "factory", ""),
        "data": getattr(config.data, "factory", ""),
        "loss": config.loss if ":" in config.loss else "",
        "step": config.step if ":" in config.step else "",
        "protocol": getattr(config.protocol, "factory", ""),
        "schedule": getattr(config.schedule, "factory", ""),
    }
    found = {}
    for part in NAMED:
        value = getattr(user_objects, part, None)
        if part == "loss" and value is not None and _name_in_torch(value):
            continue
        if value is not None:
            found[part] = _of_object(value)
        elif specs[part]:
            found[part] = _of_spec(specs[part])
    return found


def spec_of(value: Any) -> str:
    """Return the importable `package.module:attribute`; "" if none."""
    name = getattr(value, "__qualname__", "")
    module = _importable(getattr(value, "__module__", None) or "")
    if not isinstance(name, str) or not name or not module or "<" in name:
        return ""
    found: Any = sys.modules.get(value.__module__)
    for attribute in name.split("."):
        found = getattr(found, attribute, None)
    return f"{module}:{name}" if found == value else ""


def _name_in_torch(loss: Any) -> str:
    name = getattr(loss, "__name__", "")
    return name if isinstance(name, str) and name and getattr(torch.nn.functional, name, None) is loss else ""


def _importable(module: str) -> str:
    """Return a module's importable name; for the started script, its file's."""
    if module != "__main__":
        return module
    main = sys.modules["__main__"]
    spec = getattr(main, "__spec__", None)
    if spec is not None:  # python -m package.module
        return str(spec.name)
    file = Path(getattr(main, "__file__", "") or "")
    return file.stem if file.suffix == ".py" and file.stem.isidentifier() else ""


def _of_object(value: Any) -> dict[str, str]:
    itself = value if hasattr(value, "__qualname__") else type(value)
    module = getattr(itself, "__module__", None) or ""
    name = itself.__qualname__ if itself is value else f"an instance of {itself.__qualname__}"
    file = getattr(sys.modules.get(module), "__file__", None) or ""
    return {"object": spec_of(value), "module": _importable(module) or module, "qualified_name": name, **_of_file(file)}


def _of_spec(spec: str) -> dict[str, str]:
    """Describe a part without import: the first rank may not use the part."""
    module, _, name = spec.partition(":")
    return {"object": spec, "module": module, "qualified_name": name, **_of_file(file_of(module))}


def _of_file(file: str) -> dict[str, str]:
    path = Path(file).absolute()
    return {"file": str(path) if file else "", "sha256": sha256_of(path) if file else ""}


def sha256_of(path: Path) -> str:
    try:
        return hashlib.sha256(path.read_bytes()).hexdigest()
    except OSError:
        return ""


def files_of(entries: Mapping[str, Mapping[str, str]]) -> list[Path]:
    return [Path(file) for file in dict.fromkeys(entry["file"] for entry in entries.values()) if file]
