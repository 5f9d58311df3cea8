"""`rollout make-teacher CONFIG`: make the teachers of a configuration before a run, or find them in the cache.

Accuracy is greedy, on held-out items that the teacher was not trained on, by the data sets' own verifiers.
"""

from __future__ import annotations

import difflib
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from pipeline.cli.options import ConfigArgument, JsonOption, OverridesArgument, RunsDirOption

if TYPE_CHECKING:
    from pipeline.config.schema import RunConfig
    from pipeline.fetcher.catalog import Catalog
    from pipeline.fetcher.verifiers import Verifier
    from pipeline.records import Task


def register(app: typer.Typer) -> None:
    app.command("make-teacher", help="Make the teachers of a configuration; they are cached beside the runs.")(make_teacher)


def make_teacher(
    config: ConfigArgument,
    overrides: OverridesArgument = None,
    alias: Annotated[str | None, typer.Option(help="Only this teacher.", show_default=False)] = None,
    runs_dir: RunsDirOption = None,
    as_json: JsonOption = False,
) -> None:
    import asyncio

    from pipeline.cli.checks import check_names
    from pipeline.cli.output import echo_json
    from pipeline.cli.runs import run_root
    from pipeline.config.loading import read_config

    settings = read_config(config, overrides).config
    aliases = _aliases(settings, alias)
    catalog = check_names(settings)
    made = {}
    for name in aliases:
        folder = _make(settings, name, catalog, run_root(runs_dir) / ".cache")
        solved, total = asyncio.run(_held_out(settings, name, folder, catalog))
        made[name] = {"path": str(folder), "accuracy": solved / total if total else None, "solved": solved, "total": total}
        if not as_json:
            figure = f"{solved}/{total} held-out items solved ({solved / total:.1%})" if total else "no held-out items"
            typer.echo(f"teacher {name}: {folder}: {figure}")
    if as_json:
        echo_json({"teachers": made})


def _aliases(config: RunConfig, alias: str | None) -> list[str]:
    from pipeline.errors import ConfigError

    known = [name for name, teacher in config.teachers.items() if teacher.is_made()]
    if not known:
        raise ConfigError("teachers: the configuration has none with a model")
    if alias is None:
        return known
    if alias not in known:
        close = difflib.get_close_matches(alias, known, 1)
        raise ConfigError(f"--alias {alias!r}: teachers are {known}" + (f"; did you mean {close[0]!r}?" if close else ""))
    return [alias]


def _make(config: RunConfig, alias: str, catalog: Catalog, cache: Path) -> Path:
    """The teacher's folder; a bar on stderr while it is trained."""
    from tqdm import tqdm

    from pipeline.trainer.assets import teacher_folder

    supervised = config.teachers[alias].supervised
    steps = supervised.steps if supervised is not None else 0
    with tqdm(total=steps, desc=f"teacher {alias}", unit="step", leave=False, disable=None, delay=1) as bar:

        def progress(step: int, _steps: int, loss: float) -> None:
            bar.set_postfix(loss=f"{loss:.3f}")
            bar.update(step - bar.n)

        return teacher_folder(config, alias, catalog, cache, progress)


async def _held_out(config: RunConfig, alias: str, folder: Path, catalog: Catalog) -> tuple[int, int]:
    """(solved, total) over the held-out items of the data sets that the teacher scores; of all, if it scores none."""
    from pipeline.engines.base import GenerateRequest, Version
    from pipeline.engines.renderer import ChatRenderer
    from pipeline.engines.torch_engine import TorchEngine
    from pipeline.fetcher.verifiers import load_verifier

    teacher = config.teachers[alias]
    tasks = catalog.eval_tasks()
    tasks = [task for task in tasks if task.teacher == alias] or tasks
    renderer = ChatRenderer.load(folder)
    engine = TorchEngine(folder, None, config.engine, dtype=teacher.dtype)
    try:
        requests = [
            GenerateRequest(
                str(task.ordinal), renderer.render(_messages(task, catalog, teacher.shots)), task.sampling, task.ordinal
            )
            for task in tasks
        ]
        completions = await engine.generate(requests, Version()) if requests else []
    finally:
        await engine.close()
    texts = [renderer.decode(completion.token_ids) for completion in completions]
    verifiers = {name: load_verifier(name) for name in {task.verifier for task in tasks}}
    return sum(_solved(verifiers[task.verifier], task, text) for task, text in zip(tasks, texts, strict=True)), len(tasks)


def _messages(task: Task, catalog: Catalog, shots: int) -> tuple[tuple[str, str], ...]:
    """The task as this teacher reads it: solved examples stand after the system message."""
    examples = catalog.shots(task.dataset, shots) if shots else ()
    return (*task.messages[:-1], *examples, task.messages[-1])


def _solved(verify: Verifier, task: Task, text: str) -> bool:
    """An answer that its verifier cannot judge is not solved; the total keeps it."""
    from pipeline.errors import VerifierError
    from pipeline.records import SOLVED_AT

    try:
        reward = verify(task, text)
    except VerifierError:
        return False
    return reward is not None and reward >= SOLVED_AT
