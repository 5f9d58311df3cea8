"""Where everything of a run lies. Relative to the run folder, so that the folder can be moved."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True, slots=True)
class RunPaths:
    root: Path

    @property
    def run_id(self) -> str:
        return self.root.name

    @property
    def config(self) -> Path:
        return self.root / "config.yaml"

    @property
    def data(self) -> Path:
        """The run's own copy of its input files."""
        return self.root / "data"

    @property
    def code(self) -> Path:
        """The run's own copy of modules that lay beside its configuration: every process of the run imports from here."""
        return self.root / "code"

    @property
    def database(self) -> Path:
        return self.root / "run.db"

    @property
    def lock(self) -> Path:
        return self.root / "run.lock"

    @property
    def groups(self) -> Path:
        return self.root / "groups"

    @property
    def workflow(self) -> Path:
        return self.root / "workflow"

    @property
    def checkpoints(self) -> Path:
        return self.root / "checkpoints"

    def checkpoint(self, step: int) -> Path:
        return self.checkpoints / f"step_{step:06d}"

    @property
    def weights(self) -> Path:
        """Published versions for the engines: a cache that a resume can rebuild from the checkpoints."""
        return self.root / "weights"

    @property
    def metrics(self) -> Path:
        return self.root / "metrics.jsonl"

    @property
    def tensorboard(self) -> Path:
        return self.root / "tensorboard"

    @property
    def details(self) -> Path:
        return self.root / "eval_details"

    def evaluation(self, step: int) -> Path:
        """The summary of the evaluation after a step: once it is there, that evaluation is done."""
        return self.details / f"{evaluation_id(step)}.summary.json"

    @property
    def report(self) -> Path:
        return self.root / "report.html"

    @property
    def summary(self) -> Path:
        return self.root / "summary.json"

    @property
    def log(self) -> Path:
        return self.root / "log"

    @property
    def nodes(self) -> Path:
        """Every start and end of a workflow node's work, a line each."""
        return self.log / "nodes.jsonl"

    @property
    def plays(self) -> Path:
        """What the workers began to play, a line a call."""
        return self.log / "plays.jsonl"

    @property
    def commits(self) -> Path:
        """Commits whose acknowledgement was heard, a line each."""
        return self.log / "commits.jsonl"

    @property
    def trained(self) -> Path:
        """What the trainer trained on, a line a step (and another when a crash made it repeat one)."""
        return self.log / "trained.jsonl"

    @property
    def cache(self) -> Path:
        """Shared by all runs beside this one."""
        return self.root.parent / ".cache"


@dataclass(frozen=True, slots=True)
class SharedPaths:
    """What lies beside the runs, and is of no run."""

    runs: Path

    @property
    def cache(self) -> Path:
        return self.runs / ".cache"

    @property
    def evaluations(self) -> Path:
        """Evaluations that were asked for by name, a folder each: over HTTP, or by `rollout eval`."""
        return self.runs / ".evals"

    @property
    def service(self) -> RunPaths:
        """The service's own lock and logs."""
        return RunPaths(self.runs / ".service")

    @property
    def ending(self) -> Path:
        """There while the service ends: it answers what it has begun, and nothing else."""
        return self.service.root / "ending"


def evaluation_id(step: int) -> str:
    """Of the evaluation of weight version `step`: names its files and its lease on that version."""
    return f"eval_{step:06d}"


def below(root: Path, name: str) -> Path | None:
    """What `name` is below `root`, links followed; None when it lies elsewhere, or nothing can be called that."""
    try:
        path = (root / name).resolve()
        path.exists()
    except (OSError, ValueError):  # too long, a NUL
        return None
    return path if path.is_relative_to(root.resolve()) else None
