"""Failures of other processes, as they arrive here. No cluster: the calls are played."""

from __future__ import annotations

import asyncio
import pickle
from concurrent.futures import Future
from pathlib import Path

import pytest
from ray.exceptions import ActorDiedError, ActorUnavailableError, GetTimeoutError, RayTaskError, WorkerCrashedError

from deployments import calls
from deployments.calls import RemoteStage, RemoteWorker, node_call, unwrap
from deployments.multiplex import Answer, failure, pack
from pipeline.errors import EngineError, LateCommit, RemoteTraceback, StageFailed, abort_reason, root_cause


def remote(cause: Exception) -> RayTaskError:
    return RayTaskError("commit", "Traceback of the other process", cause)


def test_the_remotes_own_exception_arrives_with_its_traceback():
    error = unwrap(remote(LateCommit("attempt 1 is over")), "replay_buffer")
    assert isinstance(error, LateCommit) and str(error) == "attempt 1 is over"
    assert isinstance(error.__cause__, RemoteTraceback)
    assert root_cause(error) == "LateCommit: attempt 1 is over"


def test_also_when_ray_has_given_it_a_second_type():
    error = unwrap(remote(EngineError("no memory")).as_instanceof_cause(), "trainer")
    assert type(error) is EngineError and str(error) == "no memory"


def test_a_failure_through_two_processes_is_the_first_ones():
    inner = remote(StageFailed("trainer", "no memory"))
    error = unwrap(remote(inner), "evaluator_pool")
    assert isinstance(error, StageFailed) and str(error) == "stage trainer: no memory"


def test_an_exception_that_cannot_travel_is_named_by_its_last_line():
    lost = RayTaskError("train", "ray::train()\n  File x, line 1\nmodule.Odd: no memory", None)
    lost.cause = None
    error = unwrap(lost, "trainer")
    assert isinstance(error, StageFailed) and str(error) == "stage trainer: module.Odd: no memory"


@pytest.mark.parametrize(
    "death", [ActorDiedError(), ActorUnavailableError("gone", None), WorkerCrashedError()], ids=lambda death: type(death).__name__
)
def test_a_lost_process_is_a_lost_connection(death):
    error = unwrap(death, "fetcher")
    assert isinstance(error, ConnectionError) and str(error).startswith("fetcher died or cannot be reached")
    assert abort_reason(error) == "infra_conn"
    assert len(str(error).splitlines()) == 1


def test_an_error_of_this_process_stays_what_it_is():
    error = ValueError("x")
    assert unwrap(error, "fetcher") is error


class Method:
    """`handle.method.remote(...)`: what happens is played by `results`, one a call; a Future is kept waiting."""

    def __init__(self, *results) -> None:
        self.results, self.calls = list(results), []

    def remote(self, *args, **kwargs):
        self.calls.append((args, kwargs))
        result = self.results.pop(0) if len(self.results) > 1 else self.results[0]
        return Reference(result)


class Reference:
    def __init__(self, result) -> None:
        self.result = result

    def future(self) -> Future:
        future: Future = Future()
        if isinstance(self.result, Exception):
            future.set_exception(self.result)
        elif self.result is not ...:
            future.set_result(self.result)
        return future


class Handle:
    def __init__(self, **methods: Method) -> None:
        self.__dict__.update(methods)


def stage(handle: Handle, name: str = "fetcher", deadline_s: float = 60.0) -> RemoteStage:
    """Through Ray alone, if the handle names no other way."""
    made = RemoteStage("r", name, deadline_s)
    made._handle = handle
    handle.__dict__.setdefault("channel", Method(Path("/nowhere")))
    return made


async def test_a_call_returns_what_the_stage_returned():
    handle = Handle(answer=Method([Answer(0, [1, 2])]))
    assert await stage(handle).tasks([3], key=4) == [1, 2]
    assert handle.answer.calls == [(([("tasks", ([3],), {"key": 4})],), {})]


async def test_calls_of_one_moment_are_one_request_and_fail_each_for_itself():
    handle = Handle(answer=Method([failure(1, LateCommit("over")), Answer(0, "kept")]))
    buffer = stage(handle)
    kept, refused = await asyncio.gather(buffer.commit(1), buffer.commit(2), return_exceptions=True)
    assert kept == "kept" and isinstance(refused, LateCommit)
    assert "LateCommit: over" in str(refused.__cause__)
    assert len(handle.answer.calls) == 1


@pytest.mark.looptime
async def test_a_call_that_waits_for_a_change_holds_up_none_that_is_made_with_it():
    handle = Handle(answer=Method([Answer(0, [7])], ..., ...))
    buffer = stage(handle, deadline_s=1.0)
    calls = (buffer.backlog("teacher", 8), buffer.wait_scored(1, 60.0), buffer.wait_selection(1, 60.0))
    found = await asyncio.gather(*calls, return_exceptions=True)
    assert found[0] == [7] and [type(each) for each in found[1:]] == [TimeoutError, TimeoutError]
    assert [[method for method, _, _ in request] for ((request,), _) in handle.answer.calls] == [
        ["backlog"], ["wait_scored"], ["wait_selection"],
    ]  # fmt: skip


async def test_a_call_raises_what_the_whole_request_met():
    with pytest.raises(ConnectionError, match="fetcher died"):
        await stage(Handle(answer=Method(ActorDiedError()))).commit()


@pytest.mark.looptime
async def test_a_call_that_is_not_answered_ends_and_names_stage_method_and_deadline():
    with pytest.raises(TimeoutError, match=r"fetcher\.tasks did not answer within 60 s"):
        await stage(Handle(answer=Method(...))).tasks()
    assert asyncio.get_running_loop().time() == pytest.approx(60)


def test_names_of_the_interpreter_are_no_calls():
    with pytest.raises(AttributeError):
        stage(Handle()).__deepcopy__  # noqa: B018


class Stream:
    """Answers of a worker, one request's; a Future-like `...` never comes."""

    def __init__(self, *parts) -> None:
        self.parts = list(parts)

    def options(self, **_):
        return self

    def remote(self, calls):
        self.calls = calls
        return self

    def __aiter__(self):
        return self

    async def __anext__(self):
        if not self.parts:
            raise StopAsyncIteration
        part = self.parts.pop(0)
        if part is ...:
            await asyncio.Event().wait()
        if isinstance(part, Exception):
            raise part
        return _ready(pack(part))


async def _ready(part):
    return part


def worker(stream: Stream, pings: Method | None = None) -> RemoteWorker:
    made = RemoteWorker("r", "evaluator_worker_0", "local")
    made._stage = stage(Handle(play_all=stream, ping=pings or Method(1)), "evaluator_worker_0")
    return made


async def test_groups_go_to_a_worker_together_and_come_back_one_by_one():
    stream = Stream([Answer(1, ["b"])], [failure(0, EngineError("no memory"))])
    client = worker(stream)
    first, second = await asyncio.gather(client.run_samples("task 0"), client.run_samples("task 1"), return_exceptions=True)
    assert isinstance(first, EngineError) and second == ["b"]
    assert pickle.loads(stream.calls) == [("task 0", "student"), ("task 1", "student")]


@pytest.mark.looptime
async def test_a_worker_is_waited_for_as_long_as_it_answers_pings():
    with pytest.raises(RuntimeError):
        await worker(Stream(...), Method(1, 1, 1, remote(RuntimeError("x")))).run_samples()
    assert asyncio.get_running_loop().time() == pytest.approx(4 * calls.PING_S)


@pytest.mark.looptime
async def test_a_worker_that_answers_no_ping_is_gone():
    with pytest.raises(ConnectionError, match="worker local does not answer"):
        await worker(Stream(...), Method(...)).run_samples()


async def test_a_worker_that_died_is_a_lost_connection_for_every_call_that_is_left():
    client = worker(Stream([Answer(0, ["a"])], ActorDiedError()))
    first, second = await asyncio.gather(client.run_samples(), client.run_samples(), return_exceptions=True)
    assert first == ["a"]
    assert isinstance(second, ConnectionError) and str(second).startswith("evaluator_worker_0 died")


class PlayedRay:
    """`ray.get` of a node's call: `slow` time-outs before it is answered; `pings`: what each ping meets."""

    def __init__(self, handle: Handle, slow: int, result, pings) -> None:
        self.handle, self.slow, self.result, self.pings = handle, slow, result, list(pings)

    def get_actor(self, name: str, namespace: str) -> Handle:
        assert name == "r:trainer"
        return self.handle

    def get(self, reference: Reference, timeout: float):
        if reference.result == "ping":
            answered = self.pings.pop(0)
            if not answered:
                raise GetTimeoutError
            return 1
        if self.slow:
            self.slow -= 1
            raise GetTimeoutError
        if isinstance(self.result, Exception):
            raise self.result
        return self.result


def node(monkeypatch, slow: int, result, pings=()):
    handle = Handle(node=Method("node"), ping=Method("ping"))
    monkeypatch.setattr(calls, "ray", PlayedRay(handle, slow, result, pings))
    return node_call("r", "trainer", "train[1]", "train", 1)


def test_a_nodes_work_may_take_long_as_long_as_its_stage_answers_pings(monkeypatch):
    answers = [True, False, False, False, False, False] * 5
    assert node(monkeypatch, len(answers), {"step": 1}, answers) == {"step": 1}


def test_a_stage_that_answers_no_ping_fails_the_node(monkeypatch):
    with pytest.raises(StageFailed, match=r"stage trainer: no answer to 6 pings of 10 s during train"):
        node(monkeypatch, 99, None, [True, *[False] * 6])


def test_a_failing_node_raises_the_stages_own_exception(monkeypatch):
    with pytest.raises(StageFailed, match="stage trainer: no memory") as caught:
        node(monkeypatch, 0, remote(StageFailed("trainer", "no memory")))
    assert root_cause(caught.value) == "StageFailed: stage trainer: no memory"
