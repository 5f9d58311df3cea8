"""The service under load, and how fast it evaluates. Both print what they saw."""

from __future__ import annotations

import asyncio
import json
import statistics
import time
from collections import Counter
from pathlib import Path

import httpx
import psutil
import pytest

from tests.e2e.program import Program
from tests.e2e.test_service import Served

CONFIG = Path(__file__).parent / "served" / "run.yaml"
CLIENTS, SECONDS, WARM_S = 200, 60.0, 20.0
ANSWERED_OR_LATER = {200, 429}
GROWTH = 1.1
QUICKSTART = Path(__file__).parent.parent.parent / "configs" / "quickstart.yaml"
ITEMS, EACH, WARM_ROUNDS, ROUNDS, SHARE = 100, 2, 3, 5, 0.9
"""Share: of the throughput of `rollout eval`."""


def memory_mb(program: Program) -> float:
    """Unshared, of everything that the service is made of."""
    total = 0
    for process in program.processes():
        try:
            total += process.memory_full_info().uss
        except psutil.Error:
            continue
    return total / 2**20


async def client(address: str, number: int, until: float, statuses: Counter, seconds: list[float]) -> None:
    """One that asks again as soon as it is answered, and waits as long as it is told to."""
    asked = {"messages": [{"role": "user", "content": f"say {number}"}], "max_tokens": 8, "seed": number}
    async with httpx.AsyncClient(base_url=address, timeout=60) as session:
        while time.monotonic() < until:
            began = time.monotonic()
            response = await session.post("/v1/chat/completions", json=asked)
            statuses[response.status_code] += 1
            if response.status_code == 200:
                seconds.append(time.monotonic() - began)
            else:
                await asyncio.sleep(min(float(response.headers["retry-after"]), max(0.0, until - time.monotonic())))


async def load(program: Program, address: str) -> dict:
    statuses, seconds, until = Counter(), [], time.monotonic() + SECONDS
    clients = [asyncio.create_task(client(address, number, until, statuses, seconds)) for number in range(CLIENTS)]
    await asyncio.sleep(WARM_S)
    warm = await asyncio.to_thread(memory_mb, program)
    await asyncio.gather(*clients)
    found = {"clients": CLIENTS, "seconds": SECONDS, **{f"status_{code}": count for code, count in sorted(statuses.items())}}
    found |= {"p50_s": round(statistics.median(seconds), 3), "p99_s": round(sorted(seconds)[int(0.99 * len(seconds))], 3)}
    return found | {"memory_mb_warm": round(warm), "memory_mb_end": round(await asyncio.to_thread(memory_mb, program))}


@pytest.mark.slow
def test_many_clients_are_answered_or_told_to_come_back(rollout):
    served = Served(rollout)
    with served.client:
        served.serve(["serve", "run", "deployments:app", f"config={CONFIG}"])
        found = asyncio.run(load(rollout, f"http://localhost:{served.port}"))
        print(f"\n{json.dumps(found)}")
        assert {int(name.removeprefix("status_")) for name in found if name.startswith("status_")} <= ANSWERED_OR_LATER
        assert found["status_200"] >= 10 * CLIENTS
        assert found["memory_mb_end"] <= GROWTH * found["memory_mb_warm"]


def over_http(served: Served) -> tuple[float, float]:
    """Samples a second: from asking until the client hears of the end, and while they were played."""
    began = time.monotonic()
    asked = {"datasets": [{"name": "spell_backward", "limit": ITEMS}], "n": EACH}
    name = served.client.post("/v1/evals", json=asked).json()["id"]
    with served.client.stream("GET", f"/v1/evals/{name}/events") as response:
        events = [line.removeprefix("event: ") for line in response.iter_lines() if line.startswith("event: ")]
    seconds = time.monotonic() - began
    assert events[-1] == "done" and events.count("sample") == ITEMS * EACH
    return ITEMS * EACH / seconds, ITEMS * EACH / served.read(f"/v1/evals/{name}/artefacts/summary.json")["seconds"]


def by_command(rollout: Program, student: Path) -> float:
    """Samples a second while they were played: without the start of the command and of the engine."""
    done = rollout.call("eval", student, QUICKSTART, f"eval.items={ITEMS}", f"eval.n={EACH}", "--json")
    found = json.loads(done.out)
    assert found["overall"]["scored"] == ITEMS * EACH
    return found["samples_per_s"]


@pytest.mark.slow
def test_an_evaluation_over_http_is_as_fast_as_rollout_eval(rollout):
    served = Served(rollout)
    with served.client:
        served.serve(["serve", "run", "deployments:app", f"config={QUICKSTART}"])
        (student,) = (folder for folder in (rollout.runs / ".cache" / "students").iterdir() if not folder.name.startswith("."))
        for _ in range(WARM_ROUNDS):
            over_http(served)
        http, command = [], []
        for _ in range(ROUNDS):
            http.append(over_http(served))
            command.append(by_command(rollout, student))
        whole, played = (round(statistics.median(rates), 1) for rates in zip(*http, strict=True))
        found = {"http_samples_per_s": whole, "http_played_per_s": played, "eval_played_per_s": statistics.median(command)}
        print(f"\n{json.dumps(found)}", http, command)
        assert found["http_played_per_s"] >= SHARE * found["eval_played_per_s"]
