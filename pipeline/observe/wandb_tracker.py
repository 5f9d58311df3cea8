"""Scalars for Weights & Biases, offline: they go to `wandb/` in the run folder, and whoever wants them on a server uploads them.

Invariant: nothing is sent over a network. Every process of a run writes a folder of its own, all under the run's id.
"""

from __future__ import annotations

import re
from typing import Any

import wandb

from pipeline.config.schema import RunConfig
from pipeline.observe.trackers import Handed, flat_numbers
from pipeline.paths import RunPaths

GROUPS = ("train", "eval")
START_S = 30.0
"""For wandb's own process to come up."""


class WandbTracker:
    def __init__(self, paths: RunPaths, config: RunConfig) -> None:
        folder = paths.root / "wandb"
        self._handed = Handed(folder / "handed.jsonl")
        self._run = wandb.init(
            mode="offline",
            dir=paths.root,
            project=config.run.name,
            id=re.sub(r"[^\w-]", "-", paths.run_id),
            name=paths.run_id,
            config=config.model_dump(mode="json"),
            settings=wandb.Settings(silent=True, console="off", disable_git=True, x_disable_stats=True, init_timeout=START_S),
        )
        for group in GROUPS:
            self._run.define_metric(f"{group}/*", step_metric=f"{group}/step")

    def add(self, group: str, step: int, scalars: dict[str, Any], at: float) -> bool:
        if (group, step) in self._handed:
            return False
        values = {f"{group}/{name}": value for name, value in flat_numbers(scalars)}
        self._run.log({f"{group}/step": step, "_timestamp": at, **values})
        self._handed.add([(group, step)])
        return True

    def flush(self) -> None:
        """wandb's own process writes what it is handed at once."""

    def close(self) -> None:
        """Ends wandb's own process, too: at the program's end it would be missed where a run has ended all of its processes."""
        self._run.finish()
        wandb.teardown()
