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
from contextlib import suppress
from pathlib import Path
from typing import Any

import psutil

from pipeline.paths import RunPaths
from tests.chaos.witnesses import first_after
from tests.e2e.program import Command, Program, program, status, title_of, wait_for

CONFIG = Path(__file__).with_name("chaos.yaml")
RUN = "soak"
SETTINGS = ("buffer.keep_groups=40", "run.window_steps=20", "engine.script.seconds=0", "teachers.teacher.fixed_cost_s=0")
"""Nothing takes time but the pipeline; what is kept is little, so that something can be seen to grow."""
LOOKS = 4
"""A life."""
STOP_S, LIFE_S = 60.0, 1800.0
STOPPED = 3
"""Exit code after SIGINT."""
MB = 2**20


def live(made: Program, steps: int, until: int) -> tuple[list[dict[str, Any]], int]:
    """One command that is stopped at step `until`, unless it ends before: its looks, and how it ended."""
    paths, started = made.run(RUN), time.time()
    new = ("run", CONFIG, "--run-id", RUN, f"trainer.steps={steps}", *SETTINGS)
    command = made.start(*(("resume", RUN) if paths.config.exists() else new))
    first = wait_for(lambda: first_after(paths, started), LIFE_S, "a first group", command)
    begun = trained(paths)
    looks = []
    for number in range(1, LOOKS + 1):
        target = begun + (until - begun) * number // LOOKS
        wait_for(lambda target=target: trained(paths) >= target, LIFE_S, f"step {target}", command)
        looks.append(look(made, paths) | {"resume_s": round(first - started, 2)})
    if until < steps:
        command.send(signal.SIGINT)
    return looks, ended(command)


def trained(paths: RunPaths) -> int:
    found = status(paths)
    return found["step"] if found else 0


def ended(command: Command) -> int:
    done = command.done(STOP_S)
    if done.code not in (0, STOPPED):
        raise AssertionError(f"the command ended with {done.code}: {done.err[-2000:]}")
    return done.code


def look(made: Program, paths: RunPaths) -> dict[str, Any]:
    """Megabytes that are a process's own, and open files, by kind of process; megabytes on disk by folder."""
    memory: dict[str, float] = defaultdict(float)
    files: dict[str, int] = defaultdict(int)
    for process in made.processes():
        try:
            own, opened, name = process.memory_full_info().uss, process.num_fds(), kind_of(process)
        except psutil.Error:
            continue  # it ended meanwhile
        memory[name] += own / MB
        files[name] += opened
    disk = {path.name: size_of(path) / MB for path in paths.root.iterdir() if path.is_dir() or path == paths.database}
    return {
        "step": trained(paths),
        "t": time.time(),
        "memory_mb": {name: round(value, 1) for name, value in sorted(memory.items())},
        "open_files": dict(sorted(files.items())),
        "disk_mb": {name: round(value, 2) for name, value in sorted(disk.items())},
    }


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


def table(looks: list[dict[str, Any]]) -> str:
    """A line a look: sums, and what changed most."""
    lines = ["step  resume_s  s/step  memory_mb  open_files  disk_mb"]
    for before, now in zip([None, *looks], looks, strict=False):
        pace = (now["t"] - before["t"]) / max(1, now["step"] - before["step"]) if before else float("nan")
        sums = (sum(now[name].values()) for name in ("memory_mb", "open_files", "disk_mb"))
        lines.append(f"{now['step']:>4}  {now['resume_s']:>8}  {pace:6.2f}  " + "  ".join(f"{value:9.1f}" for value in sums))
    return "\n".join(lines)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=2000)
    parser.add_argument("--until", type=int, help="play lives up to this step only; all steps when left out")
    parser.add_argument("--lives", type=int, default=4, help="commands that the steps of this call are played in")
    parser.add_argument("--folder", type=Path, help="where the run lies, and stays; a temporary folder when left out")
    given = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="soak-") as temporary:
        folder = given.folder or Path(temporary)
        with program(folder) as made:
            first, last = trained(made.run(RUN)), given.until or given.steps
            for number in range(1, given.lives + 1):
                looks, code = live(made, given.steps, first + (last - first) * number // given.lives)
                with (folder / "looks.jsonl").open("a") as file:
                    file.writelines(json.dumps(seen) + "\n" for seen in looks)
                print(f"life {number} ended with {code} at step {looks[-1]['step']}", file=sys.stderr)
        print(table([json.loads(line) for line in (folder / "looks.jsonl").read_text().splitlines()]))
    return 0


if __name__ == "__main__":
    sys.exit(main())
