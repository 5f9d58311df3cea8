"""Tasks that live and fall together, and fail with the first failure itself instead of a group of them."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager


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


def _first(errors: BaseExceptionGroup) -> BaseException:
    error = errors.exceptions[0]
    return _first(error) if isinstance(error, BaseExceptionGroup) else error
