"""Stands in for a scaffold that somebody else wrote: a loop over OpenAI's interface, which knows three variables of this project.

`python program_standin.py HOW`: `append`; `forget` (of the history only the last turn is sent); `retry` (every question is asked
twice); `fail`; `silent`; `hang`.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys

import httpx

HEADERS = {"Authorization": f"Bearer {os.environ['OPENAI_API_KEY']}"}


def main(how: str) -> None:
    history = [{"role": "system", "content": "Repair."}, {"role": "user", "content": sys.stdin.read()}]
    if how == "silent":
        return
    if how == "hang":
        subprocess.Popen(["setsid", "sleep", "8181"])
        subprocess.run(["sleep", "8181"])
    with httpx.Client(headers=HEADERS, timeout=60) as client:
        while True:
            sent = [*history[:2], *history[2:][-2:]] if how == "forget" else history
            for _ in range(2 if how == "retry" else 1):
                said = client.post(f"{os.environ['OPENAI_BASE_URL']}/chat/completions", json={"model": "any", "messages": sent})
                said.raise_for_status()
            if how == "fail":
                raise RuntimeError("out of ideas")
            message = said.json()["choices"][0]["message"]
            command = re.search(r"```bash\n(.*?)\n?```", message["content"], re.DOTALL)
            if command is not None and command[1] == "submit":
                return
            ran = client.post(os.environ["SANDBOX_URL"], json={"command": command[1] if command else "echo say a command"}).json()
            history += [message, {"role": "user", "content": ran["output"]}]


if __name__ == "__main__":
    main(sys.argv[1])
