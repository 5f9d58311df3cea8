"""Where items come from. Invariant: an item is whole, has an id of its own, and a fault names its data set, file and line."""

from __future__ import annotations

import difflib
import inspect
import json
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pipeline.config.stages import Dataset
from pipeline.errors import ConfigError, root_cause
from pipeline.fetcher.gym import make_generator
from pipeline.fetcher.swe import read_repair
from pipeline.fetcher.verifiers import NEED_ANSWER
from pipeline.importing import is_reference, load_callable

COLUMNS = ("prompt", "answer", "id", "verifier")
"""What a row is read for; `Dataset.columns` gives other names to them. `answer` may be missing where the verifier needs none."""

_USES = {
    "reasoning_gym": {"generator", "params", "size"},
    "jsonl": {"path", "columns"},
    "parquet": {"path", "columns"},
    "swe": {"path"},
}
_OWN_USES = {"params", "columns"}


@dataclass(frozen=True, slots=True)
class Item:
    """One problem of a data set, before it has a place in the stream."""

    item_id: str
    question: str
    answer: str | None
    verifier: str
    metadata: dict[str, Any]
    """JSON-able. A row's other columns are under `row`; `generator`, `params`, `seed`, `size`, `index` make a reasoning_gym
    item again."""


def load_items(name: str, dataset: Dataset) -> list[Item]:
    """All items of a data set, in the source's own order. Raises ConfigError."""
    source = dataset.source
    if source not in _USES and not is_reference(source):
        near = difflib.get_close_matches(source, _USES, 1)
        hint = f"; did you mean {near[0]!r}?" if near else ""
        raise ConfigError(f"datasets.{name}.source {source!r} is unknown: one of {sorted(_USES)}, or module:attribute{hint}")
    _refuse_unused(name, dataset)
    if source == "reasoning_gym":
        items = _gym_items(name, dataset)
    else:
        items = _row_items(_swe_item if source == "swe" else _row_item, dataset, _rows(name, dataset))
    if not items:
        raise ConfigError(f"datasets.{name}: {dataset.path or source} holds no items")
    return items


def _refuse_unused(name: str, dataset: Dataset) -> None:
    """A key that this source does not read is a mistake, and not a thing to pass over."""
    used = _USES.get(dataset.source, _OWN_USES)
    for key in ("generator", "params", "size", "path", "columns"):
        field = Dataset.model_fields[key]
        if key not in used and getattr(dataset, key) != field.default:
            raise ConfigError(f"datasets.{name}.{key} is not used by source {dataset.source!r}, which reads {sorted(used)}")
    wrong = [column for column in dataset.columns if column not in COLUMNS]
    if wrong:
        raise ConfigError(f"datasets.{name}.columns.{wrong[0]} is unknown: columns maps {list(COLUMNS)} to the file's own names")


def _gym_items(name: str, dataset: Dataset) -> list[Item]:
    """Items drawn with the data set's seed; a question that was drawn before is left out."""
    if dataset.generator is None:
        raise ConfigError(f"datasets.{name}.generator is missing: source reasoning_gym needs the name of a generator")
    try:
        generator = make_generator(dataset.generator, dataset.params, seed=dataset.seed, size=dataset.size)
    except ConfigError as error:
        raise ConfigError(f"datasets.{name}: {error}") from error
    origin = {
        "generator": dataset.generator,
        "params": dataset.params,
        "seed": dataset.seed,
        "size": dataset.size,
        "reward": dataset.reward,
    }
    items: dict[str, Item] = {}
    for index in range(dataset.size):
        entry = generator[index]
        question, answer = entry["question"], entry["answer"]
        if question not in items:
            text = None if answer is None else str(answer)
            verifier = dataset.verifier or "reasoning_gym"
            items[question] = Item(str(index), question, text, verifier, {**origin, "index": index})
    return list(items.values())


@dataclass(frozen=True, slots=True)
class _Row:
    place: str
    """Where it stands, for messages: `datasets.d: tasks.jsonl:3`."""
    number: int
    """From 1; the id of a row that has none."""
    values: dict[str, Any]


def _rows(name: str, dataset: Dataset) -> Iterator[_Row]:
    if is_reference(dataset.source):
        return _own_rows(name, dataset)
    if dataset.path is None:
        raise ConfigError(f"datasets.{name}.path is missing: source {dataset.source} reads a file")
    if not dataset.path.is_file():
        raise ConfigError(f"datasets.{name}.path {dataset.path}: no such file")
    read = _parquet_rows if "parquet" in (dataset.source, dataset.path.suffix[1:]) else _jsonl_rows
    return read(name, dataset.path)


def _jsonl_rows(name: str, path: Path) -> Iterator[_Row]:
    try:
        lines = path.read_text(encoding="utf-8").split("\n")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"datasets.{name}.path {path}: cannot be read: {error}") from error
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        place = f"datasets.{name}: {path}:{number}"
        try:
            values = json.loads(line)
        except json.JSONDecodeError as error:
            raise ConfigError(f"{place}: not valid JSON: {error.msg} at column {error.colno}") from None
        yield _Row(place, number, _mapping(values, place))


def _parquet_rows(name: str, path: Path) -> Iterator[_Row]:
    import pyarrow
    import pyarrow.parquet

    try:
        rows = pyarrow.parquet.read_table(path).to_pylist()
    except (pyarrow.ArrowException, OSError) as error:
        raise ConfigError(f"datasets.{name}.path {path}: not readable as parquet: {root_cause(error)}") from error
    for number, values in enumerate(rows, 1):
        yield _Row(f"datasets.{name}: {path} row {number}", number, values)


def _own_rows(name: str, dataset: Dataset) -> Iterator[_Row]:
    make = load_callable(dataset.source, f"datasets.{name}.source")
    try:
        inspect.signature(make).bind(**dataset.params)
    except TypeError as error:
        raise ConfigError(f"datasets.{name}.params do not fit {dataset.source}: {error}") from error
    try:
        rows = make(**dataset.params)
        for number, values in enumerate(rows, 1):
            place = f"datasets.{name}: {dataset.source} item {number}"
            yield _Row(place, number, _mapping(values, place))
    except ConfigError:
        raise
    except Exception as error:
        raise ConfigError(f"datasets.{name}: {dataset.source} failed: {root_cause(error)}") from error


def _mapping(values: Any, place: str) -> dict[str, Any]:
    if not isinstance(values, dict):
        raise ConfigError(f"{place}: holds a {type(values).__name__}, not an object with columns")
    return values


def _row_items(make: Callable[[Dataset, _Row], Item], dataset: Dataset, rows: Iterable[_Row]) -> list[Item]:
    items: list[Item] = []
    places: dict[str, str] = {}
    for row in rows:
        item = make(dataset, row)
        if item.item_id in places:
            raise ConfigError(f"{row.place}: id {item.item_id!r} is a duplicate; it stands first at {places[item.item_id]}")
        places[item.item_id] = row.place
        items.append(item)
    return items


def _swe_item(dataset: Dataset, row: _Row) -> Item:
    """The reference patch is the answer; the agent itself verifies."""
    repair = read_repair(row.values, row.place)
    return Item(repair.instance_id, repair.problem_statement, repair.patch, "swe", {"swe": repair.metadata()})


def _row_item(dataset: Dataset, row: _Row) -> Item:
    names = {column: dataset.columns.get(column, column) for column in COLUMNS}
    prompt = _column(row, names["prompt"], (str,))
    if not prompt:
        raise ConfigError(f"{row.place}: column {names['prompt']!r} is empty")
    verifier = _column(row, names["verifier"], (str,), wanted="verifier" in dataset.columns)
    verifier = verifier or dataset.verifier or "exact"
    needed = verifier in NEED_ANSWER or "answer" in dataset.columns
    answer = _column(row, names["answer"], (str, int, float), wanted=needed)
    item_id = _column(row, names["id"], (str, int), wanted="id" in dataset.columns)
    rest = {key: value for key, value in row.values.items() if key not in names.values()}
    metadata = {"reward": dataset.reward, "row": json.loads(json.dumps(rest, default=str))}
    return Item(item_id or str(row.number), prompt, answer, verifier, metadata)


def _column(row: _Row, name: str, kinds: tuple[type, ...], *, wanted: bool = True) -> str | None:
    value = row.values.get(name)
    if value is None:
        if wanted:
            raise ConfigError(f"{row.place}: column {name!r} is missing; the row has {sorted(map(str, row.values))}")
        return None
    if not isinstance(value, kinds):
        raise ConfigError(f"{row.place}: column {name!r} holds a {type(value).__name__}, not {kinds[0].__name__}")
    return str(value)
