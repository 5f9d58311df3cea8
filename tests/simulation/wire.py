"""Processes and the calls between them: what arrives, what is lost, and what a caller hears of it.

Invariant: a call is carried out by one living process, and its caller learns of the outcome or of nothing. As with Ray, a call of
an actor that died is made again at its restart, or its caller is told that the actor is gone.
"""

from __future__ import annotations

import asyncio
import contextvars
import inspect
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from pipeline.errors import DiskFull, FencedOut, StageFailed
from tests.simulation.loop import LIFE, Life

if TYPE_CHECKING:
    from tests.simulation.world import World

CALL_S = 60.0
DETECTED_S = 1.0
"""A death is noticed within this time."""
LATE_S = 100.0
RETRIED = 0.7
"""Share of the calls to an actor that died which are made again at its restart, without the caller's knowing."""
READY = "ready"
"""The call that every actor answers once its service is built."""
CALLER: contextvars.ContextVar[str] = contextvars.ContextVar("caller", default="")


class Died(ConnectionError):
    """The process that carried the call out is gone."""


class Process:
    """One incarnation of an actor: builds its service, then answers."""

    def __init__(self, actor: Actor, name: str) -> None:
        self.actor = actor
        self.life = Life(name)
        self.handles: list[Callable[[], None]] = []
        """What the kernel does for a process that ends: closing its files."""
        self.replies: dict[asyncio.Future[Any], None] = {}
        """In the order of their calls; a set would have the order of their addresses."""
        self.writer = 0
        """Of the ledger: its place among the openings."""
        self.service: Any = None
        self._built = self.life.spawn(self._build(), "build")
        self._background: asyncio.Task[None] | None = None

    async def _build(self) -> Any:
        self.service = await self.actor.build(self)
        if self.actor.background is not None:
            self._background = asyncio.create_task(self.actor.background(self.service), name="background")
        return self.service

    async def _started(self) -> Any:
        """As deployments' hosting: what could not be built, or whose loop ended, answers every call with its failure."""
        try:
            service = await asyncio.shield(self._built)
        except FencedOut:
            raise
        except Exception as error:
            raise StageFailed(self.actor.name, f"could not start: {error!r}") from error
        if self._background is not None and self._background.done():
            raise StageFailed(self.actor.name, "background loop ended") from self._background.exception()
        return service

    def serve(self, call: Call) -> None:
        self.replies[call.reply] = None
        self.life.spawn(self._answer(call.caller.name, call.method, call.args, call.kwargs, call.reply), call.method)

    async def _answer(
        self, caller: str, method: str, args: tuple[Any, ...], kwargs: dict[str, Any], reply: asyncio.Future[Any]
    ) -> None:
        CALLER.set(caller)
        try:
            service = await self._started()
            newest = self.actor.world.carrying_out(self, method)
            result = self.actor.name if method == READY else getattr(service, method)(*args, **kwargs)
            if inspect.isawaitable(result):
                result = await result
            if self.writer:
                self.actor.world.witness.fenced(method, result, newest)
        except (Exception, asyncio.CancelledError) as error:
            self._settle(reply, error)
            if isinstance(error, FencedOut):
                self.actor.world.kill(self)  # its heartbeat ends it
        else:
            self._settle(reply, None, result)

    def _settle(self, reply: asyncio.Future[Any], error: BaseException | None, result: Any = None) -> None:
        self.replies.pop(reply, None)
        if reply.done():
            return
        if error is None:
            reply.set_result(result)
        elif isinstance(error, asyncio.CancelledError):
            reply.set_exception(StageFailed(self.actor.name, "the call was cancelled"))
        else:
            reply.set_exception(error)

    def end(self) -> None:
        """SIGKILL. Callers hear of it after a while."""
        self.life.end()
        for close in self.handles:
            close()
        self.abandon()

    def abandon(self) -> None:
        """Callers are told that it is dead."""
        loop = asyncio.get_running_loop()
        for reply in self.replies:
            delay_s = self.actor.world.faults.random.random() * DETECTED_S
            loop.call_later(delay_s, _tell, reply, context=contextvars.Context())
        self.replies.clear()


def _tell(reply: asyncio.Future[Any]) -> None:
    if not reply.done():
        reply.set_exception(Died("the actor died"))


@dataclass(frozen=True, slots=True, eq=False)
class Call:
    caller: Life
    method: str
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    reply: asyncio.Future[Any]


class Actor:
    """A named actor of one cluster, over its restarts."""

    def __init__(
        self,
        world: World,
        cluster: str,
        name: str,
        build: Callable[[Process], Awaitable[Any]],
        background: Callable[[Any], Awaitable[None]] | None = None,
    ) -> None:
        self.world, self.name, self.build, self.background = world, name, build, background
        self.process: Process | None = None
        self.processes: list[Process] = []
        self.over = False
        """The cluster is gone: nothing restarts."""
        self._cluster = cluster
        self._inbox: list[Call] = []
        self._stale: tuple[Process, str] | None = None
        """A replaced process that lives on, and the caller that still reaches it."""

    def start(self) -> None:
        if self.over:
            return
        self.process = Process(self, f"{self._cluster}.{self.name}.{len(self.processes)}")
        self.processes.append(self.process)
        waiting, self._inbox = self._inbox, []
        for call in waiting:
            self.process.serve(call)

    def deliver(self, call: Call) -> None:
        """What arrives while the actor restarts waits for it."""
        if self._stale is not None and call.caller.name.split(".")[1] == self._stale[1] and self._stale[0].life.alive:
            self._stale[0].serve(call)
        elif self.process is not None:
            self.process.serve(call)
        else:
            self._inbox.append(call)

    def end(self, process: Process, restart: bool) -> None:
        if not process.life.alive:
            return
        process.end()
        if process is self.process:
            self._restart(restart)

    def split(self, caller: str) -> None:
        """Taken for dead and started anew, while the old process lives on; one caller still talks to it."""
        if self.process is not None:
            self._stale = (self.process, caller)
            self.process.abandon()
            self._restart(True)

    def _restart(self, restart: bool) -> None:
        self.process = None
        if restart and not self.over:
            loop = asyncio.get_running_loop()
            loop.call_later(self.world.faults.restart_s(), self.start, context=contextvars.Context())


class Remote:
    """An actor as another process sees it: `await remote.method(...)`.

    deadline_s: None where the caller bounds the call. retried: share of calls that survive the actor's death.
    """

    def __init__(self, actor: Actor, deadline_s: float | None = CALL_S, retried: float = RETRIED) -> None:
        self._actor, self._deadline_s, self._retried = actor, deadline_s, retried

    def __getattr__(self, method: str) -> Callable[..., Awaitable[Any]]:
        if method.startswith("_"):
            raise AttributeError(method)

        async def call(*args: Any, **kwargs: Any) -> Any:
            return await self._call(method, args, kwargs)

        return call

    async def _call(self, method: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """What is not lost is answered well before any deadline, so deadlines are looked at only where something is."""
        world, actor = self._actor.world, self._actor
        fault, issued = world.faults.on_wire(actor.name), world.witness.event()
        if fault == "lost":
            raise ConnectionError(f"{method} never reached {actor.name}")
        if fault == "full":
            raise DiskFull("no space left")
        if fault == "late":
            self._send(LATE_S, method, args, kwargs)
            await self._nothing(method)
        while True:
            try:
                result = await self._send(world.faults.hop_s(), method, args, kwargs)
                break
            except Died:
                if not world.faults.chance(self._retried):
                    raise
        if fault == "deaf":
            raise ConnectionError(f"the answer of {actor.name} to {method} was lost")
        if fault == "hung":
            await self._nothing(method)
        if world.faults.chance(0.5):
            await asyncio.sleep(world.faults.hop_s())
        if actor.name == "replay_buffer":
            world.witness.heard(method, args, result, issued)
        return result

    def _send(self, hop_s: float, method: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> asyncio.Future[Any]:
        """On its way it needs its sender no more: it arrives also when that dies meanwhile."""
        loop = asyncio.get_running_loop()
        call = Call(LIFE.get(), method, args, kwargs, loop.create_future())
        loop.call_later(hop_s, self._actor.deliver, call, context=contextvars.Context())
        return call.reply

    async def _nothing(self, method: str) -> None:
        """No answer ever comes: the deadline ends the call, or the caller, or the watchdog."""
        if self._deadline_s is None:
            await asyncio.Event().wait()
        await asyncio.sleep(self._deadline_s)
        raise TimeoutError(f"{self._actor.name}.{method} did not answer within {self._deadline_s:g} s")
