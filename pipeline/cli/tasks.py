"""`rollout tasks check CONFIG`: proves the tasks before a model sees them: every reference answer must be worth 1.0.

A repair task must fail before, and pass with its patch."""

from __future__ import annotations

import asyncio
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Annotated

import typer

from pipeline.cli.options import ConfigArgument, JsonOption, OverridesArgument

if TYPE_CHECKING:
    from pipeline.config.stages import SandboxPart
    from pipeline.fetcher.catalog import Catalog
    from pipeline.fetcher.verifiers import Verifier
    from pipeline.records import Task


TEST_S = 60.0
"""For one run of a task's tests."""


def register(app: typer.Typer) -> None:
    group = typer.Typer()
    group.command("check", help="Load every data set, and score reference answers by the verifier.")(check)
    group.callback()(tasks)
    app.add_typer(group, name="tasks")


def tasks() -> None:
    """Look at the tasks of a configuration."""


@dataclass(slots=True)
class Checked:
    """What was found out about one data set."""

    train: int
    held_out: int
    checked: int = 0
    solved: int = 0
    unanswered: int = 0
    """Items without a reference answer: only their verifier can judge them."""
    failures: list[dict[str, str]] = field(default_factory=list)


def check(
    config: ConfigArgument,
    overrides: OverridesArgument = None,
    items: Annotated[int, typer.Option(min=1, help="Items of each split to score.")] = 50,
    times: Annotated[int, typer.Option(min=1, help="How often each repair task must hold.")] = 1,
    as_json: JsonOption = False,
) -> None:
    from pipeline.cli.checks import check_names
    from pipeline.cli.output import echo_json, show
    from pipeline.config.loading import read_config

    settings = read_config(config, overrides).config
    catalog = check_names(settings)
    parts = {spec.task_type: spec.sandbox for spec in settings.specs}
    types = {name: shelf.settings.task_type for name, shelf in catalog.shelves.items()}
    found = {name: check_dataset(catalog, name, items, times, parts[types[name]]) for name in types}
    good = not any(checked.failures for checked in found.values())
    if as_json:
        echo_json({"ok": good, "datasets": {name: asdict(checked) for name, checked in found.items()}})
    else:
        show(_table(found), *(_failure_line(name, failure) for name, checked in found.items() for failure in checked.failures[:5]))
    if not good:
        raise typer.Exit(1)


def check_dataset(catalog: Catalog, name: str, items: int, times: int, sandbox: SandboxPart) -> Checked:
    """Score the reference answers of up to `items` items of each split."""
    from pipeline.fetcher.verifiers import load_verifier

    shelf = catalog.shelves[name]
    checked = Checked(len(shelf.train), len(shelf.held_out))
    verifiers: dict[str, Verifier] = {}
    tasks = [*catalog.examples(name, "train", items), *catalog.examples(name, "held_out", items)]
    if shelf.settings.source == "swe":
        asyncio.run(_prove([task for task in tasks for _ in range(times)], checked, sandbox))
        return checked
    for task in tasks:
        if task.verifier not in verifiers:
            verifiers[task.verifier] = load_verifier(task.verifier)
        _score(task, verifiers[task.verifier], checked)
    return checked


async def _prove(tasks: list[Task], checked: Checked, part: SandboxPart) -> None:
    """As many at a time as there are processors, each in sandboxes of its own."""
    import os

    from pipeline.agents.repair import prove
    from pipeline.fetcher.swe import repair_of
    from pipeline.sandboxes.base import Contents, Limits, Sandbox
    from pipeline.sandboxes.kinds import sandboxes_by_type

    sandboxes = sandboxes_by_type({"": part})[""]
    permits = asyncio.Semaphore(os.cpu_count() or 1)

    async def one(number: int, task: Task) -> None:
        async def open_sandbox(part: str, contents: Contents) -> Sandbox:
            return await sandboxes.open(f"check-{os.getpid()}-{number}-{part}", contents, Limits())

        async with permits:
            proof = await prove(open_sandbox, repair_of(task), TEST_S)
        checked.checked += 1
        checked.solved += not proof.faults
        checked.failures += [{"task_id": task.task_id, "why": fault} for fault in proof.faults]

    try:
        async with asyncio.TaskGroup() as group:
            for number, task in enumerate(tasks):
                group.create_task(one(number, task), name=f"check {task.task_id}")
    except ExceptionGroup as failures:
        raise failures.exceptions[0] from None
    finally:
        await sandboxes.close()


def _score(task: Task, verify: Verifier, checked: Checked) -> None:
    from pipeline.errors import VerifierError
    from pipeline.records import SOLVED_AT

    if task.answer is None:
        checked.unanswered += 1
        return
    checked.checked += 1
    try:
        reward = verify(task, task.answer)
    except VerifierError as error:
        checked.failures.append({"task_id": task.task_id, "why": str(error)})
        return
    if reward is not None and reward >= SOLVED_AT:
        checked.solved += 1
    else:
        checked.failures.append({"task_id": task.task_id, "why": f"the reference answer {task.answer!r} is worth {reward}"})


def _table(found: dict[str, Checked]):  # rich is imported only when a table is shown
    from rich.table import Table

    table = Table("data set", "train", "held out", "answers checked", "worth 1.0", "without answer", box=None, header_style="bold")
    for name, checked in found.items():
        style = "red" if checked.failures else ""
        counts = (checked.train, checked.held_out, checked.checked, checked.solved, checked.unanswered)
        table.add_row(name, *map(str, counts), style=style)
    return table


def _failure_line(name: str, failure: dict[str, str]):
    from rich.text import Text

    return Text(f"{name}: {failure['task_id']}: {failure['why']}", style="red")
