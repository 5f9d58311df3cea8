"""Every exception as the answer that a client gets: `{error: {type, code, message, param, request_id}}`.

Invariant: no traceback and no path of a source file leaves the service; the log holds them under the request id.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from pydantic import BaseModel

from pipeline.config.base import NotAsSent
from pipeline.config.faults import line_of
from pipeline.errors import EngineError, EngineUnavailable, RequestRefused, RolloutError, RowRefused, SwapTimeout, UserError

BUSY_AFTER_S = 2.0
"""For a replica that is being replaced."""


class Fault(BaseModel):
    type: str
    """`invalid_request_error`, `authentication_error`, `rate_limit_error` or `server_error`."""
    code: str
    """For programs."""
    message: str
    param: str | None
    """The key that is at fault."""
    request_id: str
    """Of the line in the log."""


class FaultReply(BaseModel):
    error: Fault


@dataclass(frozen=True, slots=True)
class Refusal:
    status: int
    code: str
    message: str
    param: str | None = None
    retry_after_s: float | None = None

    def body(self, request_id: str) -> dict[str, Any]:
        fault = Fault(type=_type(self.status), code=self.code, message=self.message, param=self.param, request_id=request_id)
        return FaultReply(error=fault).model_dump()


def refusal_of(error: BaseException) -> Refusal:
    if isinstance(error, RequestRefused):
        return Refusal(error.status, error.code, error.message, error.param, error.retry_after_s)
    if isinstance(error, RowRefused):
        return Refusal(400, "invalid_prompt", str(error))
    if isinstance(error, EngineUnavailable | SwapTimeout):
        return Refusal(503, "engine_unavailable", "the engine does not answer now; try again", None, BUSY_AFTER_S)
    if isinstance(error, EngineError):
        return Refusal(500, "engine_error", "the engine could not answer; the service's log says why")
    if isinstance(error, UserError):
        return Refusal(400, "invalid_request", str(error))
    if isinstance(error, RolloutError):
        return Refusal(500, "internal_error", f"{type(error).__name__}; the service's log says more")
    return Refusal(500, "internal_error", "an unexpected error; the service's log says more")


def invalid(faults: Sequence[dict[str, Any]], body: Any, model: type[BaseModel]) -> Refusal:
    """For what is not as its schema says. faults: pydantic's own, not empty. model: of the body.

    A value that may be of several kinds has a fault for each of them: the one that got furthest is told.
    """
    cause = faults[0].get("ctx", {}).get("error")
    if isinstance(cause, NotAsSent):
        return Refusal(400, "invalid_request", str(cause), cause.key)
    located = [fault | {"loc": _steps(fault, body)} for fault in faults]
    same = [fault for fault in located if fault["loc"][:1] == located[0]["loc"][:1]]
    fault = max(same, key=lambda fault: (len(fault["loc"]), not fault["type"].endswith("_type")))
    if fault["type"] == "json_invalid":
        message = f"the body is no JSON: {fault['ctx']['error']}"
    elif isinstance(body, bytes):
        message = "the body is not said to be JSON: send the header content-type: application/json"
    elif fault["type"] == "missing" and not fault["loc"]:
        message = "a JSON body is required"
    else:
        line = line_of(fault, model)
        message = f"the body{line}" if line.startswith(":") else line
    return Refusal(400, "invalid_request", message, ".".join(map(str, fault["loc"])) or None)


def _steps(fault: dict[str, Any], body: Any) -> tuple[Any, ...]:
    """Where pydantic found a fault, as steps into the body, or the name of a header.

    Steps that are not there name the kind as which a value was read that may be of several; only a missing key is the fault itself.
    """
    where, *parts = fault["loc"]
    if where != "body":
        return tuple(parts)
    steps, here = [], body
    for part in parts:
        if isinstance(here, dict) and (part in here or fault["type"] == "missing"):
            here = here.get(part)
        elif isinstance(here, list) and isinstance(part, int):
            here = here[part]
        else:
            continue
        steps.append(part)
    return tuple(steps)


def _type(status: int) -> str:
    if status in (401, 403):
        return "authentication_error"
    if status == 429:
        return "rate_limit_error"
    return "server_error" if status >= 500 else "invalid_request_error"
