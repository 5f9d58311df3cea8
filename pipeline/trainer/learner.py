"""The synchronous half of the trainer: model, optimizer and what is made of one step's groups. Lives in one thread.

Invariant: what `learn` does follows from the parameters, the optimizer state, the groups, the step and the learning rate alone,
so that a replay from stored groups repeats it.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from pipeline.buffer.api import Selection
from pipeline.config.schema import RunConfig
from pipeline.engines.pretrained import load_model, save_model
from pipeline.errors import StageFailed
from pipeline.paths import RunPaths
from pipeline.records import Group
from pipeline.trainer import checkpoints, filters
from pipeline.trainer.checkpoints import Checkpoint
from pipeline.trainer.measures import rollout_measures
from pipeline.trainer.packing import Packed, RowRules, make_rows
from pipeline.trainer.update import FIGURES, Updater

END_OF_DATA = "end_of_data"


class Learner:
    """student: folder of weight version 0, in Hugging Face format; its tokenizer goes with every version.

    Parameters and optimizer state are float32 whatever the student's dtype: a bfloat16 weight would lose most small updates to
    rounding. A bfloat16 student computes in it (autocast), and is published and saved in it; the float32 weights are kept in
    the checkpoint's trainer state.
    """

    def __init__(self, config: RunConfig, paths: RunPaths, student: Path, checkpoint: Checkpoint | None, device: str) -> None:
        torch.set_num_threads(config.trainer.threads)
        self._config = config
        self._paths = paths
        self._student = student
        self._narrow = config.student.dtype != "float32"
        model = load_model(checkpoint.path if checkpoint else student, "float32")
        state = checkpoint.state() if checkpoint else {}
        if "master" in state:
            model.load_state_dict(state["master"])
        autocast = torch.bfloat16 if self._narrow else None
        self.updater = Updater(model.to(device), config.algorithm, config.trainer, autocast)
        if state:
            self.updater.optimizer.load_state_dict(state["optimizer"])
        settings, context = config.trainer, model.config.max_position_embeddings
        self._rules = RowRules(
            max_tokens=min(settings.max_sample_tokens or context, context, settings.max_tokens_per_chunk),
            std=config.algorithm.grpo.std,
            signal=self.updater.signal,
            scored_only=config.algorithm.name == "grpo",
            imitate="teacher" if config.algorithm.mixes() else "all" if config.algorithm.imitates() else "nothing",
            imitated_only=config.algorithm.name == "dagger",
        )

    def learn(self, step: int, selection: Selection, groups: Sequence[Group], lr: float | None = None) -> dict[str, Any]:
        """Update on the groups and return the step's result; `skipped` says why nothing was done, or is None.

        lr: the learning rate that a replayed step was recorded with; None: the schedule's.
        """
        result = filters.apply(groups, step, self._config.rollout.filters)
        packed = make_rows(result.groups, result.kept, self._rules)
        skipped = self._skip_reason(selection, packed)
        figures: dict[str, Any] = dict.fromkeys(FIGURES) | {"samples": 0, "tokens": 0}
        if skipped is None:
            figures = self.updater.update(packed.rows, step, lr)
        if figures["optimizer_steps"] == 0:
            skipped = "nonfinite_gradient"
        counts = {
            "dropped_groups": _added(selection.dropped, result.dropped_groups),
            "dropped_samples": _added(result.dropped_samples, packed.rejected),
        }
        identity = {
            "step": step,
            "weight_version": step,
            "end_of_data": skipped == END_OF_DATA,
            "skipped": skipped,
            "weights": self.updater.digest(),
        }
        return identity | rollout_measures(groups, step) | counts | figures

    def write_model(self, folder: Path) -> None:
        """The current weights in Hugging Face format, with the tokenizer."""
        model = self.updater.model
        if self._narrow:
            dtype = getattr(torch, self._config.student.dtype)
            model = copy.deepcopy(model).to(dtype)
            model.config.dtype = dtype
        save_model(model, folder, self._student)

    def save(self, step: int, covers: Mapping[int, Sequence[int]], epoch: int, fence: Callable[[], None]) -> Checkpoint:
        """Write a checkpoint of the current weights and remove those that are no longer needed."""
        state = {"step": step, "optimizer": self.updater.optimizer.state_dict()}
        if self._narrow:
            state["master"] = self.updater.model.state_dict()
        saved = checkpoints.save(self._paths, step, covers, write_model=self.write_model, state=state, epoch=epoch, fence=fence)
        checkpoints.prune(self._paths, self._config.trainer.keep_checkpoints)
        return saved

    def _skip_reason(self, selection: Selection, packed: Packed) -> str | None:
        """`short`: too few groups because groups were dropped. A step that is short because the data ended is trained on."""
        tasks = self._config.rollout.tasks_per_step
        found, dropped = len(selection.ordinals), sum(selection.dropped.values())
        if selection.ended:
            return END_OF_DATA
        if found < self._config.rollout.min_step_fraction * tasks and found + dropped >= tasks:
            return "short"
        return None if packed.rows else "emptied"


def groups_of(selection: Selection, groups: Sequence[Group]) -> list[Group]:
    """The selected groups in the recorded order. Raises StageFailed, naming them, when rows are gone."""
    by_ordinal = {group.ordinal: group for group in groups}
    missing = [ordinal for ordinal in selection.ordinals if ordinal not in by_ordinal]
    if missing:
        raise StageFailed("trainer", f"step {selection.step}: rows of consumed ordinals {missing[:8]} are not stored any more")
    return [by_ordinal[ordinal] for ordinal in selection.ordinals]


def _added(left: Mapping[str, int], right: Mapping[str, int]) -> dict[str, int]:
    return {reason: left.get(reason, 0) + right.get(reason, 0) for reason in sorted({*left, *right})}
