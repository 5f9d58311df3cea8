"""The service on one real Ray: clients, kills of each replica, and a restart of the application."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import socket
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import httpx
import openai
import psutil
import pytest
import yaml

ALL_HELD_OUT = {"held_out": [0, 1, 2, 3, 4]}
CONFIG = {
    "run": {"ray": {"num_cpus": 2}},
    "student": {"architecture": {"hidden": 16, "layers": 1, "heads": 2, "mlp": 16, "max_positions": 64}},
    "algorithm": {"name": "grpo"},
    "datasets": {
        "words": {"generator": "spell_backward", "size": 300, "sampling": {"max_tokens": 8}},
        "slow": {"source": "jsonl", "path": "slow.jsonl", "verifier": "patience:patient", "split": ALL_HELD_OUT, "train": False},
    },
    "specs": [{"resource": {"concurrency": 4}}],
    "engine": {"slots": 16, "call_timeout_s": 60},
    "eval": {"items": 40},
}  # fmt: skip
PATIENCE = "import time\n\n\ndef patient(task, text):\n    time.sleep(0.1)\n    return 1.0\n"
WAIT_S = 30.0


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


class Service:
    def __init__(self, folder: Path) -> None:
        rows = [{"prompt": f"say {n}", "answer": str(n)} for n in range(24)]
        (folder / "slow.jsonl").write_text("\n".join(map(json.dumps, rows)))
        (folder / "patience.py").write_text(PATIENCE)
        self.config = folder / "c.yaml"
        self.config.write_text(yaml.safe_dump(CONFIG))
        self.runs = folder / "runs"
        self.arguments = {"config": str(self.config), "runs_dir": str(self.runs), "port": str(free_port())}
        self.url = f"http://127.0.0.1:{self.arguments['port']}"
        self.client = httpx.Client(base_url=self.url, timeout=60)

    def deploy(self) -> None:
        from ray import serve

        from deployments import app

        serve.run(app(self.arguments), name="default", route_prefix="/")

    def submit(self, **body) -> str:
        response = self.client.post("/v1/evals", json=body)
        assert response.status_code == 202, response.text
        return response.json()["id"]

    def view(self, name: str) -> dict:
        response = self.client.get(f"/v1/evals/{name}")
        assert response.status_code == 200, response.text
        return response.json()

    def wait(self, name: str, reached: Callable[[dict], bool]) -> dict:
        deadline = time.monotonic() + WAIT_S
        while time.monotonic() < deadline:
            view = self.view(name)
            if reached(view):
                return view
            time.sleep(0.05)
        raise AssertionError(f"not reached within {WAIT_S} s: {view}")

    def done(self, name: str) -> dict:
        return self.wait(name, lambda view: view["status"] in ("done", "failed", "cancelled"))

    def lines(self, name: str) -> list[dict]:
        return [json.loads(line) for line in (self.runs / ".evals" / name / "samples.jsonl").read_text().splitlines()]


@pytest.fixture(scope="module")
def service(tmp_path_factory):
    from ray import serve

    from deployments import cluster
    from deployments.application import claim, start_ray
    from pipeline.service.arguments import parse_arguments, settle

    made = Service(tmp_path_factory.mktemp("service"))
    settings = settle(parse_arguments(made.arguments))
    lock = claim(settings)
    start_ray(settings)
    try:
        made.deploy()
        yield made
    finally:
        made.client.close()
        serve.shutdown()
        cluster.stop(settings.runs.service)
        lock.release()


def replica(name: str) -> int:
    """Pid of the one replica of a deployment."""
    title = f"ServeReplica:default:{name}"
    found = [child.pid for child in psutil.Process().children(recursive=True) if title in " ".join(_title(child))]
    assert len(found) == 1, f"{title}: {found}"
    return found[0]


def _title(process: psutil.Process) -> list[str]:
    try:
        return process.cmdline()
    except psutil.NoSuchProcess:
        return []


def everyone_once(service: Service, name: str, ordinals: int, n: int) -> None:
    counted = Counter((line["ordinal"], line["index"]) for line in service.lines(name))
    assert counted == {(ordinal, index): 1 for ordinal in range(ordinals) for index in range(n)}


def test_the_live_student_answers(service):
    assert service.client.get("/healthz").json() == {"status": "ok", "model": "live", "weight_version": 0}
    assert [model["id"] for model in service.client.get("/v1/models").json()["data"]] == ["live"]
    body = {"prompt": "abc", "max_tokens": 5, "seed": 7, "n": 3, "return_token_ids": True}
    one, two = (service.client.post("/v1/completions", json=body).json()["choices"] for _ in range(2))
    assert one == two and len({tuple(choice["token_ids"]) for choice in one}) > 1
    scored = {"prompt": "abc", "max_tokens": 0, "echo": True, "logprobs": 3}
    logprobs = service.client.post("/v1/completions", json=scored).json()["choices"][0]["logprobs"]
    assert logprobs["token_logprobs"][0] is None and all(value < 0 for value in logprobs["token_logprobs"][1:])


@pytest.fixture(scope="module")
def official(service):
    with openai.OpenAI(base_url=f"{service.url}/v1", api_key="none", max_retries=0) as client:
        yield client


def test_the_official_client_completes(official):
    asked = {"model": "live", "prompt": ["ab", "cd"], "max_tokens": 6, "n": 2, "seed": 1}
    made = official.completions.create(**asked, logprobs=2)
    assert [choice.index for choice in made.choices] == [0, 1, 2, 3] and len({choice.text for choice in made.choices}) > 1
    assert made.usage.completion_tokens == sum(len(choice.logprobs.tokens) for choice in made.choices)
    assert (made.usage.prompt_tokens, made.system_fingerprint) == (4, "weights-0")
    again = official.completions.create(**asked)
    assert [choice.text for choice in again.choices] == [choice.text for choice in made.choices]

    parts = list(official.completions.create(**asked, stream=True, stream_options={"include_usage": True}))
    said = [[choice.text for part in parts for choice in part.choices if choice.index == index] for index in range(4)]
    assert ["".join(texts) for texts in said] == [choice.text for choice in made.choices] and parts[-1].usage == made.usage
    assert max(len(text) for texts in said for text in texts) == 1, "a token of this student is a letter, and a chunk"


def test_a_client_that_leaves_its_stream_frees_the_engine(service, official):
    asked = {"model": "live", "prompt": ["ab"] * 4, "max_tokens": 60, "n": 128, "seed": 2}
    whole = official.completions.create(**asked).usage.completion_tokens
    before = generated(service)
    with official.completions.create(**asked, stream=True) as stream:
        assert next(iter(stream)).choices
    made = generated(service) - before
    assert 0 < made < whole / 2 and generated(service) - before == made, "it goes on for nobody"


def generated(service) -> float:
    """Tokens by now: the service asks its engine once a second."""
    time.sleep(1.1)
    return metric(service, "engine_generated_tokens")


def metric(service, name: str) -> float:
    (line,) = [line for line in service.client.get("/metrics").text.splitlines() if line.startswith(f"rollout_{name} ")]
    return float(line.split()[1])


def test_the_official_client_reads_scores_and_stops(official):
    echoed = official.completions.create(model="live", prompt="cab", max_tokens=1, echo=True, logprobs=1).choices[0]
    assert echoed.text.startswith("cab") and echoed.logprobs.text_offset[:3] == [0, 1, 2]
    assert echoed.logprobs.token_logprobs[0] is None and all(value < 0 for value in echoed.logprobs.token_logprobs[1:])
    assert all(value <= max(top.values()) for value, top in list(zip(*scores(echoed), strict=True))[1:])
    whole = official.completions.create(model="live", prompt="cab", max_tokens=30, seed=3).choices[0].text
    stop = whole[len(whole) // 2]
    cut = official.completions.create(model="live", prompt="cab", max_tokens=30, seed=3, stop=[stop]).choices[0]
    assert (cut.text, cut.finish_reason) == (whole[: whole.index(stop)], "stop")


def scores(choice) -> tuple[list, list]:
    return choice.logprobs.token_logprobs, choice.logprobs.top_logprobs


def test_the_official_client_chats(official):
    asked = {"model": "live", "messages": [{"role": "user", "content": "abc"}], "seed": 1, "max_completion_tokens": 4}
    chat = official.chat.completions.create(**asked, n=2, logprobs=True, top_logprobs=2)
    assert len(chat.choices) == 2 and chat.usage.completion_tokens == sum(len(c.logprobs.content) for c in chat.choices)
    assert {len(entry.top_logprobs) for choice in chat.choices for entry in choice.logprobs.content} == {2}
    parts = list(official.chat.completions.create(**asked, stream=True, stream_options={"include_usage": True}))
    assert "".join(part.choices[0].delta.content or "" for part in parts[:-1]) == chat.choices[0].message.content
    assert parts[-2].choices[0].finish_reason == chat.choices[0].finish_reason
    assert parts[-1].choices == [] and parts[-1].usage.prompt_tokens == chat.usage.prompt_tokens
    assert [model.id for model in official.models.list()] == ["live"]


def test_the_official_client_raises_its_own_exceptions(official):
    with pytest.raises(openai.NotFoundError) as caught:
        official.completions.create(model="other", prompt="a")
    assert caught.value.code == "model_not_found" and caught.value.param == "model"
    assert caught.value.request_id == caught.value.body["request_id"]
    for asked, code in [({"prompt": "a" * 500}, "context_length_exceeded"), ({"prompt": "a", "n": 0}, "invalid_request")]:
        with pytest.raises(openai.BadRequestError) as caught:
            official.completions.create(model="live", **asked)
        assert caught.value.code == code


def test_the_page_and_its_parts_are_there(service):
    page, part = service.client.get("/"), service.client.get("/dashboard/main.js")
    assert page.headers["content-type"].startswith("text/html") and part.status_code == 200 and "/v1/runs" in part.text
    view = service.done(service.submit(datasets=[{"name": "words", "limit": 3}]))
    file = service.client.get(view["artefacts"]["samples.jsonl"])
    rest = service.client.get(view["artefacts"]["samples.jsonl"], headers={"range": "bytes=10-"})
    assert (rest.status_code, rest.text) == (206, file.text[10:])


def test_an_evaluation_over_http_says_what_rollout_eval_says(service, capsys):
    from pipeline.cli.main import run

    view = service.done(service.submit(datasets=[{"name": "words"}], n=2, k=[1, 2], sampling={"temperature": 1.0}))
    assert view["status"] == "done" and view["progress"] == {"done": 80, "total": 80} and view["valid"] is True
    (student,) = (folder for folder in (service.runs / ".cache" / "students").iterdir() if not folder.name.startswith("."))
    overrides = ["eval.n=2", "eval.k=[1,2]", "eval.temperature=1.0", "datasets.slow.evaluate=false"]
    capsys.readouterr()
    assert run(["eval", str(student), str(service.config), *overrides, "--json", "--runs-dir", str(service.runs)]) == 0
    found = json.loads(capsys.readouterr().out)["results"]["words"]
    assert view["results"]["words"] == {key: (found | {"done": 80})[key] for key in view["results"]["words"]}


@pytest.mark.fault(34)
def test_a_client_that_goes_away_does_not_end_its_evaluation(service):
    name = service.submit(datasets=[{"name": "slow"}])
    with service.client.stream("GET", f"/v1/evals/{name}/events") as response:
        events = []
        for line in response.iter_lines():
            events += [line] if line.startswith("id: ") else []
            if len(events) == 4:
                break
    assert service.view(name)["status"] == "running"
    view = service.done(name)
    assert view["status"] == "done" and view["results"]["slow"]["accuracy"] == 1.0
    everyone_once(service, name, 24, 1)
    rest = service.client.get(f"/v1/evals/{name}/events", headers={"last-event-id": "4"}).text
    assert "id: 5\n" in rest and "id: 4\n" not in rest and "event: done" in rest


def test_requests_and_evaluations_outlive_the_engine_that_played_them(service):
    name = service.submit(datasets=[{"name": "slow"}])
    service.wait(name, lambda view: view["progress"]["done"] >= 4)

    async def ask() -> list[httpx.Response]:
        async with httpx.AsyncClient(base_url=service.url, timeout=60) as client:
            body = {"prompt": "abc", "max_tokens": 60, "seed": 3, "n": 16}
            bodies = [body | {"stream": True}] + [body] * 8
            asked = [asyncio.create_task(client.post("/v1/completions", json=body)) for body in bodies]
            await asyncio.sleep(0.05)
            os.kill(replica("Models"), signal.SIGKILL)
            return await asyncio.gather(*asked)

    streamed, *replies = asyncio.run(ask())
    assert [reply.status_code for reply in replies] == [200] * 8, [reply.text for reply in replies if reply.status_code != 200]
    assert len({json.dumps([choice["text"] for choice in reply.json()["choices"]]) for reply in replies}) == 1
    assert said(streamed.text) == [choice["text"] for choice in replies[0].json()["choices"]], "a stream goes on where it was"
    view = service.done(name)
    assert view["status"] == "done" and view["results"]["slow"]["scored"] == 24, view
    everyone_once(service, name, 24, 1)


def said(stream: str) -> list[str]:
    """The texts of a stream's choices."""
    chunks = [json.loads(line[6:]) for line in stream.splitlines() if line.startswith("data: {")]
    texts: dict[int, str] = {}
    for choice in (choice for chunk in chunks for choice in chunk["choices"]):
        texts[choice["index"]] = texts.get(choice["index"], "") + choice["text"]
    return [texts[index] for index in sorted(texts)]


def test_evaluations_outlive_the_replica_that_plays_them(service):
    name, queued = service.submit(datasets=[{"name": "slow"}], seed=1), service.submit(datasets=[{"name": "slow", "limit": 2}])
    service.wait(name, lambda view: view["progress"]["done"] >= 4)
    os.kill(replica("Evaluations"), signal.SIGKILL)
    views = [service.done(name), service.done(queued)]
    assert [view["status"] for view in views] == ["done", "done"]
    everyone_once(service, name, 24, 1)


def test_evaluations_go_on_after_a_restart(service):
    from ray import serve

    name = service.submit(datasets=[{"name": "slow"}], seed=2)
    seen = service.wait(name, lambda view: view["progress"]["done"] >= 4)["progress"]["done"]
    serve.delete("default")
    left = len(service.lines(name))
    assert seen <= left < 24
    assert json.loads((service.runs / ".evals" / name / "state.json").read_text())["status"] == "running"
    service.deploy()
    view = service.done(name)
    assert view["status"] == "done" and view["results"]["slow"]["total"] == 24
    everyone_once(service, name, 24, 1)


def test_what_is_wrong_with_the_arguments_is_one_line(capsys):
    from deployments import app

    for arguments, line in [
        ({"prot": "1"}, "error: deployments:app: unknown key prot; did you mean port?\n"),
        ({"host": "0.0.0.0"}, "error: host '0.0.0.0' is not loopback"),
        ({"run_id": "no-such-run"}, "error: no run 'no-such-run'"),
    ]:
        with pytest.raises(SystemExit) as caught:
            app(arguments)
        said = capsys.readouterr().err
        assert caught.value.code == 2 and said.startswith(line) and said.count("\n") == 1


def test_the_package_is_light():
    import subprocess
    import sys

    script = "import sys, deployments; assert not {'ray', 'torch', 'fastapi'} & set(sys.modules), sys.modules.keys()"
    assert subprocess.run([sys.executable, "-c", script], timeout=60).returncode == 0
