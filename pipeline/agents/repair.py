"""What is done to a repair task in a sandbox: its patch taken, a patch applied, its tests run.

Invariant: a patch is judged in a fresh sandbox, and the tests that judge it are those of the test patch, whatever was done to them.
The patched program runs in one process with its tests: what it does to the runner is caught where the runner then fails nothing.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from pathlib import PurePosixPath

from pipeline.errors import VerifierError
from pipeline.fetcher.swe import Repair
from pipeline.sandboxes.base import Contents, Ran, Sandbox

GIT = 'git --git-dir="$PRIVATE/git" --work-tree=. -c core.fileMode=false'
"""Apart from the task's own folder: an agent neither sees it nor can change it."""
GIT_S = 60.0
PATCH_BYTES = 2**20
ABSENT = "_that_is_not_there"
"""Behind the id of a test: of none."""
_TOUCHED = re.compile(r"^(?:\+\+\+ b|--- a)/(\S.*)$", re.MULTILINE)
"""Paths that a patch changes."""

OpenSandbox = Callable[[str, Contents], Awaitable[Sandbox]]


async def remember(sandbox: Sandbox) -> None:
    """The state to which `patch_of` compares. Raises VerifierError."""
    ignore = 'printf "__pycache__/\\n*.pyc\\n" >> "$PRIVATE/git/info/exclude"'
    command = f'{GIT} init -q && {ignore} && {GIT} add -A && {GIT} write-tree > "$PRIVATE/tree"'
    _good(await sandbox.run(command, GIT_S, private=True), "the task's folder cannot be recorded")


async def patch_of(sandbox: Sandbox) -> str | None:
    """What was changed since `remember`; None when it is above PATCH_BYTES. Raises VerifierError when it cannot be taken.

    What git could not read, what is no file, and repositories in the folder keep nobody from it.
    """
    readable = r"chmod -R u+rwX .; find . -mindepth 2 -name .git -prune -exec rm -rf {} +; find . \( -type p -o -type s \) -delete"
    command = f'{readable}; {GIT} add -A && {GIT} diff --cached --binary --no-renames $(cat "$PRIVATE/tree")'
    ran = _good(await sandbox.run(command, GIT_S, private=True, output_bytes=PATCH_BYTES), "the patch cannot be taken")
    return None if ran.left_out else ran.output


async def apply(sandbox: Sandbox, patch: str, but: Sequence[str] = ()) -> Ran:
    """but: paths that are left as they are."""
    excluded = " ".join(f"--exclude={shlex.quote(path)}" for path in but)
    return await sandbox.run(f"git apply --whitespace=nowarn {excluded} -", GIT_S, stdin=patch.encode())


async def run_tests(sandbox: Sandbox, repair: Repair, ids: Sequence[str], timeout_s: float) -> Ran:
    """Exit code 0: all of them pass."""
    return await sandbox.run(f"{repair.test_command} {shlex.join(ids)}", timeout_s)


async def solves(open_sandbox: OpenSandbox, repair: Repair, patch: str, timeout_s: float) -> bool:
    """Whether FAIL_TO_PASS and PASS_TO_PASS pass with the patch, by a runner that still fails: when it is asked for a test that is
    not there. It would not with a patch that ends the process early or takes the runner's place.

    Raises VerifierError when that cannot be found out.
    """
    if not patch.strip():
        return False
    sandbox = await open_sandbox("verify", repair.contents)
    try:
        if (await apply(sandbox, patch, _kept(repair))).exit_code != 0:
            return False
        _good(await apply(sandbox, repair.test_patch), f"the test patch of {repair.instance_id} does not apply")
        tests = [*repair.fail_to_pass, *repair.pass_to_pass]
        ran = await run_tests(sandbox, repair, tests, timeout_s)
        return ran.exit_code == 0 and (await run_tests(sandbox, repair, [tests[0] + ABSENT], timeout_s)).exit_code != 0
    finally:
        await sandbox.close()


@dataclass(frozen=True, slots=True)
class Proof:
    """Of one task: that it is one."""

    instance_id: str
    faults: tuple[str, ...]


async def prove(open_sandbox: OpenSandbox, repair: Repair, timeout_s: float) -> Proof:
    """Before: every test of FAIL_TO_PASS fails, those of PASS_TO_PASS pass. With the reference patch: all pass."""
    faults: list[str] = []
    sandbox = await open_sandbox("before", repair.contents)
    try:
        applied = await apply(sandbox, repair.test_patch)
        if applied.exit_code != 0:
            return Proof(repair.instance_id, (f"the test patch does not apply: {applied.output.strip()}",))
        for test in repair.fail_to_pass:
            ran = await run_tests(sandbox, repair, [test], timeout_s)
            if ran.exit_code == 0:
                faults.append(f"{test} passes before")
        if repair.pass_to_pass:
            ran = await run_tests(sandbox, repair, repair.pass_to_pass, timeout_s)
            if ran.exit_code != 0:
                faults.append(f"PASS_TO_PASS fails before: {_last(ran)}")
    finally:
        await sandbox.close()
    try:
        if not await solves(open_sandbox, repair, repair.patch, timeout_s):
            faults.append("the tests fail with the reference patch")
    except VerifierError as error:
        faults.append(str(error))
    return Proof(repair.instance_id, tuple(faults))


def _kept(repair: Repair) -> list[str]:
    """What no patch may bring along: the files of the tests, and what Python would import in their place."""
    named = [test.split("::")[0] for test in (*repair.fail_to_pass, *repair.pass_to_pass)]
    dotted = [name.split(".") for name in named if not name.endswith(".py")]
    modules = {"/".join(parts[:count]) + ".py" for parts in dotted for count in range(1, len(parts) + 1)}
    tests = set(_TOUCHED.findall(repair.test_patch))
    stems = [PurePosixPath(file).with_suffix("") for file in tests]
    shadows = {f"{stem}{rest}" for stem in stems for rest in (".*", "/*")}
    return sorted(tests | modules | shadows | {name for name in named if name.endswith(".py")})


def _good(ran: Ran, what: str) -> Ran:
    if ran.exit_code != 0:
        raise VerifierError(f"{what}: {_last(ran)}")
    return ran


def _last(ran: Ran) -> str:
    lines = ran.output.strip().splitlines()
    return f"exit {ran.exit_code}: {lines[-1] if lines else 'no output'}"
