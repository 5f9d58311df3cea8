"""Tasks that live and fall together, and fail with the first failure itself instead of a group of them."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Coroutine, Iterable, Sequence
from contextlib import asynccontextmanager
from typing import Any


@asynccontextmanager
async def nursery() -> AsyncIterator[asyncio.TaskGroup]:
    """A TaskGroup whose first exception, with its own traceback and causes, is what the block raises."""
    failure: BaseException | None = None
    try:
        async with asyncio.TaskGroup() as group:
            yield group
    except BaseExceptionGroup as errors:
        failure = _first(errors)
    if failure is not None:  # outside of `except`, which would make the group its context
        raise failure


async def together(jobs: Iterable[tuple[str, Coroutine[Any, Any, None]]]) -> None:
    """All jobs, by name, as in a nursery; a single one needs no task of its own."""
    named = list(jobs)
    if len(named) == 1:
        await named[0][1]
        return
    async with nursery() as group:
        for name, job in named:
            group.create_task(job, name=name)


async def each_to_its_end(jobs: Iterable[tuple[str, Coroutine[Any, Any, None]]]) -> None:
    """As `together`, but a failure leaves the others alone, and is raised when all have ended.

    For jobs in other processes: one that was only abandoned would go on there, with tokens that others hold by then.
    """
    failures: list[Exception] = []

    async def ended(job: Coroutine[Any, Any, None]) -> None:
        try:
            await job
        except Exception as error:
            failures.append(error)

    await together((name, ended(job)) for name, job in jobs)
    if failures:
        raise failures[0]


def cancel_when_left(work: asyncio.Task[Any], futures: Sequence[asyncio.Future[Any]]) -> None:
    """What nobody waits for any more is given up as a whole; while one future is open, the work for the others goes on for
    nothing."""
    left = len(futures)

    def one_less(_: asyncio.Future[Any]) -> None:
        nonlocal left
        left -= 1
        if not left and not work.done():
            work.cancel()

    for future in futures:
        future.add_done_callback(one_less)


def _first(errors: BaseExceptionGroup) -> BaseException:
    error = errors.exceptions[0]
    return _first(error) if isinstance(error, BaseExceptionGroup) else error
