"""Objects named by `module:attribute` in a configuration: found, or refused with one line that says what is wrong."""

from __future__ import annotations

import difflib
import importlib
import sys
from pathlib import Path
from typing import Any

from pipeline.errors import ConfigError, root_cause


def is_reference(name: str) -> bool:
    """True for `module:attribute`; a short name has no colon."""
    return ":" in name


def load_attribute(reference: str, what: str) -> Any:
    """The object that `module:attribute` names; `what` is its role, and begins the message when it cannot be had.

    The attribute may be dotted. Raises ConfigError.
    """
    module_name, _, path = reference.partition(":")
    if not module_name or not path:
        raise ConfigError(f"{what} {reference!r} is neither a known short name nor of the form module:attribute")
    target = _load_module(module_name, f"{what} {reference!r}")
    for name in path.split("."):
        if not hasattr(target, name):
            near = difflib.get_close_matches(name, [found for found in dir(target) if not found.startswith("_")], 1)
            hint = f"; did you mean {near[0]!r}?" if near else ""
            raise ConfigError(f"{what} {reference!r}: {getattr(target, '__name__', target)!r} has no {name!r}{hint}")
        target = getattr(target, name)
    return target


def load_callable(reference: str, what: str) -> Any:
    """As `load_attribute`, and refuses what cannot be called."""
    target = load_attribute(reference, what)
    if not callable(target):
        raise ConfigError(f"{what} {reference!r} is a {type(target).__name__}, not a callable")
    return target


def pick(name: str, known: dict[str, Any], what: str) -> Any:
    """The entry of a short name, or the callable behind `module:attribute`. Raises ConfigError with the nearest short name."""
    if name in known:
        return known[name]
    if is_reference(name):
        return load_callable(name, what)
    near = difflib.get_close_matches(name, known, 1)
    hint = f"; did you mean {near[0]!r}?" if near else ""
    raise ConfigError(f"{what} {name!r} is unknown: one of {sorted(known)}, or module:attribute{hint}")


def add_code_folder(folder: Path) -> None:
    """Let `module:attribute` find modules that lie in this folder: the one of the configuration, or a run's own copy of it."""
    text = str(folder.resolve())
    if text not in sys.path:
        sys.path.insert(0, text)


def _load_module(name: str, what: str) -> Any:
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        if error.name is not None and (name == error.name or name.startswith(f"{error.name}.")):
            raise ConfigError(f"{what}: no module {error.name!r} beside the configuration file or on the Python path") from error
        raise ConfigError(f"{what}: importing {name!r} failed: {root_cause(error)}") from error
    except Exception as error:
        raise ConfigError(f"{what}: importing {name!r} failed: {root_cause(error)}") from error
