"""How a model says a command, how it is told what came of it, and when it says the same again and again."""

from __future__ import annotations

import re
from dataclasses import dataclass

from pipeline.sandboxes.base import Ran

SUBMIT = "submit"
"""As the only command: the work is done."""
FENCE = "bash"
MINI_SWE_AGENT_FENCE, MINI_SWE_AGENT_SUBMIT = "mswea_bash_command", "echo COMPLETE_TASK_AND_SUBMIT_FINAL_OUTPUT"
"""The same where mini-swe-agent asks: it says so in its prompt."""
_BLOCK = re.compile(r"```(?:bash|sh)?[ \t]*\n(.*?)\n?```", re.DOTALL)
NO_COMMAND = "Say exactly one command in a ```bash block. The command submit ends the work."


def block(command: str, fence: str = FENCE) -> str:
    return f"```{fence}\n{command}\n```"


def command_in(text: str) -> str | None:
    """The only command of a message; None when it has none, or several."""
    found = _BLOCK.findall(text)
    return found[0].strip() if len(found) == 1 and found[0].strip() else None


def observation(ran: Ran, timeout_s: float) -> str:
    head = f"stopped after {timeout_s:g} s" if ran.timed_out else f"exit {ran.exit_code}"
    return f"{head}\n{ran.output}"


@dataclass(slots=True)
class Repeats:
    """How often the same thing was said in a row."""

    last: str | None = None
    count: int = 0

    def add(self, command: str | None) -> int:
        self.count = self.count + 1 if self.count and command == self.last else 1
        self.last = command
        return self.count
