"""`schemathesis run` against a service that runs, as its README section serves it, with the settings of the repository."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.e2e.program import Program
from tests.e2e.test_service import HERE, Served

SETTINGS = HERE.parent.parent / "schemathesis.toml"
EXAMPLES, SEED, LIMIT_S = 20, 0, 280.0


@pytest.mark.slow
def test_schemathesis_finds_nothing(rollout: Program, tmp_path: Path):
    served = Served(rollout)
    with served.client:
        served.serve(["serve", "run", "deployments:app", f"config={HERE / 'served' / 'run.yaml'}"])
        asked = ["run", f"http://localhost:{served.port}/openapi.json", "--max-examples", EXAMPLES, "--seed", SEED]
        found = rollout.call("--config-file", SETTINGS, *asked, command="schemathesis", timeout_s=LIMIT_S, cwd=tmp_path)
        assert found.code == 0, found.out
        assert served.read("/healthz")["status"] == "ok"
