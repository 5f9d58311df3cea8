"""A small student that imitates the reference teacher's turns: what it has not seen becomes less surprising to it."""

from __future__ import annotations

import asyncio
import shutil
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from pipeline.buffer.api import Attempt
from pipeline.config.loading import load
from pipeline.engines.pretrained import load_model
from pipeline.engines.renderer import ChatRenderer
from pipeline.evaluator.spec import PlacementToken, specs_from_config
from pipeline.evaluator.worker import EvaluatorWorker
from pipeline.fetcher.catalog import Catalog
from pipeline.records import Group, StepContext, Task
from pipeline.sandboxes.local import MISSING, LocalSandboxes
from pipeline.trainer.assets import student_folder
from pipeline.trainer.packing import Row, RowRules, make_rows
from pipeline.trainer.update import Updater

CONFIG = Path(__file__).parents[3] / "configs" / "swe_dagger.yaml"
TOKEN = PlacementToken("local", None, 0.0, 1.0, 0.25)
TEACHER_ONLY = StepContext(1, beta=1.0)


@pytest.mark.slow
def test_the_loss_on_held_out_turns_of_the_teacher_falls(tmp_path: Path):
    if shutil.which("bwrap") is None:
        pytest.skip(MISSING)
    config = load(CONFIG, ["trainer.warmup_steps=2"]).config
    catalog = Catalog(config)
    folder = student_folder(config, catalog, tmp_path / "cache")
    worker = EvaluatorWorker(
        config,
        ChatRenderer.load(folder),
        None,
        specs_from_config(config),
        "local",
        sandboxes={"swe": LocalSandboxes(root=tmp_path / "boxes")},
    )
    seen = asyncio.run(_played(worker, catalog.examples("repairs", "train", 16)))
    unseen = asyncio.run(_played(worker, catalog.examples("repairs", "held_out", 6)))
    assert all(group.samples[0].reward == 1.0 for group in (*seen, *unseen))
    model = load_model(folder, "float32")
    updater, rows, held_out = Updater(model, config.algorithm, config.trainer), _rows(seen), _rows(unseen)
    before = _loss(model, held_out)
    for step in range(1, 11):
        updater.update(rows[(step % 2) * 8 :][:8], step)
    assert _loss(model, held_out) < 0.7 * before


async def _played(worker: EvaluatorWorker, tasks: list[Task]) -> list[Group]:
    numbered = [replace(task, ordinal=number) for number, task in enumerate(tasks)]
    plays = [worker.run_samples(task, [0], Attempt(task.ordinal, 1, 0, 0), TEACHER_ONLY, [TOKEN]) for task in numbered]
    return [Group(t.ordinal, 1, 1, t, 0, tuple(samples)) for t, samples in zip(numbered, await asyncio.gather(*plays), strict=True)]


def _rows(groups: list[Group]) -> tuple[Row, ...]:
    return make_rows(groups, {s.sample_id for group in groups for s in group.samples}, RowRules(2048, imitate="teacher")).rows


@torch.no_grad()
def _loss(model: torch.nn.Module, rows: tuple[Row, ...]) -> float:
    values = []
    for row in rows:
        logits = model(input_ids=torch.from_numpy(row.token_ids[None].astype(np.int64))).logits[0].log_softmax(-1)
        values.append(-logits[row.positions - 1, row.token_ids[row.positions].astype(np.int64)].numpy())
    return float(np.concatenate(values).mean())
