"""The service as the README shows it: every command of that section, and then SIGKILL of all of it, and a start that goes on.

One run and one server serve all tests of this module.
"""

from __future__ import annotations

import json
import re
import shlex
import signal
import socket
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest
import yaml

from deployments.names import temporary_folder
from pipeline.paths import SharedPaths
from tests.e2e.program import Command, Program, adds_up, status, wait_for

HERE = Path(__file__).parent
README = (HERE.parent.parent / "README.md").read_text()
README_ADDRESS = "localhost:8000"
READY_S, DONE_S, STOPPED_S = 60.0, 90.0, 30.0
STEPS = 20
ERROR = '{"error":'


class Served:
    """A run that was killed in the middle, and the service of its student."""

    def __init__(self, program: Program) -> None:
        self.program, self.paths = program, program.run("r1")
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            self.port = probe.getsockname()[1]
        self.client = httpx.Client(base_url=f"http://localhost:{self.port}", timeout=30)

    def serve(self, words: list[str]) -> Command:
        """Returns when it is ready."""
        self.command = self.program.start(*words[1:], f"port={self.port}", command=words[0])
        wait_for(lambda: self.healthy(), READY_S, "the service", self.command)
        return self.command

    def ensure(self) -> None:
        """Whichever test comes first starts it."""
        if not self.healthy():
            self.serve(["serve", "run", "deployments:app", "run_id=r1"])

    def healthy(self) -> bool:
        try:
            return self.client.get("/healthz").status_code == 200
        except httpx.TransportError:
            return False

    def read(self, path: str) -> dict:
        response = self.client.get(path)
        assert response.status_code == 200, response.text
        return response.json()

    def samples(self, name: str) -> list[str]:
        return (self.program.runs / ".evals" / name / "samples.jsonl").read_text().splitlines()


@pytest.fixture(scope="module")
def served(shared_rollout) -> Iterator[Served]:
    made = Served(shared_rollout)
    training = shared_rollout.start("run", HERE / "served" / "run.yaml", f"trainer.steps={STEPS}", "--run-id", "r1")
    wait_for((made.paths.checkpoint(10) / "manifest.json").exists, DONE_S, "the first checkpoint", training)
    shared_rollout.kill_all()
    assert status(made.paths)["step"] < STEPS, "it was stopped in the middle"
    with made.client:
        yield made


def transcript(text: str) -> list[tuple[str, str]]:
    """(command, reply) of the section about the service. A command goes on until its quotes are closed."""
    section = text.partition("\n## Serve\n")[2].partition("\n## ")[0]
    lines = [line for block in re.findall(r"```\n(.*?)```", section, re.DOTALL) for line in block.splitlines()]
    found: list[tuple[str, str]] = []
    for line in lines:
        if line.startswith("$ "):
            found.append((line.removeprefix("$ "), ""))
        elif found[-1][0].count("'") % 2:
            found[-1] = (f"{found[-1][0]}\n{line}", "")
        else:
            found[-1] = (found[-1][0], f"{found[-1][1]}{line}\n")
    return found


def keys(reply: str) -> set[str]:
    return set(re.findall(r'"([^"]+)":', reply))


def test_every_command_of_the_readme_does_what_it_says(served):
    start, *commands = transcript(README)
    assert start[0].startswith("serve run ") and len(commands) >= 8
    served.serve(shlex.split(start[0]))
    given: dict[str, str] = {}
    for written, reply in commands:
        command = written.replace(README_ADDRESS, f"localhost:{served.port}")
        for name, real in given.items():
            command = command.replace(name, real)
        done = served.program.call("-c", command, command="bash")
        assert done.code == 0 and not done.out.startswith(ERROR), (command, done)
        assert keys(reply) <= keys(done.out), (command, done.out)
        for name in re.findall(r'"id":"(eval-[^"]+)"', reply):
            given[name] = json.loads(done.out)["id"]
    assert len(given) == 2


LM_EVAL_TASKS = {
    "says": {
        "output_type": "generate_until",
        "doc_to_target": "{{answer}}",
        "generation_kwargs": {"until": ["\n"], "max_gen_toks": 6, "temperature": 0.0},
        "metric_list": [{"metric": "exact_match"}],
    },
    "chooses": {
        "output_type": "multiple_choice",
        "doc_to_choice": "{{[answer, 'say']}}",
        "doc_to_target": 0,
        "metric_list": [{"metric": "acc"}],
    },
}


def test_lm_eval_works_with_the_live_student(served, tmp_path, monkeypatch):
    pytest.importorskip("lm_eval", reason="lm-eval did not run: it is in the extra `clients`")
    monkeypatch.setenv("HF_HOME", str(tmp_path / "hub"))
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    served.ensure()
    rows = [{"prompt": f"say {number}", "answer": str(number)} for number in range(5)]
    data = tmp_path / "rows.jsonl"
    data.write_text("\n".join(map(json.dumps, rows)))
    for name, parts in LM_EVAL_TASKS.items():
        source = {"dataset_path": "json", "dataset_kwargs": {"data_files": {"test": str(data)}}, "test_split": "test"}
        task = {"task": name, "doc_to_text": "{{prompt}}", "target_delimiter": "", **source, **parts}
        (tmp_path / f"{name}.yaml").write_text(yaml.safe_dump(task))
    model = {
        "model": "live",
        "base_url": f"http://localhost:{served.port}/v1/completions",
        "tokenizer": served.paths.checkpoint(10),
        "max_length": 64,
    }
    arguments = ",".join(f"{key}={value}" for key, value in model.items())
    where = ["--include_path", tmp_path, "--output_path", tmp_path / "found"]
    tasks = ["--tasks", ",".join(LM_EVAL_TASKS), "--log_samples", *where]
    done = served.program.call("--model", "local-completions", "--model_args", arguments, *tasks, command="lm_eval", timeout_s=120)
    assert done.code == 0, done
    found = {name: lm_eval_samples(tmp_path / "found", name) for name in LM_EVAL_TASKS}
    assert {name: len(samples) for name, samples in found.items()} == {"says": 5, "chooses": 5}
    for sample in found["says"]:
        asked = {"prompt": sample["doc"]["prompt"], "max_tokens": 6, "temperature": 0, "stop": "\n"}
        assert sample["resps"][0][0] == completion(served, asked)["text"]
    for sample in found["chooses"]:
        for asked, (answered,) in zip(sample["arguments"].values(), sample["resps"], strict=True):
            assert float(answered[0]) == pytest.approx(loglikelihood(served, asked["arg_0"], asked["arg_1"]), abs=1e-4)


def loglikelihood(served: Served, prompt: str, answer: str) -> float:
    echoed = completion(served, {"prompt": prompt + answer, "max_tokens": 0, "echo": True, "logprobs": 1})["logprobs"]
    values = zip(echoed["token_logprobs"], echoed["text_offset"], strict=True)
    return sum(value for value, place in values if place >= len(prompt))


def test_everything_is_killed_and_goes_on(served):
    served.ensure()
    items = [{"prompt": f"say {number}", "verifier": "patience:patient"} for number in range(40)]
    asked = {"datasets": [{"name": "asked", "items": items}], "seed": 3}
    headers = {"idempotency-key": "asked once"}
    name = served.client.post("/v1/evals", json=asked, headers=headers).json()["id"]
    wait_for(lambda: served.read(f"/v1/evals/{name}")["progress"]["done"] >= 8, DONE_S, "some samples")
    served.program.kill_all()
    left = served.samples(name)
    assert 8 <= len(left) < len(items) and status(served.paths)["state"] == "running"

    served.serve(["serve", "run", "deployments:app", "run_id=r1", "resume=true"])
    assert served.client.post("/v1/evals", json=asked, headers=headers).json()["id"] == name
    wait_for(lambda: served.read(f"/v1/evals/{name}")["status"] == "done", DONE_S, "the evaluation")
    view = served.read(f"/v1/evals/{name}")
    assert view["progress"] == {"done": 40, "total": 40} and view["results"]["asked"]["accuracy"] == 1.0
    lines = served.samples(name)
    assert lines[: len(left)] == left, "what was there was not played again"
    assert sorted(json.loads(line)["ordinal"] for line in lines) == list(range(40))

    wait_for(lambda: served.read("/v1/runs/r1")["status"] == "finished", DONE_S, "the rest of the training")
    found = status(served.paths)
    assert found["step"] == STEPS and adds_up(found) and found["attempts"]["regenerated"] == 0
    assert completion(served, {"prompt": "say 1"})["weight_version"] == STEPS, "the newest weights are live"


def test_a_service_whose_ray_has_died_comes_back_by_itself(served):
    served.ensure()
    items = [{"prompt": f"say {number}", "verifier": "patience:patient"} for number in range(40)]
    name = served.client.post("/v1/evals", json={"datasets": [{"name": "outlives", "items": items}], "seed": 4}).json()["id"]
    wait_for(lambda: served.read(f"/v1/evals/{name}")["progress"]["done"] >= 8, DONE_S, "some samples")
    served.program.kill(served.program.find("gcs_server"))
    wait_for(lambda: not served.healthy(), READY_S, "its end", served.command)
    wait_for(served.healthy, READY_S, "its return", served.command)
    wait_for(lambda: served.read(f"/v1/evals/{name}")["status"] == "done", DONE_S, "the evaluation")
    assert sorted(json.loads(line)["ordinal"] for line in served.samples(name)) == list(range(40))
    assert "is started again" in served.command.said().err


def test_a_service_that_is_told_to_stop_leaves_nothing_behind(served):
    served.ensure()
    items = [{"prompt": f"say {number}", "verifier": "patience:patient"} for number in range(2000)]
    name = served.client.post("/v1/evals", json={"datasets": [{"name": "stopped", "items": items}]}).json()["id"]
    wait_for(lambda: served.read(f"/v1/evals/{name}")["progress"]["done"] >= 1, DONE_S, "some samples")
    served.command.send_all(signal.SIGTERM)
    done = served.command.done(timeout_s=STOPPED_S)
    assert done.code == 0 and "Traceback" not in done.err and "Abort" not in done.err, done
    wait_for(lambda: not served.program.processes(), STOPPED_S, "the end of all processes")
    assert not temporary_folder(SharedPaths(served.program.runs).service).exists()
    state = json.loads((served.program.runs / ".evals" / name / "state.json").read_text())
    assert state["status"] == "running", "more than is played while the service ends"


def completion(served: Served, asked: dict) -> dict:
    response = served.client.post("/v1/completions", json=asked)
    assert response.status_code == 200, response.text
    reply = response.json()
    return reply["choices"][0] | {"weight_version": int(reply["system_fingerprint"].removeprefix("weights-"))}


def lm_eval_samples(folder: Path, task: str) -> list[dict]:
    (file,) = folder.rglob(f"samples_{task}_*.jsonl")
    return [json.loads(line) for line in file.read_text().splitlines()]
