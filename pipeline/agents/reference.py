"""A teacher that knows the reference answers: it says the next step of a solution, from whatever state the student has left.

Invariant: what it says follows from the task and the text so far alone.
"""

from __future__ import annotations

import re
import shlex

import numpy as np

from pipeline.agents.base import MultiTurnRenderer
from pipeline.agents.commands import FENCE, MINI_SWE_AGENT_FENCE, MINI_SWE_AGENT_SUBMIT, SUBMIT, block
from pipeline.engines.base import Completion, GenerateRequest
from pipeline.errors import DataError
from pipeline.fetcher.swe import is_repair, repair_of
from pipeline.records import Task

_HUNK = re.compile(r"^@@ -(\d+)(?:,\d+)? \+\d+(?:,\d+)? @@")


class ReferenceTeacher:
    """Answers requests as an engine does. Its logprobs are 0: it says nothing else."""

    def __init__(self, task: Task, renderer: MultiTurnRenderer) -> None:
        self._task = task
        self._renderer = renderer

    async def generate(self, request: GenerateRequest) -> Completion:
        """Raises DataError for a task without a reference answer."""
        text = next_message(self._task, self._renderer.decode(request.prompt))
        tokens = np.append(self._renderer.encode_text(text), self._renderer.eos_token_id).astype(np.int32)
        said = tokens[: request.sampling.max_tokens]
        return Completion(
            request_id=request.request_id,
            token_ids=said,
            logprobs=np.zeros(len(said), np.float32),
            finish_reason="stop" if len(said) == len(tokens) else "length",
            weight_version=0,
        )


def next_message(task: Task, so_far: str) -> str:
    """A repair task: look at the file, mend it, submit; each once, as the agent reads it. Any other: the answer."""
    if task.answer is None:
        raise DataError(f"{task.task_id} has no reference answer for the teacher to play")
    if not is_repair(task):
        return task.answer
    patch = repair_of(task).patch
    fence, submit = (MINI_SWE_AGENT_FENCE, MINI_SWE_AGENT_SUBMIT) if MINI_SWE_AGENT_FENCE in so_far else (FENCE, SUBMIT)
    look, mend = block(f"cat {shlex.quote(first_file(patch))}", fence), block(mending_command(patch), fence)
    if mend in so_far:
        return block(submit, fence)
    return mend if look in so_far else look


def first_file(patch: str) -> str:
    found = re.search(r"^--- a/(.+)$", patch, re.MULTILINE)
    if found is None:
        raise DataError("the reference patch names no file")
    return found.group(1)


def mending_command(patch: str) -> str:
    """One shell command with the patch's effect: `sed` where each changed line of one file becomes one line, else `git apply`."""
    lines = replaced_lines(patch)
    if lines is None:
        return f"git apply <<'PATCH'\n{patch.rstrip()}\nPATCH"
    edits = " ".join(f"-e {shlex.quote(f'{number}c{chr(92)}{_escaped(text)}')}" for number, text in lines)
    return f"sed -i {edits} {shlex.quote(first_file(patch))}"


def replaced_lines(patch: str) -> list[tuple[int, str]] | None:
    """(line number before, new text) of every change; None when lines are added, removed, or in more than one file."""
    found: list[tuple[int, str]] = []
    number, removed = 0, []
    if len(re.findall(r"^--- ", patch, re.MULTILINE)) != 1:
        return None
    for line in [*patch.splitlines(), " "]:
        hunk = _HUNK.match(line)
        if hunk is not None:
            number = int(hunk.group(1))
        elif line.startswith(("--- ", "+++ ", "diff ", "index ")) or not number:
            continue
        elif line.startswith("-"):
            removed.append(number)
            number += 1
        elif line.startswith("+"):
            if not removed:
                return None
            found.append((removed.pop(0), line[1:]))
        elif line.startswith("\\"):
            return None
        elif removed:
            return None
        else:
            number += 1
    return found or None


def _escaped(text: str) -> str:
    """For sed's `c`."""
    return text.replace("\\", "\\\\")
