"""Waiting for a Serve application. Invariant: an application that cannot start is an error with Serve's message, never a wait."""

from __future__ import annotations

import asyncio
import logging
import re

from deployments.threads import in_thread
from pipeline.errors import RemoteTraceback, StageFailed

POLL_S = 0.2
COLOUR = re.compile(r"\x1b\[[0-9;]*m")
log = logging.getLogger(__name__)
DEAD = ("DEPLOY_FAILED", "UNHEALTHY")


async def wait_running(app: str, timeout_s: float) -> None:
    """Raises StageFailed naming the application when it failed or did not serve within `timeout_s` seconds."""
    try:
        async with asyncio.timeout(timeout_s):
            while not await in_thread(_running, app):
                await asyncio.sleep(POLL_S)
    except TimeoutError as error:
        raise StageFailed(app, f"did not serve within {timeout_s:.0f} s (run.start_timeout_s)") from error


def _running(app: str) -> bool:
    from ray import serve  # a third of a second that a stage without teachers, when it is replaced, does not spend

    overview = serve.status().applications.get(app)
    if overview is None:
        return False
    if overview.status in DEAD:
        messages = [deployment.message for deployment in overview.deployments.values() if deployment.message]
        log.error("%s did not start", app, exc_info=RemoteTraceback("\n".join(messages)))
        raise StageFailed(app, _reason([overview.message, *messages]) or str(overview.status))
    return overview.status == "RUNNING"


def _reason(messages: list[str]) -> str:
    """The last line of the last message: Serve tells a replica's failure by its traceback, coloured."""
    lines = [line.strip() for message in messages for line in COLOUR.sub("", message).splitlines() if line.strip()]
    return lines[-1] if lines else ""
