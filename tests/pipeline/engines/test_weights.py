from __future__ import annotations

import asyncio
import subprocess
import sys
from pathlib import Path

import pytest

from pipeline.engines.weights import WeightStore


def fill(text: str):
    return lambda aside: (aside / "model").write_text(text)


def test_readers_see_only_what_is_complete(tmp_path: Path) -> None:
    store, reader = WeightStore(tmp_path / "w"), WeightStore(tmp_path / "w")
    assert reader.latest() is None
    first = store.publish(0, fill("zero"))
    assert reader.latest() == first and (first.path / "model").read_text() == "zero"

    def half(aside: Path) -> None:
        (aside / "model").write_text("half")
        raise OSError("disk full")

    with pytest.raises(OSError, match="disk full"):
        store.publish(1, half)
    assert reader.latest() == first
    second = store.publish(1, fill("one"))
    assert reader.latest() == second and second.version == 1


def test_the_last_three_stay_and_debris_of_a_crash_goes(tmp_path: Path) -> None:
    folder = tmp_path / "w"
    code = (
        "import os, sys, pathlib; from pipeline.engines.weights import WeightStore\n"
        "def die(aside): (aside / 'model').write_text('half'); os._exit(9)\n"
        "WeightStore(pathlib.Path(sys.argv[1])).publish(7, die)"
    )
    assert subprocess.run([sys.executable, "-c", code, folder]).returncode == 9
    assert len(list(folder.iterdir())) == 1 and WeightStore(folder).latest() is None
    store = WeightStore(folder)
    for version in range(5):
        store.publish(version, fill(str(version)))
    assert sorted(path.name for path in folder.iterdir()) == ["LATEST", "v000002", "v000003", "v000004"]


def test_a_version_published_again_does_not_disturb_readers_of_the_old_folder(tmp_path: Path) -> None:
    store = WeightStore(tmp_path)
    old = store.publish(3, fill("before the crash"))
    new = store.publish(3, fill("replayed"))
    assert store.latest() == new != old and new.version == 3
    assert (old.path / "model").read_text() == "before the crash" and (new.path / "model").read_text() == "replayed"
    assert store.publish(2, fill("back")) == store.latest()


@pytest.mark.looptime
async def test_publication_waits_for_an_evaluation_of_the_newest_version_and_not_for_ever(tmp_path: Path) -> None:
    loop = asyncio.get_running_loop()
    store, evaluator = WeightStore(tmp_path, loop.time), WeightStore(tmp_path, loop.time)
    assert await store.wait_unheld(1.0)
    store.publish(4, fill("four"))
    lease = evaluator.hold(4, 30.0, loop.time())
    evaluator.hold(3, 1000.0, loop.time())  # an evaluation that came too late holds nothing
    loop.call_later(5.0, evaluator.release, lease)
    began = loop.time()
    assert await store.wait_unheld(60.0)
    assert 5.0 <= loop.time() - began < 5.1
    evaluator.hold(4, 30.0, loop.time())  # whoever holds this one dies
    assert not await store.wait_unheld(10.0)
    assert await store.wait_unheld(60.0)
    assert 35.0 <= loop.time() - began < 35.2
    evaluator.release(lease)


def test_looking_is_cheap(tmp_path: Path) -> None:
    store = WeightStore(tmp_path)
    store.publish(0, fill("x"))
    store.latest()
    (tmp_path / "v000000").rename(tmp_path / "moved")  # nothing but the pointer is looked at
    assert store.latest().version == 0
