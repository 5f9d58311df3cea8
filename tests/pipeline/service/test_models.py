"""Which models are served: live weights, checkpoints, and what a name over the network may open."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path

import pytest

from pipeline.engines.weights import WeightStore
from pipeline.errors import RequestRefused
from pipeline.paths import RunPaths, SharedPaths
from pipeline.service.loaded import LoadedEngines
from pipeline.service.models import Models, link_folder, weights_key


def fill(folder: Path, word: str = "w") -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text("{}")
    (folder / "model.safetensors").write_text(word)
    (folder / "trainer_state.pt").write_text("state")
    return folder


def checkpoint(run: RunPaths, step: int) -> Path:
    folder = fill(run.checkpoint(step), f"step {step}")
    files = {name: {"size": (folder / name).stat().st_size} for name in ("config.json", "model.safetensors")}
    (folder / "manifest.json").write_text(json.dumps({"format": 1, "step": step, "files": files}))
    return folder


@pytest.fixture
def shared(tmp_path) -> SharedPaths:
    return SharedPaths(tmp_path / "runs")


@pytest.fixture
def run(shared) -> RunPaths:
    paths = RunPaths(shared.runs / "r1")
    paths.root.mkdir(parents=True)
    return paths


def test_live_is_the_newest_that_a_run_has(shared, run, tmp_path):
    models = Models(shared, run, fill(tmp_path / "base"))
    assert (models.live().version, models.has_weights()) == (0, False)
    checkpoint(run, 10), checkpoint(run, 20)
    assert (models.live().version, models.live().folder) == (20, run.checkpoint(20)) and models.has_weights()
    WeightStore(run.weights).publish(23, fill)
    assert models.live().version == 23
    (run.checkpoint(20) / "model.safetensors").write_text("torn")
    assert [model.name for model in models.checkpoints()] == ["r1/checkpoints/step_000010"]


def test_a_model_is_found_by_its_path_below_the_runs_and_nowhere_else(shared, run, tmp_path):
    folder = checkpoint(run, 10)
    models = Models(shared, run, fill(tmp_path / "base"))
    assert models.find("live").version == 10
    for name in ("r1/checkpoints/step_000010", str(folder)):
        assert (models.find(name).version, models.find(name).name) == (10, "r1/checkpoints/step_000010")
    (shared.runs / "link").symlink_to(tmp_path / "base")
    for name in (str(tmp_path / "base"), "../base", "link", "/etc", "r1", "nothing", ""):
        with pytest.raises(RequestRefused) as caught:
            models.find(name)
        assert (caught.value.status, caught.value.param) == (404, "model")


def test_a_linked_model_outlives_pruning_and_is_the_same_file(shared, run, tmp_path):
    folder = checkpoint(run, 10)
    models = Models(shared, run, None)
    linked = models.link("live", tmp_path / "kept")
    key = weights_key(folder)
    (folder / "model.safetensors").unlink()
    assert weights_key(linked.folder) == key and linked.version == 10
    assert not (linked.folder / "trainer_state.pt").exists()
    link_folder(fill(tmp_path / "other"), tmp_path / "copy")
    assert weights_key(tmp_path / "copy") != key


class Opened:
    def __init__(self, word: str) -> None:
        self.word, self.closed = word, False

    async def close(self) -> None:
        self.closed = True


async def test_engines_are_shared_kept_and_closed_only_when_idle(tmp_path):
    opened: list[Opened] = []

    def opens(folder: Path, version: int) -> Opened:
        if not (folder / "model.safetensors").read_text():
            raise ValueError("torn")
        opened.append(Opened(f"{folder.name} {version}"))
        return opened[-1]

    folders = [fill(tmp_path / name, name) for name in "abc"]
    engines = LoadedEngines(opens, capacity=1)
    async with engines.use(folders[0], 1) as first, engines.use(folders[0], 1) as again:
        assert first is again
        async with engines.use(folders[1], 1), engines.use(folders[2], 1):
            assert [engine.closed for engine in opened] == [False] * 3, "all are in use"
        assert not first.closed
    async with engines.use(folders[0], 1) as back:
        assert back is first and [engine.word for engine in opened if not engine.closed] == ["a 1"]
    (folders[1] / "model.safetensors").write_text("")
    for _ in range(2):
        with pytest.raises(ValueError, match="torn"):
            async with engines.use(folders[1], 1):
                pass
    (folders[1] / "model.safetensors").write_text("good")
    async with engines.use(folders[1], 1) as good:
        assert good.word == "b 1"
    await engines.close()
    assert all(engine.closed for engine in opened)


async def test_two_that_ask_at_once_open_one_engine(tmp_path):
    opened = []
    engines = LoadedEngines(lambda folder, version: opened.append(Opened("x")) or opened[-1], capacity=2)
    folder = fill(tmp_path / "a")

    async def use() -> Opened:
        async with engines.use(folder, 0) as engine:
            await asyncio.sleep(0)
            return engine

    found = await asyncio.gather(*(use() for _ in range(10)))
    assert len(opened) == 1 and set(found) == set(opened)
