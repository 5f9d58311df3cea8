"""`rollout bench NAME`: figures of the run's own parts, measured here and now."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any

import typer

from pipeline.cli.options import JsonOption, RunsDirOption


class Name(StrEnum):
    scheduler = "scheduler"
    teacher = "teacher"
    buffer = "buffer"
    rollout = "rollout"
    engine = "engine"
    sandboxes = "sandboxes"


ConfigOption = Annotated[
    Path | None,
    typer.Option(
        "--config",
        help="teacher: time the calls of its teacher. rollout: what to run (configs/quickstart.yaml). sandboxes: its specs.",
        show_default=False,
    ),
]
ShapeOption = Annotated[
    str | None,
    typer.Option("--shape", help="teacher: time only the calls of a random model: 1.7b, 135m or tiny.", show_default=False),
]
EnginesOption = Annotated[
    Path, typer.Option("--engines", help="engine: folder of the engines' environments, as `make engines` makes them.")
]
KillsOption = Annotated[
    int, typer.Option("--kills", min=0, help="sandboxes: kill so many of their owners, too, and count what is left.")
]
DeviceOption = Annotated[str, typer.Option("--device", help="Where the random model runs: cpu or cuda.")]


def register(app: typer.Typer) -> None:
    app.command(
        "bench", help="Measure the scheduler, the teacher stage, the buffer, whole rollouts, engines, or sandboxes on this machine."
    )(bench)


def bench(
    name: Annotated[Name, typer.Argument(metavar="NAME", help="scheduler, teacher, buffer, rollout, engine or sandboxes.")],
    config: ConfigOption = None,
    shape: ShapeOption = None,
    device: DeviceOption = "cpu",
    engines: EnginesOption = Path(".engines"),
    kills: KillsOption = 0,
    runs_dir: RunsDirOption = None,
    as_json: JsonOption = False,
) -> None:
    """One flat object `figures`; what a figure is of stands in `notes`."""
    from pipeline.cli.output import echo_json, show
    from pipeline.cli.runs import run_root
    from pipeline.errors import UserError

    if (shape and name is not Name.teacher) or (config and name not in (Name.teacher, Name.rollout, Name.sandboxes)):
        raise UserError(f"--config and --shape are options of other benches, not of {name.value}")
    if kills and name is not Name.sandboxes:
        raise UserError(f"--kills is an option of sandboxes, not of {name.value}")
    root = run_root(runs_dir)
    if name is Name.scheduler:
        found = _scheduler()
    elif name is Name.engine:
        found = _engine(engines)
    elif name is Name.buffer:
        found = _buffer(root)
    elif name is Name.rollout:
        found = _rollout(config or Path("configs/quickstart.yaml"), root)
    elif name is Name.sandboxes:
        found = _sandboxes(config, kills)
    else:
        found = _teacher_calls(shape, device) if shape else _teacher(config, root)
    if as_json:
        echo_json({"bench": name.value, **found})
        return
    from rich.table import Table

    table = Table(f"bench {name.value}", "figure", box=None, header_style="bold", padding=(0, 2, 0, 0))
    for key, value in found["figures"].items():
        table.add_row(key, f"{value:.4g}")
    show(table, *found["notes"])


def _scheduler() -> dict[str, Any]:
    from pipeline.bench.scheduler import figures

    return {"figures": figures(), "notes": []}


def _engine(engines: Path) -> dict[str, Any]:
    from pipeline.bench.engine import figures

    return figures(engines)


def _sandboxes(config: Path | None, kills: int) -> dict[str, Any]:
    from pipeline.bench.sandboxes import figures, of_config

    return figures(of_config(config), owners=kills)


def _rollout(config: Path, root: Path) -> dict[str, Any]:
    from workflows.bench import figures

    with _folder(root) as folder:
        return figures(config, folder)


@contextmanager
def _folder(root: Path) -> Iterator[Path]:
    """On the disk that runs lie on; it goes with what is in it."""
    import tempfile

    root.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=root, prefix=".bench-") as folder:
        yield Path(folder)


def _teacher(config: Path | None, root: Path) -> dict[str, Any]:
    from pipeline.bench import teacher, teacher_calls, teacher_commits
    from workflows import bench_teacher

    if config is None:
        calls, who = teacher_calls.stated(), "a teacher of stated cost; --config measures a configured one"
    else:
        calls, who = teacher_calls.of_config(config, root / ".cache")
    with _folder(root) as folder:
        on_ray = bench_teacher.figures(teacher.Workload(), folder)
    found = calls | teacher.figures() | on_ray | teacher_commits.figures()
    notes = [f"call32_over_8x4 is of {who}", "ray_: whole runs of the same workload, a Ray each"]
    return {"figures": found, "notes": [*notes, teacher.FLOOR]}


def _teacher_calls(shape: str, device: str) -> dict[str, Any]:
    from pipeline.bench.teacher_calls import of_shape

    calls, who = of_shape(shape, device)
    return {"figures": calls, "notes": [f"of {who}"]}


def _buffer(root: Path) -> dict[str, Any]:
    """On the disk that runs lie on."""
    from deployments.bench import figures

    with _folder(root) as folder:
        return figures(folder)
