"""What `/openapi.json` promises is what the routes do: schemathesis asks for what the schema allows, and for what it does not."""

from __future__ import annotations

import asyncio
import sys

from deployments.gate import GateRules
from pipeline.evaluation.plan import EvalRequest, Plan, make_plan
from pipeline.fetcher.catalog import Catalog
from tests.deployments.test_api import listening, world
from tests.pipeline.evaluation.test_jobs import CONFIG, plan

CONTEXT, SEED, EXAMPLES, LIMIT_S = 4096, 0, 10, 120.0
SETTINGS = """
[[operations]]
include-name = "POST /v1/runs"
# A configuration has rules that no schema states: what cannot run is refused with 400 and every reason.
checks.positive_data_acceptance.expected-statuses = ["2xx", "400", "404", "409"]
"""


async def test_nothing_is_promised_that_is_not_kept(tmp_path):
    catalog = Catalog(CONFIG)

    def refused_as_it_would_be(request: EvalRequest) -> Plan:
        make_plan(request, CONFIG, catalog)
        return plan(request)

    rules = GateRules(loopback=True, token_sha256=None, max_body_bytes=1 << 20)
    settings = tmp_path / "schemathesis.toml"
    settings.write_text(SETTINGS)
    async with world(tmp_path, rules, planned=refused_as_it_would_be, context=CONTEXT) as here, listening(here.api) as address:
        options = ["--max-examples", EXAMPLES, "--seed", SEED, "--phases", "examples,coverage,fuzzing", "--request-timeout", 20]
        command = ["-m", "schemathesis.cli", "--config-file", settings, "run", f"{address}/openapi.json", *options]
        asking = await asyncio.create_subprocess_exec(
            sys.executable, *map(str, command), cwd=tmp_path, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.STDOUT
        )
        try:
            said, _ = await asyncio.wait_for(asking.communicate(), LIMIT_S)
        finally:
            if asking.returncode is None:
                asking.kill()
                await asking.wait()
    assert asking.returncode == 0, said.decode()
