"""A long run of small steps on Ray, resumed on its way: what grows? `python -m tests.chaos.soak --steps 2000 --lives 4`.

A life is a command, from its start to SIGINT; the run lies in `--folder`, where a later call goes on with it.
"""

from __future__ import annotations

import argparse
import json
import re
import signal
import sys
import tempfile
import time
from collections import defaultdict
from contextlib import closing, suppress
from pathlib import Path
from typing import Any

import psutil

from pipeline.buffer.progress import trained_step
from pipeline.buffer.schema import is_created, open_reader
from pipeline.paths import RunPaths
from tests.chaos.witnesses import first_after
from tests.e2e.program import Command, Program, program, title_of, wait_for

CONFIG = Path(__file__).with_name("chaos.yaml")
RUN = "soak"
SETTINGS = ("buffer.keep_groups=40", "run.window_steps=20", "engine.script.seconds=0", "teachers.teacher.fixed_cost_s=0")
"""Nothing takes time but the pipeline; what is kept is little, so that something can be seen to grow."""
LOOKS = 2
"""A life."""
STOP_S, LIFE_S = 60.0, 1800.0
STOPPED = 3
"""Exit code after SIGINT."""
MB = 2**20
Look = dict[str, Any]


def soak(folder: Path, steps: int, lives: int, until: int | None = None) -> list[Look]:
    """All looks of the run in `folder` so far. until: the step that this call ends at; None: the last one."""
    file = folder / "looks.jsonl"
    with program(folder) as made:
        first, last = trained(made.run(RUN)), until or steps
        for number in range(1, lives + 1):
            looks, code = live(made, steps, first + (last - first) * number // lives)
            with file.open("a") as out:
                out.writelines(json.dumps(seen) + "\n" for seen in looks)
            print(f"life {number} ended with {code} at step {looks[-1]['step']}", file=sys.stderr)
    return [json.loads(line) for line in file.read_text().splitlines()]


def live(made: Program, steps: int, until: int) -> tuple[list[Look], int]:
    """One command that is stopped at step `until`, unless it ends before: its looks, and how it ended."""
    paths, started = made.run(RUN), time.time()
    new = ("run", CONFIG, "--run-id", RUN, f"trainer.steps={steps}", *SETTINGS)
    command = made.start(*(("resume", RUN) if paths.config.exists() else new))
    wait_for(lambda: trained(paths) > 0, LIFE_S, "a first step", command)
    begun = trained(paths)
    wait_for(lambda: trained(paths) > begun, LIFE_S, f"step {begun + 1}", command)
    resumed_s = first_after(paths, started) - started
    looks, at, step, cpu_s = [], time.time(), trained(paths), cpu_seconds(made)
    for number in range(1, LOOKS + 1):
        target = begun + (until - begun) * number // LOOKS
        wait_for(lambda target=target: trained(paths) >= target, LIFE_S, f"step {target}", command)
        now, reached, used_s = time.time(), trained(paths), cpu_seconds(made)
        pace = {"step_s": (now - at) / (reached - step), "step_cpu_s": (used_s - cpu_s) / (reached - step)}
        looks.append({"step": reached, "resume_s": resumed_s} | pace | look(made, paths))
        at, step, cpu_s = now, reached, used_s
    if until < steps:
        command.send(signal.SIGINT)
    return looks, ended(command)


def trained(paths: RunPaths) -> int:
    if not is_created(paths):
        return 0
    with closing(open_reader(paths.database)) as db:
        return trained_step(db)


def ended(command: Command) -> int:
    done = command.done(STOP_S)
    if done.code not in (0, STOPPED):
        raise AssertionError(f"the command ended with {done.code}: {done.err[-2000:]}")
    return done.code


def cpu_seconds(made: Program) -> float:
    """Of everything that lives: what a step costs, whoever else is on the machine."""
    times = []
    for process in made.processes():
        with suppress(psutil.Error):
            times.append(process.cpu_times())
    return sum(each.user + each.system for each in times)


def look(made: Program, paths: RunPaths) -> Look:
    """Megabytes that are a process's own, open files and threads, by kind of process; megabytes on disk by folder."""
    found: dict[str, dict[str, float]] = {
        "memory_mb": defaultdict(float),
        "open_files": defaultdict(int),
        "threads": defaultdict(int),
    }
    for process in made.processes():
        try:
            own, files, threads = process.memory_full_info().uss, process.num_fds(), process.num_threads()
            kind = kind_of(process)
        except psutil.Error:
            continue  # it ended meanwhile
        for name, amount in (("memory_mb", own / MB), ("open_files", files), ("threads", threads)):
            found[name][kind] += amount
    found["disk_mb"] = {path.name: size_of(path) / MB for path in paths.root.iterdir() if path.is_dir() or path == paths.database}
    return {name: {key: round(value, 2) for key, value in sorted(amounts.items())} for name, amounts in found.items()}


def kind_of(process: psutil.Process) -> str:
    """`ray::TrainerActor.node` is a TrainerActor; `ray::train[7]` and idle workers are workers."""
    title = title_of(process)
    actor = re.match(r"ray::(ServeReplica:[^:]*:\w+|[A-Z]\w+)", title)
    if actor and not title.startswith("ray::IDLE"):
        return actor[1]
    return "worker" if title.startswith("ray::") else process.name()


def size_of(path: Path) -> int:
    """Files of a run that goes on may be removed meanwhile."""
    size = 0
    for file in path.rglob("*") if path.is_dir() else [path]:
        with suppress(FileNotFoundError):
            size += file.stat().st_size if file.is_file() else 0
    return size


def table(looks: list[Look]) -> str:
    """A line a look, then a line a kind of process."""
    lines = ["step  resume_s  s/step  cpu_s/step  memory_mb  open_files  threads  disk_mb"]
    for now in looks:
        sums = "  ".join(f"{sum(now[name].values()):9.1f}" for name in ("memory_mb", "open_files", "threads", "disk_mb"))
        lines.append(f"{now['step']:>4}  {now['resume_s']:>8.1f}  {now['step_s']:6.3f}  {now['step_cpu_s']:10.3f}  {sums}")
    for name in ("memory_mb", "open_files", "threads", "disk_mb"):
        lines += ["", f"{name}, look by look"]
        for kind in sorted({kind for now in looks for kind in now[name]}):
            lines.append(f"{kind:<40}" + "".join(f"{now[name].get(kind, 0.0):8.1f}" for now in looks))
    return "\n".join(lines)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=2000)
    parser.add_argument("--until", type=int, help="play lives up to this step only; all steps when left out")
    parser.add_argument("--lives", type=int, default=4, help="commands that the steps of this call are played in")
    parser.add_argument("--folder", type=Path, help="where the run lies, and stays; a temporary folder when left out")
    given = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="soak-") as temporary:
        print(table(soak(given.folder or Path(temporary), given.steps, given.lives, given.until)))
    return 0


if __name__ == "__main__":
    sys.exit(main())
