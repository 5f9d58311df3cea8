from __future__ import annotations

import json
import logging

import pytest
import torch
from transformers import AutoModelForCausalLM

from pipeline.engines.pretrained import save_model
from pipeline.errors import FencedOut
from pipeline.paths import RunPaths
from pipeline.trainer import checkpoints
from tests.pipeline.trainer.helpers import saved_student, tiny_model


def save(paths: RunPaths, step: int, seed: int | None = None, fence=lambda: None, **state) -> checkpoints.Checkpoint:
    model = tiny_model(step if seed is None else seed)
    return checkpoints.save(
        paths, step, {step: [7, 3]}, write_model=lambda folder: save_model(model, folder, folder), state=state, epoch=2, fence=fence
    )


@pytest.fixture
def paths(tmp_path) -> RunPaths:
    return RunPaths(tmp_path)


def steps_of(paths: RunPaths) -> list[int]:
    return [found.step for found in checkpoints.complete(paths)]


def test_what_was_saved_is_found_and_loads_in_transformers(paths):
    save(paths, 4, optimizer={"state": torch.arange(3)}, rate=0.5)
    (found,) = checkpoints.complete(paths)
    assert (found.step, found.covers, found.epoch) == (4, {4: [7, 3]}, 2)
    assert found.path == paths.root / "checkpoints" / "step_000004"
    assert torch.equal(found.state()["optimizer"]["state"], torch.arange(3))
    loaded = AutoModelForCausalLM.from_pretrained(found.path)
    for left, right in zip(loaded.parameters(), tiny_model(4).parameters(), strict=True):
        assert torch.equal(left, right)
    manifest = json.loads((found.path / "manifest.json").read_text())
    assert {"model.safetensors", "config.json", "trainer_state.pt"} <= manifest["files"].keys()


def tear_size(folder):
    file = folder / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-1])


def tear_content(folder):
    file = folder / "trainer_state.pt"
    file.write_bytes(file.read_bytes()[:-1] + b"?")


def tear_file(folder):
    (folder / "config.json").unlink()


def tear_manifest(folder):
    (folder / "manifest.json").write_text('{"format": 1, "st')


def lose_manifest(folder):
    (folder / "manifest.json").unlink()


@pytest.mark.parametrize("tear", [tear_size, tear_content, tear_file, tear_manifest, lose_manifest])
@pytest.mark.fault(36)
def test_a_torn_checkpoint_is_skipped_with_its_name(paths, tear, caplog):
    for step in (2, 4, 6):
        save(paths, step)
    tear(paths.checkpoint(6))
    with caplog.at_level(logging.WARNING):
        assert steps_of(paths) == [4, 2]
    assert "step_000006 is torn" in caplog.text


def test_a_writer_that_was_fenced_out_leaves_nothing(paths):
    save(paths, 2)

    def refuse():
        raise FencedOut("epoch 2 is over")

    with pytest.raises(FencedOut):
        save(paths, 4, fence=refuse)
    assert [path.name for path in paths.checkpoints.iterdir()] == ["step_000002"]


def test_the_fence_is_asked_last_before_the_rename(paths):
    seen = []
    save(paths, 2, fence=lambda: seen.append([(p.name[:5], (p / "manifest.json").exists()) for p in paths.checkpoints.iterdir()]))
    assert seen == [[(".tmp-", True)]]


def test_a_torn_folder_is_replaced_by_a_save_of_the_same_step(paths):
    save(paths, 2, seed=0)
    tear_size(paths.checkpoint(2))
    save(paths, 2, seed=1)
    assert steps_of(paths) == [2]
    assert [path.name for path in paths.checkpoints.iterdir()] == ["step_000002"]


def test_pruning_keeps_the_last_complete_ones_and_never_fewer_than_two(paths):
    for step in (2, 4, 6, 8):
        save(paths, step)
    tear_size(paths.checkpoint(6))
    (paths.checkpoints / ".tmp-crashed").mkdir()
    assert checkpoints.prune(paths, 1) == ["step_000006", "step_000002"]
    assert sorted(path.name for path in paths.checkpoints.iterdir()) == ["step_000004", "step_000008"]


def test_pruning_spares_a_torn_newest_for_whoever_looks_into_it(paths):
    for step in (2, 4, 6):
        save(paths, step)
    tear_file(paths.checkpoint(6))
    assert checkpoints.prune(paths, 2) == []
    assert steps_of(paths) == [4, 2]


def test_no_checkpoints_is_an_answer(paths):
    assert steps_of(paths) == []
    assert checkpoints.prune(paths, 2) == []


def test_the_student_folder_itself_loads(tmp_path):
    assert AutoModelForCausalLM.from_pretrained(saved_student(tmp_path / "student")).config.vocab_size == 12
