"""User objects, named `package.module:attribute`."""

from __future__ import annotations

import importlib
import importlib.machinery
import importlib.util
import inspect
import multiprocessing
import re
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from mpisgd.base.errors import ConfigError, nearest

_under_way: list[str] = []
_SPEC = re.compile(r"[^\W\d]\w*(\.[^\W\d]\w*)*:[^\W\d]\w*(\.[^\W\d]\w*)*")


def is_spec(spec: str) -> bool:
    return bool(_SPEC.fullmatch(spec))


def file_of(module: str) -> str:
    """Return a module's file, or "", without importing anything.

    `importlib.util.find_spec` would import parent packages.
    """
    here, before = str(Path.cwd()), list(sys.path)
    top, *below = module.split(".")
    try:
        sys.path.insert(0, here)
        found = importlib.util.find_spec(top)
        for depth in range(1, 1 + len(below)):
            inside = None if found is None else found.submodule_search_locations
            name = ".".join([top, *below[:depth]])
            found = None if inside is None else importlib.machinery.PathFinder.find_spec(name, list(inside))
    except (ImportError, ValueError, AttributeError, KeyError):
        return ""
    finally:
        sys.path[:] = before
    return (found.origin or "") if found is not None and found.has_location else ""


def load_attribute(spec: str, field: str) -> Any:
    """Import `package.module:attribute`; the current directory comes first.

    Raises ConfigError, naming `field`, on failure.
    """
    if not is_spec(spec):
        raise ConfigError(f"{field} = {spec!r}: expected package.module:attribute, e.g. my_models:make_model")
    module_name, attribute = spec.split(":")
    value = _import(module_name, spec, field)
    where = f"module {module_name}"
    for name in attribute.split("."):
        if not hasattr(value, name):
            hint = nearest(name, [known for known in dir(value) if not known.startswith("_")])
            raise ConfigError(f"{field} = {spec!r}: {where} has no attribute {name!r}{hint}")
        value, where = getattr(value, name), f"{where}:{name}"
    return value


def _import(module_name: str, spec: str, field: str) -> Any:
    here = str(Path.cwd())
    if here not in sys.path:
        sys.path.insert(0, here)
    _under_way.append(module_name)
    try:
        return importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        parents = module_name.split(".")
        if error.name in {".".join(parents[:count]) for count in range(1, len(parents) + 1)}:
            raise ConfigError(
                f"{field} = {spec!r}: there is no module {error.name!r} in {here}, on PYTHONPATH or among installed packages"
            ) from error
        raise _failed(error, module_name, spec, field) from error
    except (Exception, SystemExit) as error:
        raise _failed(error, module_name, spec, field) from error
    finally:
        _under_way.pop()


def refuse_in_import(what: str) -> None:
    """Raise ConfigError if a module calls `what` while being imported.

    A spawned process first imports the script.
    """
    if getattr(multiprocessing.current_process(), "_inheriting", False):
        raise ConfigError(
            f"{what} is called as a worker process imports the script: put the call below `if __name__ == '__main__':`"
        )
    if _under_way:
        raise ConfigError(
            f"{what} is called as module {_under_way[-1]} is imported: put the call below `if __name__ == '__main__':`"
        )


def _failed(error: BaseException, module_name: str, spec: str, field: str) -> ConfigError:
    cause = f"{type(error).__name__}: {error}"
    return ConfigError(f"{field} = {spec!r}: importing module {module_name} failed with {cause}")


def call_factory(factory: Any, kwargs: Mapping[str, Any], offered: Mapping[str, Any], field: str) -> Any:
    """Call `factory` with `kwargs` and with entries of `offered` that name a parameter; `kwargs` win.

    Raises ConfigError if `factory` does not take these arguments; its own errors pass through.
    """
    if not callable(factory):
        raise ConfigError(f"{field}: expected a callable, found {type(factory).__name__}")
    signature = _signature(factory)
    if signature is None:
        return factory(**kwargs)
    named = {
        name
        for name, parameter in signature.parameters.items()
        if parameter.kind in (parameter.POSITIONAL_OR_KEYWORD, parameter.KEYWORD_ONLY)
    }
    arguments = {name: value for name, value in offered.items() if name in named} | dict(kwargs)
    try:
        signature.bind(**arguments)
    except TypeError as error:
        raise ConfigError(
            f"{field}: the parameters are {signature}, but {error}; a file gives arguments in the table of kwargs"
        ) from error
    return factory(**arguments)


def takes(factory: Any, parameter: str) -> bool:
    signature = _signature(factory) if callable(factory) else None
    return signature is not None and parameter in signature.parameters


def required_of(factory: Any) -> set[str]:
    signature = _signature(factory) if callable(factory) else None
    parameters = {} if signature is None else signature.parameters
    variable = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
    return {name for name, each in parameters.items() if each.default is each.empty and each.kind not in variable}


def _signature(factory: Callable[..., Any]) -> inspect.Signature | None:
    try:
        return inspect.signature(factory)
    except ValueError:  # of a few builtins
        return None
