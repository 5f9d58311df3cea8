"""`rollout plan CONFIG`: what a run would be. Checks everything that can be checked without starting anything; no Ray, no torch."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from pipeline.cli.options import ConfigArgument, JsonOption, OverridesArgument

if TYPE_CHECKING:
    from pipeline.config.loading import Loaded
    from pipeline.config.provenance import Resolved
    from pipeline.config.schema import RunConfig
    from pipeline.fetcher.catalog import Catalog


def register(app: typer.Typer) -> None:
    app.command("plan", help="Check a configuration and show what a run would be; starts nothing.")(plan)


def plan(config: ConfigArgument, overrides: OverridesArgument = None, as_json: JsonOption = False) -> None:
    from pipeline.cli.output import echo_json, show
    from pipeline.config.loading import read_config

    made = make_plan(read_config(config, overrides))
    if as_json:
        echo_json(made)
    else:
        from pipeline.cli.plan_view import render

        show(*render(made))


def make_plan(loaded: Loaded) -> dict[str, Any]:
    """Every resolved value with its origin, data sets, schedules, and the proof that the demand can be met. Raises UserError."""
    from pipeline.cli.checks import check_names
    from pipeline.config.loading import flatten
    from pipeline.evaluator.machine import count_gpus, pretended_gpus

    config = loaded.config
    catalog = check_names(config)
    values = flatten(config)
    return {
        "path": str(loaded.path),
        "values": {key: {"value": _plain(value), "origin": loaded.origins[key]} for key, value in values.items()},
        "datasets": {name: _dataset(config, catalog, name) for name in config.datasets},
        "stream": _stream(config, catalog),
        "schedules": [_step(config, step) for step in range(1, config.trainer.steps + 1)],
        "resources": _resources(config),
        "pretended_gpus": pretended_gpus(config, count_gpus()),
    }


def _plain(value: Any) -> Any:
    return str(value) if isinstance(value, Path) else value


def _dataset(config: RunConfig, catalog: Catalog, name: str) -> dict[str, Any]:
    from pipeline.config.provenance import resolve_eval_sampling, resolve_sampling, resolve_stopping, spec_for

    shelf, settings = catalog.shelves[name], config.datasets[name]
    total = sum(other.weight for other in config.datasets.values() if other.train)
    spec = spec_for(config, settings.task_type)
    return {
        "train": len(shelf.train),
        "held_out": len(shelf.held_out),
        "share": settings.weight / total if settings.train else 0.0,
        "spec": spec.evaluator_id or spec.task_type,
        "agent": spec.agent,
        "verifiers": sorted({item.verifier for item in (*shelf.train, *shelf.held_out)}),
        "teacher": config.teacher_of(name),
        "sampling": _cascade(resolve_sampling(config, name)),
        "eval_sampling": _cascade(resolve_eval_sampling(config, name)),
        "stopping": _cascade(resolve_stopping(config, name)),
    }


def _cascade(resolved: Resolved) -> dict[str, dict[str, Any]]:
    return {name: {"value": getattr(resolved.value, name), "origin": origin} for name, origin in resolved.origins.items()}


def _stream(config: RunConfig, catalog: Catalog) -> dict[str, Any]:
    wanted = config.trainer.steps * config.rollout.tasks_per_step
    limit = catalog.limit
    return {
        "groups": wanted if limit is None else min(wanted, limit),
        "samples_per_group": config.rollout.samples_per_task,
        "limit": limit,
        "ends_at_step": None if limit is None or limit >= wanted else -(-limit // config.rollout.tasks_per_step),
        "capacity": config.capacity,
    }


def _resources(config: RunConfig) -> dict[str, Any] | None:
    """The start-up proof on this machine; None for a cluster elsewhere, which is asked when the run starts."""
    from pipeline.evaluator.admission import prove
    from pipeline.evaluator.machine import this_machine

    if config.run.ray.address is not None:
        return None
    return prove(config, this_machine(config.run.ray)).as_dict()


def _step(config: RunConfig, step: int) -> dict[str, float]:
    from pipeline.trainer.schedules import learning_rate, t_max, value

    return {
        "step": step,
        "beta": value(config.algorithm.beta, step),
        "t_max": t_max(config.algorithm.t_max, step),
        "lr": learning_rate(config.trainer, step),
    }
