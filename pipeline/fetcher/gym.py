"""One generator of reasoning_gym, without the hundred others.

Invariant: a generator loads in milliseconds. Importing all of reasoning_gym draws in sympy and matplotlib: a second and 100 MB
in every process that verifies an answer, for nothing.
"""

from __future__ import annotations

import dataclasses
import difflib
import importlib
import importlib.util
import re
import sys
from importlib.machinery import SourceFileLoader
from pathlib import Path
from types import ModuleType
from typing import Any

from pipeline.errors import ConfigError

_NAME = re.compile(r"""^(?:DATASET_NAME = |register_dataset\()["'](\w+)["']""", re.MULTILINE)


def make_generator(name: str, params: dict[str, Any], *, seed: int, size: int) -> Any:
    """The data set object of a generator: indexable items and `score_answer`. Raises ConfigError, naming the nearest."""
    kind, settings = _classes(name)
    known = {field.name for field in dataclasses.fields(settings)} - {"seed", "size"}
    for given in params:
        if given in ("seed", "size"):
            raise ConfigError(f"params.{given}: say it as the dataset's own key `{given}`")
        if given not in known:
            raise ConfigError(f"params.{given} is unknown to generator {name!r}: it takes {sorted(known)}{_near(given, known)}")
    try:
        made = settings(**params, seed=seed, size=size)
        if hasattr(made, "validate"):
            made.validate()
        return kind(made)
    except (AssertionError, TypeError, ValueError) as error:
        raise ConfigError(f"params {params} are refused by generator {name!r}: {error}") from error


def generator_modules() -> dict[str, str]:
    """Generator -> module, read from the sources without importing them."""
    root = _root()
    modules = {}
    for path in sorted(root.rglob("*.py")):
        found = _NAME.search(path.read_text(encoding="utf-8"))
        if found:
            modules[found.group(1)] = ".".join(("reasoning_gym", *path.relative_to(root).with_suffix("").parts))
    return modules


def _root() -> Path:
    spec = importlib.util.find_spec("reasoning_gym")
    if spec is None or not spec.submodule_search_locations:
        raise ConfigError("source reasoning_gym needs the package reasoning-gym: pip install reasoning-gym")
    return Path(spec.submodule_search_locations[0])


def _classes(name: str) -> tuple[Any, Any]:
    modules = generator_modules()
    if name not in modules:
        raise ConfigError(f"generator {name!r} is unknown to reasoning_gym{_near(name, modules) or '; see its gallery'}")
    module = modules[name]
    if "reasoning_gym" not in sys.modules:
        _defer("reasoning_gym")
    for depth in range(2, module.count(".") + 1):
        package = ".".join(module.split(".")[:depth])
        if package not in sys.modules:
            _defer(package)
    importlib.import_module(module)
    return importlib.import_module("reasoning_gym.factory").DATASETS[name]


def _defer(package: str) -> None:
    """Put a package in place whose own code runs when something of it is asked for, and not for the sake of a submodule."""
    spec = importlib.util.find_spec(package)
    if spec is None or not isinstance(spec.loader, SourceFileLoader):
        return  # a folder without code of its own: the import system needs no help
    module = importlib.util.module_from_spec(spec)
    loader = spec.loader

    def complete(attribute: str) -> Any:
        if attribute.startswith("__"):
            raise AttributeError(attribute)
        if importlib.util.find_spec(f"{package}.{attribute}") is not None:
            return importlib.import_module(f"{package}.{attribute}")
        vars(module).pop("__getattr__", None)
        loader.exec_module(module)
        return getattr(module, attribute)

    vars(module)["__getattr__"] = complete
    _register(package, module)


def _register(package: str, module: ModuleType) -> None:
    sys.modules[package] = module
    parent, _, name = package.rpartition(".")
    if parent:
        setattr(sys.modules[parent], name, module)


def _near(name: str, known: Any) -> str:
    close = difflib.get_close_matches(name, list(known), 1)
    return f"; did you mean {close[0]!r}?" if close else ""
