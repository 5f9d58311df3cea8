"""A repair task in SWE-bench's columns: what it begins with, what must hold afterwards, and the patch that shows it can.

Invariant: what an agent may read is the statement and the files; the patch and the tests of `test_patch` are for the verifier.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from pipeline.errors import ConfigError, DataError
from pipeline.records import Task
from pipeline.sandboxes.base import Contents, ImageFolder

COLUMNS = ("instance_id", "problem_statement", "patch", "test_patch", "FAIL_TO_PASS", "PASS_TO_PASS")
PYTEST = "python3 -m pytest -q -p no:cacheprovider"
"""How tests are run unless a row has a `test_command`; their ids follow it."""
IMAGE_FOLDER = "/testbed"
"""Where the repository is in the images of the published data sets."""


@dataclass(frozen=True, slots=True)
class Repair:
    instance_id: str
    problem_statement: str
    patch: str
    test_patch: str
    fail_to_pass: tuple[str, ...]
    pass_to_pass: tuple[str, ...]
    test_command: str
    folder: str | None
    files: dict[str, str] | None
    """Exactly one of folder, files and image: what a sandbox begins with."""
    image: str | None = None
    image_folder: str = IMAGE_FOLDER
    repo: str = ""
    base_commit: str = ""

    @property
    def contents(self) -> Contents:
        if self.image is not None:
            return ImageFolder(self.image, self.image_folder)
        return Path(self.folder) if self.folder is not None else self.files or {}

    def metadata(self) -> dict[str, Any]:
        """JSON-able, without the statement and the patch, which the task has as its message and its answer."""
        values = asdict(self) | {"fail_to_pass": list(self.fail_to_pass), "pass_to_pass": list(self.pass_to_pass)}
        return {key: value for key, value in values.items() if key not in ("problem_statement", "patch")}


def read_repair(values: Mapping[str, Any], place: str) -> Repair:
    """From one row. Raises ConfigError, beginning with `place`, for what is missing or of the wrong kind."""
    missing = [column for column in COLUMNS if values.get(column) is None]
    if missing:
        raise ConfigError(f"{place}: column {missing[0]!r} is missing; the row has {sorted(map(str, values))}")
    folder, files, image = values.get("folder"), values.get("files"), values.get("image")
    if folder is None and files is None and not image:
        raise ConfigError(f"{place}: none of 'folder', 'files' and 'image' says what the sandbox begins with")
    if folder is not None and not (Path(folder).is_absolute() and Path(folder).is_dir()):
        raise ConfigError(f"{place}: folder {folder!r} is not the absolute path of a folder that is there")
    if files is not None and not (isinstance(files, dict) and all(isinstance(text, str) for text in files.values())):
        raise ConfigError(f"{place}: 'files' is not a mapping of relative paths to texts")
    repair = Repair(
        instance_id=str(values["instance_id"]),
        problem_statement=_text(values, "problem_statement", place),
        patch=_text(values, "patch", place),
        test_patch=_text(values, "test_patch", place),
        fail_to_pass=_ids(values, "FAIL_TO_PASS", place),
        pass_to_pass=_ids(values, "PASS_TO_PASS", place),
        test_command=str(values.get("test_command") or PYTEST),
        folder=folder,
        files=files if folder is None else None,
        image=str(image) if folder is None and files is None else None,
        image_folder=str(values.get("image_folder") or IMAGE_FOLDER),
        repo=str(values.get("repo") or ""),
        base_commit=str(values.get("base_commit") or ""),
    )
    if not repair.fail_to_pass:
        raise ConfigError(f"{place}: FAIL_TO_PASS is empty: nothing would show that the task is solved")
    return repair


def repair_of(task: Task) -> Repair:
    """Raises DataError for a task of another kind."""
    if not is_repair(task):
        raise DataError(f"{task.task_id} is no repair task: its data set must have source swe")
    held = dict(task.metadata["swe"])
    for key in ("fail_to_pass", "pass_to_pass"):
        held[key] = tuple(held[key])
    return Repair(problem_statement=task.messages[-1][1], patch=task.answer or "", **held)


def is_repair(task: Task) -> bool:
    return "swe" in task.metadata


def _text(values: Mapping[str, Any], column: str, place: str) -> str:
    if not isinstance(values[column], str):
        raise ConfigError(f"{place}: column {column!r} holds a {type(values[column]).__name__}, not a text")
    return values[column]


def _ids(values: Mapping[str, Any], column: str, place: str) -> tuple[str, ...]:
    """A list, or the text of one in JSON, as the published data sets have it."""
    found = values[column]
    try:
        found = json.loads(found) if isinstance(found, str) else found
    except json.JSONDecodeError as error:
        raise ConfigError(f"{place}: column {column!r} is not a JSON list: {error.msg}") from None
    if not isinstance(found, list | tuple) or not all(isinstance(entry, str) for entry in found):
        raise ConfigError(f"{place}: column {column!r} is not a list of test ids")
    return tuple(found)
