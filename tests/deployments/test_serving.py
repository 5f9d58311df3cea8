"""An application that cannot start is one line."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from deployments import serving
from pipeline.errors import StageFailed

TRACE = """The deployment failed to start 3 times in a row. Error:
\x1b[36mray::ServeReplica:a:Engine.initialize_and_get_metadata()\x1b[39m (pid=7)
  File "/somewhere/engines.py", line 3, in __init__
pipeline.errors.EngineError: server vllm did not get ready in 2 starts"""


async def test_a_dead_application_says_its_error_and_no_traceback(monkeypatch):
    dead = SimpleNamespace(
        status="DEPLOY_FAILED", message="Failed to update.", deployments={"Engine": SimpleNamespace(message=TRACE)}
    )
    monkeypatch.setattr("ray.serve.status", lambda: SimpleNamespace(applications={"a": dead}))
    with pytest.raises(StageFailed) as caught:
        await serving.wait_running("a", 5.0)
    assert str(caught.value) == "stage a: pipeline.errors.EngineError: server vllm did not get ready in 2 starts"
