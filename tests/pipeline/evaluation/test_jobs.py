"""Evaluations as durable jobs: queue, events, cancellation, idempotency, and what a restart makes of them. On a virtual clock."""

from __future__ import annotations

import asyncio
import json
from contextlib import asynccontextmanager
from dataclasses import replace

import pytest
from pydantic import ValidationError

from pipeline.config.schema import RunConfig
from pipeline.engines.scripted import ScriptedEngine
from pipeline.errors import RequestRefused
from pipeline.evaluation.jobs import Jobs
from pipeline.evaluation.plan import EvalRequest, Plan, make_plan
from pipeline.evaluation.store import JobStore
from pipeline.evaluator.playing import play_here
from tests.pipeline.evaluator.parts import Letters, inline, make_config, make_task

CONFIG = make_config(engine={"kind": "scripted"})
VERSION = 7
SECONDS = 1.0
"""Of one sample."""


class Player:
    """Plays scripted agents over the scripted engine; `fault` is raised after `fault_after` samples."""

    def __init__(self, config: RunConfig = CONFIG) -> None:
        self.config = config
        self.played: list[str] = []
        self.fault: Exception | None = None
        self.fault_after = 0

    def link(self, model, target):
        if model != "live":
            raise RequestRefused(404, "model_not_found", f"no model {model}", "model")
        target.mkdir()
        (target / "weights").write_text("w")
        return "live", VERSION

    async def play(self, model, version, tasks, done, on_sample):
        assert (model / "weights").read_text() == "w"

        def seen(task, sample):
            if self.fault is not None and len(self.played) >= self.fault_after:
                raise self.fault
            self.played.append(sample.sample_id)
            on_sample(task, sample)

        engine = ScriptedEngine(self.config.engine, None, None, version)
        await play_here(self.config, engine, Letters(), tasks, version, seen, done, offload=inline)


def plan(request: EvalRequest) -> Plan:
    """`n` scripted samples of each of two tasks; the second task is never solved."""
    script = {"run_s": SECONDS, "engine": True}
    tasks = [make_task(0, script), make_task(1, script | {"reward": 0.0}, dataset="hard")]
    return Plan(tuple(replace(task, samples=request.n or 1) for task in tasks), request.k or ())


@asynccontextmanager
async def jobs_in(folder, player=None, **limits):
    numbers = iter(range(1000))
    used = {path.name for path in folder.iterdir()} if folder.exists() else set()
    jobs = Jobs(
        JobStore(folder),
        player or Player(),
        plan,
        0.9,
        clock=asyncio.get_running_loop().time,
        new_id=lambda now: next(f"e{n}" for n in numbers if f"e{n}" not in used),
        offload=inline,
        **limits,
    )
    await jobs.start()
    try:
        yield jobs
    finally:
        await jobs.close()


async def finished(jobs, name):
    after, events = 0, []
    while not events or events[-1]["event"] not in ("done", "error"):
        found = await jobs.events(name, after, 100.0)
        assert found, "silence"
        events += found
        after = events[-1]["id"]
    return events


@pytest.mark.looptime
async def test_a_job_is_queued_played_and_summed_up(tmp_path):
    async with jobs_in(tmp_path) as jobs:
        view = await jobs.submit(EvalRequest(n=2, k=2))
        assert (view["id"], view["status"], view["progress"]) == ("e0", "queued", {"done": 0, "total": 4})
        events = await finished(jobs, "e0")
        view = jobs.view("e0")
    assert view["status"] == "done" and view["weight_version"] == VERSION and view["error"] is None and view["valid"] is True
    assert view["results"]["words"] == {
        "accuracy": 1.0, "accuracy_all": 1.0, "solved": 2, "scored": 2, "done": 2, "total": 2, "pass@k": {"2": 1.0}
    }  # fmt: skip
    assert view["results"]["hard"]["accuracy"] == 0.0
    assert [event["event"] for event in events] == ["sample", "progress"] * 4 + ["done"]
    assert [event["id"] for event in events] == list(range(1, 10))
    assert events[-2]["data"] == {"done": 4, "total": 4} and events[-1]["data"]["results"] == view["results"]
    assert sorted(view["artefacts"]) == ["request.json", "samples.jsonl", "summary.json"]
    assert not (tmp_path / "e0" / "model").exists(), "a finished evaluation holds no model"
    lines = [json.loads(line) for line in (tmp_path / "e0" / "samples.jsonl").read_text().splitlines()]
    assert {line["sample_id"] for line in lines} == {"0.0", "0.1", "1.0", "1.1"}
    assert lines[0]["messages"] == [["user", "hi"]] and lines[0]["weight_versions"] == [VERSION]


@pytest.mark.looptime
async def test_partial_results_and_progress_are_seen_while_it_runs(tmp_path):
    player = Player(make_config(engine={"kind": "scripted"}, spec={"resource": {"concurrency": 1}}))
    async with jobs_in(tmp_path, player) as jobs:
        await jobs.submit(EvalRequest(n=2))
        await asyncio.sleep(2.5 * SECONDS)
        view = jobs.view("e0")
        assert view["status"] == "running" and view["progress"] == {"done": 2, "total": 4}
        found = {name: (figures["done"], figures["total"], figures["accuracy_all"]) for name, figures in view["results"].items()}
        assert found == {"words": (1, 2, 1.0), "hard": (1, 2, 0.0)}
        assert view["results"]["words"]["accuracy"] == 1.0 and view["valid"] is None


@pytest.mark.looptime
async def test_events_go_on_behind_the_last_one_that_was_seen(tmp_path):
    async with jobs_in(tmp_path) as jobs:
        await jobs.submit(EvalRequest(n=2))
        everything = await finished(jobs, "e0")
        for event in everything:
            rest = await jobs.events("e0", event["id"], 1.0)
            assert rest == [later for later in everything if later["id"] > event["id"]]
        assert await jobs.events("e0", 10**6, 1.0) == []


@pytest.mark.looptime
async def test_waiting_for_events_is_bounded_and_nothing_is_lost_by_it(tmp_path):
    async with jobs_in(tmp_path) as jobs:
        await jobs.submit(EvalRequest())
        begun = asyncio.get_running_loop().time()
        assert await jobs.events("e0", 0, 0.25) == []
        assert asyncio.get_running_loop().time() - begun == pytest.approx(0.25)
        assert [event["event"] for event in await finished(jobs, "e0")] == ["sample", "progress"] * 2 + ["done"]


@pytest.mark.looptime
async def test_a_restart_plays_only_what_is_missing(tmp_path):
    narrow = make_config(engine={"kind": "scripted"}, spec={"resource": {"concurrency": 1}})
    first, second = Player(narrow), Player(narrow)
    async with jobs_in(tmp_path, first) as jobs:
        await jobs.submit(EvalRequest(n=3, k=3))
        before = await jobs.events("e0", 0, 100.0)
        await asyncio.sleep(2.5 * SECONDS)
    with (tmp_path / "e0" / "samples.jsonl").open("a") as file:
        file.write('{"sample_id": "1.2", "ord')  # what a kill leaves
    assert json.loads((tmp_path / "e0" / "state.json").read_text())["status"] == "running"
    async with jobs_in(tmp_path, second) as jobs:
        events = await finished(jobs, "e0")
        view = jobs.view("e0")
    assert len(first.played) == 3 and not set(first.played) & set(second.played)
    assert sorted(first.played + second.played) == sorted(f"{ordinal}.{index}" for ordinal in (0, 1) for index in range(3))
    assert view["status"] == "done" and view["progress"] == {"done": 6, "total": 6}
    assert view["results"]["words"]["pass@k"] == {"3": 1.0} and view["weight_version"] == VERSION
    assert events[: len(before)] == before, "a restart tells the same story"
    async with jobs_in(tmp_path, Player()) as jobs:
        assert await finished(jobs, "e0") == events
        assert jobs.view("e0") == view


@pytest.mark.looptime
async def test_queued_jobs_keep_their_order_over_a_restart(tmp_path):
    async with jobs_in(tmp_path) as jobs:
        for seed in range(3):
            await jobs.submit(EvalRequest(seed=seed))
            await asyncio.sleep(0.1)
        assert [view["status"] for view in jobs.views()] == ["queued", "queued", "running"]
    async with jobs_in(tmp_path) as jobs:
        for name in ("e0", "e1", "e2"):
            await finished(jobs, name)
        ends = [jobs.view(name)["finished_at"] for name in ("e0", "e1", "e2")]
    assert ends == sorted(ends)


@pytest.mark.looptime
async def test_the_same_key_gives_the_same_job_and_another_body_is_refused(tmp_path):
    async with jobs_in(tmp_path) as jobs:
        one, two = await asyncio.gather(*(jobs.submit(EvalRequest(n=2), "key") for _ in range(2)))
        assert one["id"] == two["id"]
        with pytest.raises(RequestRefused, match="used for e0 with another body") as caught:
            await jobs.submit(EvalRequest(n=3), "key")
        assert caught.value.status == 409
    async with jobs_in(tmp_path) as jobs:
        assert (await jobs.submit(EvalRequest(n=2), "key"))["id"] == "e0", "a restart remembers keys"
        assert (await jobs.submit(EvalRequest(n=2)))["id"] == "e1"


@pytest.mark.looptime
async def test_a_full_queue_is_refused_with_a_time_to_come_back(tmp_path):
    async with jobs_in(tmp_path, running=1, waiting=2) as jobs:
        for seed in range(3):
            await jobs.submit(EvalRequest(seed=seed))
        with pytest.raises(RequestRefused) as caught:
            await jobs.submit(EvalRequest(seed=4))
        assert caught.value.status == 429 and caught.value.retry_after_s > 0
        await finished(jobs, "e0")
        await jobs.submit(EvalRequest(seed=4))


@pytest.mark.looptime
async def test_jobs_run_at_the_same_time_up_to_the_bound(tmp_path):
    async with jobs_in(tmp_path, running=2) as jobs:
        for seed in range(3):
            await jobs.submit(EvalRequest(seed=seed))
        await asyncio.sleep(SECONDS / 2)
        assert jobs.counts() == {"running": 2, "queued": 1}


@pytest.mark.looptime
async def test_a_running_job_is_cancelled_and_keeps_what_it_found(tmp_path):
    player = Player(make_config(engine={"kind": "scripted"}, spec={"resource": {"concurrency": 1}}))
    async with jobs_in(tmp_path, player) as jobs:
        await jobs.submit(EvalRequest(n=2))
        await jobs.submit(EvalRequest())
        await asyncio.sleep(1.5 * SECONDS)
        view = await jobs.cancel("e0")
        assert (view["status"], view["progress"]) == ("cancelled", {"done": 1, "total": 4})
        assert {name: (found["done"], found["total"]) for name, found in view["results"].items()} == {
            "words": (1, 2),
            "hard": (0, 2),
        }
        with pytest.raises(RequestRefused, match="is cancelled already") as caught:
            await jobs.cancel("e0")
        assert caught.value.status == 409
        assert (await finished(jobs, "e0"))[-1]["data"]["status"] == "cancelled"
        await finished(jobs, "e1")
        assert not (tmp_path / "e0" / "model").exists()
    async with jobs_in(tmp_path) as jobs:
        assert jobs.view("e0")["status"] == "cancelled" and jobs.view("e0")["results"] == view["results"]


@pytest.mark.looptime
async def test_a_queued_job_is_cancelled_before_it_began(tmp_path):
    player = Player()
    async with jobs_in(tmp_path, player) as jobs:
        await jobs.submit(EvalRequest(seed=1))
        await jobs.submit(EvalRequest(seed=2))
        assert (await jobs.cancel("e1"))["status"] == "cancelled"
        await finished(jobs, "e0")
        assert len(player.played) == 2


@pytest.mark.looptime
async def test_a_fault_ends_the_job_with_its_cause_and_the_next_one_begins(tmp_path):
    player = Player()
    player.fault, player.fault_after = ValueError("no more"), 1
    async with jobs_in(tmp_path, player) as jobs:
        await jobs.submit(EvalRequest())
        await jobs.submit(EvalRequest(seed=1))
        events = await finished(jobs, "e0")
        view = jobs.view("e0")
        assert view["status"] == "failed" and "no more" in view["error"]
        assert events[-1]["event"] == "error" and events[-1]["data"]["error"] == view["error"]
        player.fault = None
        assert (await finished(jobs, "e1"))[-1]["event"] == "done"


@pytest.mark.looptime
async def test_what_does_not_exist_is_said(tmp_path):
    async with jobs_in(tmp_path) as jobs:
        with pytest.raises(RequestRefused) as caught:
            jobs.view("e5")
        assert caught.value.status == 404
        with pytest.raises(RequestRefused) as caught:
            await jobs.submit(EvalRequest(model="other"))
        assert (caught.value.status, caught.value.param) == (404, "model")
        assert list(tmp_path.iterdir()) == [], "a refused job leaves nothing"


@pytest.mark.looptime
async def test_a_sample_is_read_with_its_conversation(tmp_path):
    async with jobs_in(tmp_path) as jobs:
        await jobs.submit(EvalRequest())
        await finished(jobs, "e0")
        sample = jobs.sample("e0", "1.0")
        assert (sample["reward"], sample["dataset"], sample["messages"]) == (0.0, "hard", [["user", "hi"]])
        with pytest.raises(RequestRefused):
            jobs.sample("e0", "9.9")


def test_the_plan_of_a_request_names_the_key_at_fault():
    from pipeline.fetcher.catalog import Catalog

    config = RunConfig.model_validate(
        {
            "student": {"architecture": {}},
            "algorithm": {"name": "grpo"},
            "datasets": {"words": {"generator": "spell_backward", "size": 200}, "other": {"generator": "leg_counting", "size": 50}},
            "eval": {"items": 5, "n": 2, "k": [1, 2]},
        }
    )
    catalog = Catalog(config)

    def planned(**body) -> Plan:
        return make_plan(EvalRequest.model_validate(body), config, catalog)

    whole = planned()
    assert [task.dataset for task in whole.tasks[:4]] == ["words", "other", "words", "other"] and whole.total == 20
    assert [(task.task_id, task.sampling) for task in whole.tasks] == [(t.task_id, t.sampling) for t in catalog.eval_tasks()]
    items = [{"prompt": "2 + 2?", "answer": "4", "verifier": "numeric"}, {"prompt": "say a", "answer": "a"}]
    mixed = planned(datasets=[{"name": "words", "limit": 7}, {"items": items}], n=1, sampling={"temperature": 0.5}, seed=3)
    assert [task.ordinal for task in mixed.tasks] == list(range(9)) and mixed.k == (1,)
    assert [task.verifier for task in mixed.tasks[-2:]] == ["numeric", "exact"] and mixed.tasks[-1].dataset == "inline"
    assert {task.sampling.temperature for task in mixed.tasks} == {0.5} and {task.seed for task in mixed.tasks} == {3}

    assert (planned(k=5).k, planned(k=5).total) == ((5,), 50), "as many samples as k needs"
    wrong = [
        (409, "k", {"n": 3, "k": 5}),
        (404, "datasets.0.name", {"datasets": [{"name": "word"}]}),
        (409, "datasets.1.name", {"datasets": [{"name": "words"}, {"name": "words"}]}),
        (404, "datasets.0.items.1.verifier", {"datasets": [{"items": [items[0], {"prompt": "x", "verifier": "os:system"}]}]}),
        (409, "datasets", {"n": 1024, "datasets": [{"items": [items[0]] * 100}]}),
    ]
    for status, key, body in wrong:
        with pytest.raises(RequestRefused) as caught:
            planned(**body)
        assert (caught.value.status, caught.value.param) == (status, key)
    for body in ({"datasets": [{"items": [{"prompt": "x"}]}]}, {"n": "2"}, {"k": True}, {"sampling": {"temperature": "1"}}):
        with pytest.raises(ValidationError):
            planned(**body)
