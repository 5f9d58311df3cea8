"""`rollout gc [RUN]`: remove what no run can need any more. What a resume needs always stays."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from pipeline.cli.options import RunsDirOption

if TYPE_CHECKING:
    from pipeline.paths import RunPaths

RunArgument = Annotated[
    str | None, typer.Argument(metavar="[RUN]", help="A run id, or the path of a run folder; all runs when left out.")
]
DryRunOption = Annotated[bool, typer.Option("--dry-run", help="Say what would be removed, and remove nothing.")]
RowsOption = Annotated[
    bool, typer.Option("--rows", help="Also rows that buffer.keep_groups keeps: trained groups that no resume needs.")
]


def register(app: typer.Typer) -> None:
    app.command("gc", help="Remove what no run needs any more: old rows, checkpoints, weights, workflows, leftovers.")(collect)


def collect(
    run: RunArgument = None, dry_run: DryRunOption = False, rows: RowsOption = False, runs_dir: RunsDirOption = None
) -> None:
    from pipeline.cli.runs import find_run, list_runs, run_root
    from pipeline.paths import SharedPaths

    root = run_root(runs_dir)
    chosen: list[RunPaths] = [find_run(root, run)] if run is not None else list_runs(root)
    freed = sum(_collect(paths, dry_run, rows, only=run is not None) for paths in chosen)
    if run is None:
        freed += _cache(SharedPaths(root).cache, dry_run)
    typer.echo(f"{'would free' if dry_run else 'freed'} {_size(freed)}")


def _collect(paths: RunPaths, dry_run: bool, rows: bool, only: bool) -> int:
    """Bytes freed. A run that is alive or unreadable fails the command when it alone was asked for, else it is passed over."""
    import asyncio

    from pipeline.buffer.lock import RunLock, is_held
    from pipeline.config.loading import read_config
    from pipeline.errors import Locked, RolloutError
    from pipeline.retention import remove, surplus

    try:
        if is_held(paths):
            raise Locked(f"run {paths.run_id} is running: nothing of it is removed")
        config = read_config(paths.config).config
        if dry_run:
            found = surplus(paths, config, rows=rows)
        else:
            with RunLock(paths):
                found = surplus(paths, config, rows=rows)
                asyncio.run(remove(paths, config, found, rows=rows))
    except RolloutError as error:
        if only:
            raise
        typer.echo(f"{paths.run_id}: passed over: {error}")
        return 0
    for item in found:
        typer.echo(f"{paths.run_id}: {item.what}, {_size(item.size)}")
    return sum(item.size for item in found)


def _cache(cache, dry_run: bool) -> int:
    """Half-built models whose builders are gone."""
    import shutil

    from pipeline.trainer.cache import debris

    freed = 0
    for path in debris(cache):
        size = sum(file.stat().st_size for file in path.rglob("*") if file.is_file())
        typer.echo(f"left over in the cache: {path.name}, {_size(size)}")
        freed += size
        if not dry_run:
            shutil.rmtree(path, ignore_errors=True)
    return freed


def _size(size: float) -> str:
    for unit in ("B", "kB", "MB", "GB"):
        if size < 1000 or unit == "GB":
            break
        size /= 1000
    return f"{size:.0f} {unit}" if unit == "B" else f"{size:.1f} {unit}"
