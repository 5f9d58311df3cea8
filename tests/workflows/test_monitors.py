import asyncio
import json
import subprocess

import pytest

from pipeline.buffer.lock import ProcessId
from pipeline.errors import StageFailed
from workflows.monitors import ClusterWatch, NodeCounter, RestartWatch


def status(pid: int, *, written: int = 0, trained: int = 0, step: int = 0, pending: int = 4) -> dict:
    ordinals = {"fetched": pending + written + trained, "pending": pending, "running": 0, "written": written, "trained": trained}
    return {"ordinals": ordinals, "step": step, "stages": {"trainer": {"pid": pid}, "fetcher": {"pid": 1}}}


def watch(most: int = 3) -> RestartWatch:
    return RestartWatch(lambda: None, most)


def test_restarts_without_progress_fail_the_run_and_name_the_stage_and_its_log():
    restarts = watch()
    for pid in (10, 11, 12, 13):
        restarts.observe(status(pid))
    with pytest.raises(StageFailed, match=r"stage trainer: restarted 4 times .*max_actor_restarts 3.*log/trainer.log"):
        restarts.observe(status(14))


@pytest.mark.parametrize("progress", [{"written": 1}, {"trained": 4}, {"step": 1}])
def test_progress_forgives(progress):
    restarts = watch(1)
    restarts.observe(status(10))
    restarts.observe(status(11))
    restarts.observe(status(12, **progress))
    with pytest.raises(StageFailed):
        restarts.observe(status(13, **progress))


def test_the_same_process_and_new_stages_are_no_restart():
    restarts = watch(0)
    restarts.observe({**status(10), "stages": {}})
    for _ in range(5):
        restarts.observe(status(10))
    with pytest.raises(StageFailed, match="restarted 1 times"):
        restarts.observe(status(11))


@pytest.mark.looptime
async def test_it_looks_until_it_fails():
    found = [status(1), status(2), status(3)]

    async def next_status():
        return found.pop(0)

    restarts = RestartWatch(next_status, 1)
    with pytest.raises(StageFailed):
        await restarts.run()


@pytest.fixture
def service():
    process = subprocess.Popen(["sleep", "60"])
    yield process
    process.kill()
    process.wait()


async def test_a_lost_ray_fails_the_run_and_names_the_process(service):
    watching = asyncio.ensure_future(ClusterWatch({"raylet": ProcessId.of(service.pid)}).run())
    await asyncio.sleep(0.1)
    assert not watching.done()
    service.kill()
    with pytest.raises(StageFailed, match=rf"stage ray: its raylet \(pid {service.pid}\) has ended; `rollout resume` goes on"):
        await asyncio.wait_for(watching, 5)


def line(node: str, event: str) -> str:
    return json.dumps({"t": 1.0, "node": node, "event": event, "pid": 1}) + "\n"


def test_nodes_done_and_rerun(tmp_path):
    log = tmp_path / "nodes.jsonl"
    counter = NodeCounter(log)
    assert counter.counts() == {"nodes_done": 0, "nodes_rerun": 0}
    log.write_text(line("fetch[1]", "started") + line("fetch[1]", "done") + line("rollout[1]", "started"))
    assert counter.counts() == {"nodes_done": 1, "nodes_rerun": 0}
    with log.open("a") as file:
        file.write(line("rollout[1]", "started") + line("rollout[1]", "done"))  # it had not ended: no rerun
        file.write(line("fetch[1]", "started"))
        file.write(line("fetch[1]", "done")[:20])
    assert counter.counts() == {"nodes_done": 2, "nodes_rerun": 1}
    with log.open("a") as file:
        file.write(line("fetch[1]", "done")[20:])
    assert counter.counts() == {"nodes_done": 2, "nodes_rerun": 1}
    assert NodeCounter(log).counts() == counter.counts(), "a resume counts the whole log"
