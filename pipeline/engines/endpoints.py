"""One or many servers behind one face: routed to the least busy, looked after, and asked in each other's place.

Invariant: a call ends within its deadline, by an answer, or by a fault that names every server tried.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from typing import Any, TypeVar

import httpx

from pipeline.errors import BadReply, EngineUnavailable

ATTEMPTS = 3
"""Servers asked for one call, the same one again when there is no other."""
PROBE_S = 5.0
POLL_S = 0.2

Reply = TypeVar("Reply")


class Endpoint:
    """address: where the server is now; None while it is being started."""

    def __init__(self, name: str, address: Callable[[], str | None]) -> None:
        self.name, self.address = name, address
        self.up = False
        self.in_flight = 0
        self.held: tuple[int | None, str] | None = None
        """Weight version and folder, as last heard; None: ask."""
        self.changing = asyncio.Lock()


class Endpoints:
    """health: path that a live server answers with 200. seen: told what it answered, and raises when that server will not do."""

    def __init__(self, endpoints: Sequence[Endpoint], timeout_s: float, health: str, seen: Callable[[Endpoint, Any], None]) -> None:
        self.endpoints = list(endpoints)
        self._timeout_s, self._health, self._seen = timeout_s, health, seen
        self._client: httpx.AsyncClient | None = None
        self._revival: asyncio.Task[Any] | None = None
        self._next_revival = 0.0

    async def use(self, call: Callable[[Endpoint, float], Awaitable[Reply]]) -> Reply:
        """`call` gets a server and the seconds that are left. On EngineUnavailable and BadReply another server is asked."""
        loop = asyncio.get_running_loop()
        deadline = loop.time() + self._timeout_s
        faults: dict[Endpoint, int] = {}
        while True:
            endpoint = await self._least_busy(deadline, faults)
            endpoint.in_flight += 1
            try:
                return await call(endpoint, max(0.001, deadline - loop.time()))
            except (EngineUnavailable, BadReply) as error:
                faults[endpoint] = faults.get(endpoint, 0) + 1
                if isinstance(error, EngineUnavailable):
                    endpoint.up, endpoint.held = False, None
                if sum(faults.values()) >= ATTEMPTS or loop.time() >= deadline:
                    raise
            finally:
                endpoint.in_flight -= 1

    async def ask(self, endpoint: Endpoint, path: str, body: Any = None, seconds: float = PROBE_S) -> httpx.Response:
        """GET without a body, else POST. Raises EngineUnavailable when no whole answer came in time."""
        async with self.opened(endpoint, path, body, seconds) as response:
            await response.aread()
            return response

    @asynccontextmanager
    async def opened(self, endpoint: Endpoint, path: str, body: Any, seconds: float) -> AsyncIterator[httpx.Response]:
        """As `ask`, of an answer that is read while it comes: `seconds` are those until its next part."""
        address = endpoint.address()
        if address is None:
            raise EngineUnavailable(f"{endpoint.name} is being started")
        if self._client is None:
            self._client = httpx.AsyncClient(limits=httpx.Limits(max_connections=None), trust_env=False)
        method = "GET" if body is None else "POST"
        try:
            async with self._client.stream(method, address + path, json=body, timeout=seconds) as response:
                yield response
        except httpx.TimeoutException as error:
            raise EngineUnavailable(f"{endpoint.name}{path} did not answer within {seconds:.1f} s") from error
        except httpx.TransportError as error:
            raise EngineUnavailable(f"{endpoint.name}{path}: {type(error).__name__}: {error}") from error

    async def probe(self, endpoint: Endpoint) -> Any:
        """What the server says of itself. Raises EngineUnavailable."""
        response = await self.ask(endpoint, self._health)
        if response.status_code != httpx.codes.OK:
            raise EngineUnavailable(f"{endpoint.name}{self._health}: {fault_of(response)}")
        facts = decoded(endpoint, response)
        self._seen(endpoint, facts)
        endpoint.up = True
        return facts

    async def reach(self) -> None:
        """Raises what keeps the last of the servers from answering."""
        await self.use(lambda endpoint, _: self.probe(endpoint))

    async def close(self) -> None:
        if self._revival is not None:
            self._revival.cancel()
            await asyncio.gather(self._revival, return_exceptions=True)
        if self._client is not None:
            await self._client.aclose()

    async def _least_busy(self, deadline: float, faults: dict[Endpoint, int]) -> Endpoint:
        while True:
            up = [endpoint for endpoint in self.endpoints if endpoint.up]
            if up:
                self._revive([endpoint for endpoint in self.endpoints if not endpoint.up])
                return min(up, key=lambda endpoint: (faults.get(endpoint, 0), endpoint.in_flight))
            answers = await asyncio.gather(*(self.probe(endpoint) for endpoint in self.endpoints), return_exceptions=True)
            for answer in answers:
                if isinstance(answer, BaseException) and not isinstance(answer, EngineUnavailable):
                    raise answer
            if any(endpoint.up for endpoint in self.endpoints):
                continue
            if asyncio.get_running_loop().time() >= deadline:
                raise EngineUnavailable(f"no server answers within {self._timeout_s:g} s: {'; '.join(map(str, answers))}")
            await asyncio.sleep(POLL_S)

    def _revive(self, down: list[Endpoint]) -> None:
        """Servers that are down are asked now and then, beside the calls that others answer."""
        now = asyncio.get_running_loop().time()
        if down and now >= self._next_revival and (self._revival is None or self._revival.done()):
            self._next_revival = now + PROBE_S
            probes = (self.probe(endpoint) for endpoint in down)
            self._revival = asyncio.ensure_future(asyncio.gather(*probes, return_exceptions=True))


def decoded(endpoint: Endpoint, response: httpx.Response) -> Any:
    """The JSON of an answer. Raises BadReply."""
    try:
        return response.json()
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        raise BadReply(f"{endpoint.name}: the answer is not JSON: {response.text[:80]!r}") from error


def fault_of(response: httpx.Response) -> str:
    """One line of what an answer other than 200 says."""
    return f"{response.status_code} {' '.join(response.text.split())[:300]}"
