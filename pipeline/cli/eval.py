"""`rollout eval RUN|CHECKPOINT [CONFIG]`: an evaluation in this process, without Ray, by the code that the service uses."""

from __future__ import annotations

import time
from contextlib import AsyncExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from pipeline.cli.options import JsonOption, RunsDirOption

if TYPE_CHECKING:
    from pipeline.config.schema import RunConfig
    from pipeline.engines.base import Engine
    from pipeline.evaluation.plan import Plan
    from pipeline.evaluation.summary import Played
    from pipeline.fetcher.catalog import Catalog
    from pipeline.paths import RunPaths, SharedPaths
    from pipeline.service.models import Model

TargetArgument = Annotated[
    str,
    typer.Argument(
        metavar="RUN|CHECKPOINT",
        help="A run (its newest checkpoint), or a model folder in Hugging Face format.",
        show_default=False,
    ),
]
RestArgument = Annotated[
    list[str] | None,
    typer.Argument(
        metavar="[CONFIG] [KEY.PATH=VALUE]...",
        help="Configuration with the data sets (else the run's own), then overrides, for example eval.n=4.",
        show_default=False,
    ),
]


def register(app: typer.Typer) -> None:
    app.command("eval", help="Evaluate a run's newest checkpoint, or a model folder, on held-out tasks.")(evaluate)


def evaluate(
    target: TargetArgument, rest: RestArgument = None, runs_dir: RunsDirOption = None, as_json: JsonOption = False
) -> None:
    import asyncio

    from pipeline.cli.checks import check_names
    from pipeline.cli.output import echo_json, show
    from pipeline.cli.runs import run_root
    from pipeline.evaluation.plan import EvalRequest, make_plan
    from pipeline.paths import SharedPaths

    shared = SharedPaths(run_root(runs_dir))
    model, run = find_model(shared, target)
    config = _config(target, run, list(rest or []))
    catalog = check_names(config)
    plan = make_plan(EvalRequest(), config, catalog)
    found = asyncio.run(_play(config, model, plan, catalog, shared))
    if as_json:
        echo_json(found)
    else:
        from pipeline.cli.eval_view import render

        show(*render(found))


def find_model(shared: SharedPaths, target: str) -> tuple[Model, RunPaths | None]:
    """The model that is meant, and the run that it is of. Raises UserError."""
    from pipeline.cli.runs import find_run
    from pipeline.errors import UserError
    from pipeline.paths import RunPaths
    from pipeline.service.models import Model, version_of
    from pipeline.trainer.checkpoints import listed

    for folder in (Path(target).expanduser().resolve(), (shared.runs / target).resolve()):
        if (folder / "config.json").is_file():
            if not any(folder.glob("*.safetensors")):
                raise UserError(f"{folder} has no *.safetensors file: not a model folder in Hugging Face format")
            run = RunPaths(folder.parent.parent)
            return Model(target, folder, version_of(folder)), run if run.config.is_file() else None
    run = find_run(shared.runs, target)
    newest = next(iter(listed(run)), None)
    if newest is None:
        raise UserError(f"run {run.run_id} has no complete checkpoint yet (trainer.save_every)")
    return Model(target, newest, version_of(newest)), run


def _config(target: str, run: RunPaths | None, rest: list[str]) -> RunConfig:
    """The first argument that is no override is the configuration."""
    from pipeline.config.loading import read_config
    from pipeline.errors import UserError

    given = Path(rest.pop(0)) if rest and "=" not in rest[0] else None
    path = given or (run.config if run is not None else None)
    if path is None:
        raise UserError(f"{target} is of no run: say which configuration's data sets to evaluate on, rollout eval {target} CONFIG")
    return read_config(path, rest).config


async def _play(config: RunConfig, model: Model, plan: Plan, catalog: Catalog, shared: SharedPaths) -> dict[str, Any]:
    from tqdm import tqdm

    from pipeline.engines.opening import open_student
    from pipeline.engines.renderer import ChatRenderer
    from pipeline.evaluation import details
    from pipeline.evaluation.jobs import job_id
    from pipeline.evaluation.summary import summarise
    from pipeline.evaluator.playing import play_here

    name = job_id(time.time())
    async with AsyncExitStack() as stack:
        engine = open_student(config, model.folder, None, model.version)
        stack.push_async_callback(engine.close)
        teachers = _teachers(config, plan, catalog, shared.cache, stack)
        started = time.monotonic()
        with tqdm(total=plan.total, desc=f"eval {model.name}", unit="sample", leave=False, disable=None, delay=1) as bar:
            played = await play_here(
                config,
                engine,
                ChatRenderer.load(model.folder),
                plan.tasks,
                model.version,
                lambda _task, _sample: bar.update(),
                teachers=teachers,
            )
        seconds = time.monotonic() - started
    summary = summarise(name, played, k=plan.k, min_coverage=config.eval.min_coverage, version=model.version)
    summary |= {"model": str(model.folder), "seconds": round(seconds, 3), "samples_per_s": round(len(played) / seconds, 1)}
    summary["imitation"] = await _imitation(config, model, played, catalog, shared.cache)
    folder = shared.evaluations / name
    details.write(folder, name, played, summary)
    return summary | {"artefacts": str(folder)}


def _teachers(config: RunConfig, plan: Plan, catalog: Catalog, cache: Path, stack: AsyncExitStack) -> dict[str, Engine]:
    """By alias, of those that act in the evaluation and have a model."""
    from pipeline.engines.opening import open_teacher
    from pipeline.trainer.assets import teacher_folder

    aliases = sorted({task.teacher for task in plan.tasks if task.teacher is not None})
    found = {}
    for alias in aliases:
        if config.teachers[alias].has_engine():
            found[alias] = open_teacher(config, alias, teacher_folder(config, alias, catalog, cache))
            stack.push_async_callback(found[alias].close)
    return found


async def _imitation(
    config: RunConfig, model: Model, played: list[Played], catalog: Catalog, cache: Path
) -> dict[str, float | int] | None:
    """Cross-entropy, nats a token, on what teachers said: of the student before any training, and of the model. None: they said
    nothing."""
    from pipeline.engines.opening import open_student
    from pipeline.evaluation.imitation import imitation_loss, taught
    from pipeline.records import TEACHER
    from pipeline.trainer.assets import student_folder

    samples = taught(played)
    if not samples:
        return None
    found: dict[str, float | int] = {"tokens": sum(int((sample.executor == TEACHER).sum()) for sample in samples)}
    for moment, folder, version in (("before", student_folder(config, catalog, cache), 0), ("after", model.folder, model.version)):
        engine = open_student(config, folder, None, version)
        try:
            found[moment] = await imitation_loss(engine, samples)
        finally:
            await engine.close()
    return found
