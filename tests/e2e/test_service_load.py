"""200 clients for a minute: every request is answered or told to come back, and memory does not grow. Prints what it saw."""

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
