"""mini-swe-agent as a program of the agent `Scaffold`: its loop, its prompts and its model; the shell is the sample's sandbox.

Invariant: it ends with exit code 0 only when it has submitted; how many turns it has is the endpoint's to say.
"""

from __future__ import annotations

import os
import sys
from typing import Any

SUBMITTED = "COMPLETE_TASK_AND_SUBMIT_FINAL_OUTPUT"
"""What mini-swe-agent tells its model to print when the work is done."""
QUIET = {"MSWEA_SILENT_STARTUP": "1", "LITELLM_LOCAL_MODEL_COST_MAP": "True"}
"""Read where its packages are imported: no greeting, and no look at prices on the network."""


class SandboxEnvironment:
    """mini-swe-agent's `Environment`."""

    def __init__(self, url: str, key: str) -> None:
        import httpx

        self.config: dict[str, Any] = {}
        self._url = url
        self._client = httpx.Client(headers={"Authorization": f"Bearer {key}"}, timeout=None)  # the sandbox has the deadline

    def execute(self, action: dict[str, Any], cwd: str = "") -> dict[str, Any]:
        from minisweagent.exceptions import Submitted

        reply = self._client.post(self._url, json={"command": action["command"]})
        reply.raise_for_status()
        ran = reply.json()
        if ran["exit_code"] == 0 and ran["output"].lstrip().startswith(SUBMITTED):
            raise Submitted({"role": "exit", "content": "", "extra": {"exit_status": "Submitted", "submission": ""}})
        stopped = "the command was stopped at its deadline" if ran["timed_out"] else ""
        return {"output": ran["output"], "returncode": ran["exit_code"], "exception_info": stopped}

    def get_template_vars(self, **given: Any) -> dict[str, Any]:
        system = {"system": "Linux", "release": "", "version": "", "machine": ""}
        return system | given

    def serialize(self) -> dict[str, Any]:
        return {"info": {"config": {"environment": self.config}}}


def main() -> int:
    os.environ.update(QUIET)
    import yaml
    from minisweagent.agents.default import DefaultAgent
    from minisweagent.config import get_config_path
    from minisweagent.models.litellm_textbased_model import LitellmTextbasedModel

    settings = yaml.safe_load(get_config_path("mini_textbased").read_text())
    key = os.environ["OPENAI_API_KEY"]
    place = {"api_base": os.environ["OPENAI_BASE_URL"], "api_key": key}
    model = LitellmTextbasedModel(
        model_name="openai/student", cost_tracking="ignore_errors", **settings["model"] | {"model_kwargs": place}
    )
    templates = {name: settings["agent"][name] for name in ("system_template", "instance_template")}
    agent = DefaultAgent(
        model, SandboxEnvironment(os.environ["SANDBOX_URL"], key), **templates, cost_limit=0, max_consecutive_format_errors=0
    )
    return 0 if agent.run(sys.stdin.read()).get("exit_status") == "Submitted" else 1


if __name__ == "__main__":
    sys.exit(main())
