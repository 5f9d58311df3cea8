"""What pydantic found wrong, one line a fault: the key, the value, the bound, and the nearest valid key or choice."""

from __future__ import annotations

import difflib
import types
import typing
from typing import Any

from pydantic import BaseModel, ValidationError

_BOUNDS = {
    "greater_than": ("gt", ">"),
    "greater_than_equal": ("ge", ">="),
    "less_than": ("lt", "<"),
    "less_than_equal": ("le", "<="),
}


def describe(error: ValidationError, model: type[BaseModel]) -> list[str]:
    """One line a fault. Where a union was tried in several ways, only the branch that fits the given value is reported."""
    faults = error.errors(include_url=False)
    shapes = [fault for fault in faults if _wrong_branch(fault, model)]
    deeper = [fault["loc"] for fault in faults if fault not in shapes]
    kept = [f for f in faults if f not in shapes or not any(loc[: len(f["loc"]) - 1] == f["loc"][:-1] for loc in deeper)]
    return list(dict.fromkeys(line_of(fault, model) for fault in kept))


def _wrong_branch(fault: dict[str, Any], model: type[BaseModel]) -> bool:
    """True when a branch of a union was not even of the given value's shape: another branch has the true fault."""
    if not fault["type"].endswith("_type") or not fault["loc"]:
        return False
    names, _ = _follow(model, fault["loc"][:-1])
    return len(_follow(model, fault["loc"])[0]) == len(names)


def line_of(fault: dict[str, Any], model: type[BaseModel]) -> str:
    names, annotation = _follow(model, fault["loc"])
    key, kind, given = ".".join(names), fault["type"], fault["input"]
    if kind == "extra_forbidden":
        return f"unknown key {key}{_nearest_key(names, model)}"
    if kind == "missing":
        return f"{key}: this key is required and missing"
    if kind == "value_error":
        text = str(fault["ctx"]["error"])
        return text if not key or text.startswith(key.split(".")[0] + ".") else f"{key}: {text}"
    if kind in _BOUNDS:
        bound, sign = _BOUNDS[kind]
        return f"{key}: {_short(given)} is out of bounds, must be {sign} {fault['ctx'][bound]}"
    if kind == "literal_error":
        return f"{key}: {_short(given)} is not one of {fault['ctx']['expected']}{_nearest_choice(given, annotation)}"
    if kind == "none_required":
        return f"{key}: {_short(given)} is not supported; leave it out"
    text = fault["msg"].replace("tuple", "list").replace("Tuple", "List").replace(" after validation", "")
    return f"{key}: {_short(given)}: {text[0].lower()}{text[1:]}"


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 80 else f"{text[:77]}..."


def _follow(model: type[BaseModel], location: tuple[Any, ...]) -> tuple[list[str], Any]:
    """Walk a fault's location down the models: names without pydantic's union tags, and the annotation at the end."""
    names: list[str] = []
    current: Any = model
    for part in location:
        step = _below(current, part)
        if step is _NO_STEP:
            if _is_union_tag(part, current):
                continue
            names.append(str(part))
            current = Any
            continue
        names.append(str(part))
        current = step
    return names, current


_NO_STEP = object()


def _below(annotation: Any, part: Any) -> Any:
    for option in _options(annotation):
        if isinstance(option, type) and issubclass(option, BaseModel) and part in option.model_fields:
            return option.model_fields[part].annotation
        origin, arguments = typing.get_origin(option), typing.get_args(option)
        if origin is dict:
            return arguments[1]
        if origin in (tuple, list) and isinstance(part, int):
            return arguments[0]
    return _NO_STEP


def _options(annotation: Any) -> list[Any]:
    if typing.get_origin(annotation) is typing.Annotated:
        return _options(typing.get_args(annotation)[0])
    if typing.get_origin(annotation) in (typing.Union, types.UnionType):
        return [option for part in typing.get_args(annotation) for option in _options(part)]
    return [annotation]


def _is_union_tag(part: Any, annotation: Any) -> bool:
    options = _options(annotation)
    return len(options) > 1 and isinstance(part, str) and (part[:1].isupper() or "[" in part)


def _nearest_key(names: list[str], model: type[BaseModel]) -> str:
    """The nearest key in the same place; failing that, the same or a close name anywhere else; failing that, the choices."""
    parent, name = names[:-1], names[-1]
    here = _keys_at(model, parent)
    prefix = "".join(f"{part}." for part in parent)
    close = difflib.get_close_matches(name, here, 1)
    if close and difflib.SequenceMatcher(None, name, close[0]).ratio() >= 0.7:
        return f"; did you mean {prefix}{close[0]}?"
    everywhere = _all_keys(model, "")
    same = [key for key in everywhere if key.rsplit(".", 1)[-1] == name]
    if same:
        best = min(same, key=lambda key: (not (prefix and key.startswith(prefix)), key.count(".")))
        return f"; did you mean {best}?"
    if close:
        return f"; did you mean {prefix}{close[0]}?"
    return f"; valid keys {'of ' + '.'.join(parent) if parent else 'at the top'}: {', '.join(here)}"


def _keys_at(model: type[BaseModel], names: list[str]) -> list[str]:
    current: Any = model
    for name in names:
        step = _below(current, int(name) if name.isdigit() else name)
        if step is _NO_STEP:
            return []
        current = step
    return [key for option in _options(current) if _is_model(option) for key in option.model_fields]


def _all_keys(model: type[BaseModel], prefix: str) -> list[str]:
    """Every full key, nearer to the top first; a mapping's own names appear as `<name>`, a list's as `0`."""
    keys = [prefix + name for name in model.model_fields]
    for name, field in model.model_fields.items():
        for option in _options(field.annotation):
            inner, between = option, ""
            if typing.get_origin(option) is dict:
                inner, between = typing.get_args(option)[1], "<name>."
            elif typing.get_origin(option) is tuple:
                inner, between = typing.get_args(option)[0], "0."
            for nested in _options(inner):
                if _is_model(nested):
                    keys += _all_keys(nested, f"{prefix}{name}.{between}")
    return keys


def _is_model(option: Any) -> bool:
    return isinstance(option, type) and issubclass(option, BaseModel)


def _nearest_choice(given: Any, annotation: Any) -> str:
    choices = [str(choice) for option in _options(annotation) for choice in typing.get_args(option)]
    close = difflib.get_close_matches(str(given), choices, 1)
    return f"; did you mean {close[0]!r}?" if close else ""
