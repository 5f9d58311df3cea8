"""From a YAML file and `key.path=value` overrides to a checked configuration that knows where each value came from.

Invariant: nothing is ignored. An unknown or repeated key is refused, with the nearest valid one; every fault is one line.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import yaml
from pydantic import BaseModel, ValidationError

from pipeline.config.faults import describe
from pipeline.config.schema import RunConfig
from pipeline.errors import ConfigError
from pipeline.importing import add_code_folder

Origin = Literal["default", "file", "override"]


@dataclass(frozen=True, slots=True)
class Loaded:
    config: RunConfig
    origins: dict[str, Origin]
    """Every leaf key of the resolved configuration -> where its value was said."""
    path: Path


def load(path: str | Path, overrides: Sequence[str] = ()) -> Loaded:
    """Read, override, resolve paths against the file's folder, check. Raises ConfigError, one line a fault."""
    path = Path(path)
    said = _read(path)
    data = copy.deepcopy(said)
    overridden = [_apply(data, override) for override in overrides]
    folder = path.resolve().parent
    _resolve_paths(data, folder)
    if isinstance(data.get("layout"), str):
        data["layout"] = _read(folder / Path(data["layout"]).expanduser())
    try:
        config = RunConfig.model_validate(data)
    except ValidationError as error:
        raise ConfigError("\n".join(f"{path}: {line}" for line in describe(error, RunConfig))) from None
    return Loaded(config, _origins(config, said, overridden), path)


def read_config(path: str | Path, overrides: Sequence[str] | None = None) -> Loaded:
    """Load a configuration and let its own modules be imported, from beside it or from a run's `code` folder.

    Every process that makes something named by `module:attribute` begins with this.
    """
    loaded = load(path, overrides or ())
    beside = loaded.path.resolve().parent
    add_code_folder(beside)
    if (beside / "code").is_dir():
        add_code_folder(beside / "code")
    return loaded


def dump(config: RunConfig) -> str:
    """YAML of the whole resolved configuration; it loads back to an equal one."""
    return yaml.safe_dump(config.model_dump(mode="json"), sort_keys=False, allow_unicode=True, width=120)


def flatten(config: BaseModel) -> dict[str, Any]:
    """Leaf key -> value, in the order of the models. Lists of models are numbered: `specs.0.agent`."""
    leaves: dict[str, Any] = {}
    _flatten(config, "", leaves)
    return leaves


def _flatten(value: Any, key: str, leaves: dict[str, Any]) -> None:
    children = _children(value)
    if children is None:
        leaves[key] = value
        return
    for name, child in children:
        _flatten(child, f"{key}.{name}" if key else str(name), leaves)


def _children(value: Any) -> list[tuple[Any, Any]] | None:
    """Named parts of a value; None for a leaf. An empty mapping is a leaf, so that it is not lost."""
    if isinstance(value, BaseModel):
        return [(name, getattr(value, name)) for name in type(value).model_fields]
    if isinstance(value, dict) and value:
        return list(value.items())
    if isinstance(value, tuple | list) and any(isinstance(item, BaseModel) for item in value):
        return list(enumerate(value))
    return None


class _UniqueKeys(yaml.SafeLoader):
    """Refuses a key that stands twice in one mapping, where YAML itself would drop the first one silently."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        seen: set[Any] = set()
        for key_node, _ in node.value:
            if key_node.tag == "tag:yaml.org,2002:merge":
                continue
            key = self.construct_object(key_node, deep=True)
            if isinstance(key, str | int | float) and key in seen:
                raise yaml.constructor.ConstructorError(None, None, f"key {key!r} is given twice", key_node.start_mark)
            seen.add(key if isinstance(key, str | int | float) else id(key_node))
        return super().construct_mapping(node, deep)


def _read(path: Path) -> dict[str, Any]:
    try:
        text = path.read_text(encoding="utf-8")
    except FileNotFoundError:
        raise ConfigError(f"{path}: no such configuration file") from None
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path}: cannot be read: {error}") from None
    try:
        data = yaml.load(text, _UniqueKeys)
    except yaml.YAMLError as error:
        raise ConfigError(f"{path}{_place(error)}: not valid YAML: {_problem(error)}") from None
    if not isinstance(data, dict):
        raise ConfigError(f"{path}: holds a {_kind(data)}, not a mapping of configuration keys")
    return data


def _place(error: yaml.YAMLError) -> str:
    mark = getattr(error, "problem_mark", None)
    return f":{mark.line + 1}:{mark.column + 1}" if mark is not None else ""


def _problem(error: yaml.YAMLError) -> str:
    return getattr(error, "problem", None) or str(error).splitlines()[0]


def _kind(data: Any) -> str:
    return {type(None): "nothing", list: "list", str: "text"}.get(type(data), type(data).__name__)


def _apply(data: dict[str, Any], override: str) -> str:
    """Set one `key.path=value` in place and return its key. A number addresses an entry of a list."""
    key, equals, text = override.partition("=")
    key = key.strip()
    if not equals or not key:
        raise ConfigError(f"override {override!r} is not of the form key.path=value")
    try:
        value = yaml.safe_load(text)
    except yaml.YAMLError as error:
        raise ConfigError(f"override {override!r}: the value is not valid YAML: {_problem(error)}") from None
    place: Any = data
    *parents, last = key.split(".")
    for number, name in enumerate(parents):
        place = _enter(place, name, override, ".".join(parents[:number]))
    if isinstance(place, list):
        place[_index(place, last, override, ".".join(parents))] = value
    elif isinstance(place, dict):
        place[last] = value
    else:
        raise ConfigError(f"override {override!r}: {'.'.join(parents)} is {place!r}, which has no keys")
    return key


def _enter(place: Any, name: str, override: str, parent: str) -> Any:
    if isinstance(place, list):
        return place[_index(place, name, override, parent)]
    if not isinstance(place, dict):
        raise ConfigError(f"override {override!r}: {parent} is {place!r}, which has no keys")
    if place.get(name) is None:
        place[name] = {}
    return place[name]


def _index(place: list[Any], name: str, override: str, parent: str) -> int:
    if not name.isdigit() or int(name) >= len(place):
        raise ConfigError(f"override {override!r}: {parent} is a list of {len(place)}; {name!r} is not an index below that")
    return int(name)


def _resolve_paths(data: dict[str, Any], folder: Path) -> None:
    """Make relative paths of data, models, interpreters and reused trajectories absolute, in place; faults of shape are left to
    the models."""
    holders = [data.get("student"), data.get("engine")]
    for section in ("teachers", "datasets"):
        entries = data.get(section)
        holders += list(entries.values()) if isinstance(entries, dict) else []
    for holder in holders:
        if isinstance(holder, dict) and isinstance(holder.get("path"), str):
            holder["path"] = str(folder / Path(holder["path"]).expanduser())
        launch = holder.get("launch") if isinstance(holder, dict) else None
        if isinstance(launch, dict) and isinstance(launch.get("python"), str):
            launch["python"] = str(folder / Path(launch["python"]).expanduser())
    rollout = data.get("rollout")
    if isinstance(rollout, dict) and isinstance(rollout.get("reuse"), str):
        rollout["reuse"] = _resolve_reuse(rollout["reuse"], folder)


def _resolve_reuse(reuse: str, folder: Path) -> str:
    if reuse == "none" or reuse.startswith("run:"):
        return reuse
    prefix = "file:" if reuse.startswith("file:") else ""
    return prefix + str(folder / Path(reuse.removeprefix("file:")).expanduser())


def _origins(config: RunConfig, said: dict[str, Any], overridden: list[str]) -> dict[str, Origin]:
    return {key: _origin(key, said, overridden) for key in flatten(config)}


def _origin(key: str, said: dict[str, Any], overridden: list[str]) -> Origin:
    if any(key == given or key.startswith(f"{given}.") for given in overridden):
        return "override"
    place: Any = said
    for name in key.split("."):
        if isinstance(place, dict):
            place = place.get(name, place.get(int(name), _MISSING) if name.isdigit() else _MISSING)
        elif isinstance(place, list) and name.isdigit() and int(name) < len(place):
            place = place[int(name)]
        else:
            # A shorthand was given here (`layout.nodes.a: [0, 1]`, `layout: file`): whatever lies below was said by it.
            return "default" if place is None else "file"
        if place is _MISSING:
            return "default"
    return "file"


_MISSING = object()
