"""What is done to a repair task in a sandbox: its patch taken, a patch applied, its tests run.

Invariant: a patch is judged in a fresh sandbox, and the tests that judge it are those of the test patch, whatever was done to them.
The patched program runs in one process with its tests, so that they pass is believed when it also gives the answers without them
(`sealing`).
"""

from __future__ import annotations

import re
import secrets
import shlex
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import PurePosixPath

from pipeline.agents.sealing import Seals
from pipeline.errors import PatchError, VerifierError
from pipeline.fetcher.swe import Repair
from pipeline.sandboxes.base import Contents, Ran, Sandbox

_SETTINGS = 'HOME="$PRIVATE" XDG_CONFIG_HOME="$PRIVATE" GIT_CONFIG_NOSYSTEM=1 GIT_ATTR_NOSYSTEM=1'
GIT = f'{_SETTINGS} git --git-dir="$PRIVATE/git" --work-tree=. -c core.fileMode=false -c core.looseCompression=0'
"""Apart from the task's own folder and from all settings: an agent neither sees it nor can change it."""
ATTRIBUTES = "* !text !eol !crlf !ident !filter !working-tree-encoding !diff"
"""Before those of the folder: files are taken as they are."""
GIT_S = 60.0
LEAST_S = 5.0
"""For running tests again, whatever the first time took: a patch is not to choose that nobody knows what it is worth."""
TEXT_BYTES = 2**20
UNREADABLE = "\ufffd"
"""What stands in an output for bytes that are not UTF-8."""
ABSENT = "_that_is_not_there"
"""Behind the id of a test: of none."""
_TOUCHED = re.compile(r"^(?:\+\+\+ b|--- a)/(\S.*)$", re.MULTILINE)
"""Paths that a patch changes."""

OpenSandbox = Callable[[str, Contents], Awaitable[Sandbox]]


async def remember(sandbox: Sandbox) -> None:
    """The state to which `patch_of` compares. Raises VerifierError."""
    ignored = 'printf "__pycache__/\\n*.pyc\\n" >> "$PRIVATE/git/info/exclude"'
    ours = f'{ignored} && echo "{ATTRIBUTES}" > "$PRIVATE/git/info/attributes"'
    command = f'{GIT} init -q && {ours} && {GIT} add -A && {GIT} write-tree > "$PRIVATE/tree"'
    _good(await sandbox.run(command, GIT_S, private=True), "the task's folder cannot be recorded")


async def patch_of(sandbox: Sandbox, timeout_s: float) -> str:
    """What was changed since `remember`, as a text: of files that are not UTF-8 it is git's binary patch. Raises PatchError, also
    when it takes too long.

    What git could not read, what is no file, and repositories in the folder keep nobody from it.
    """
    readable = r"chmod -R u+rwX .; find . -mindepth 2 -name .git -prune -exec rm -rf {} +; find . \( -type p -o -type s \) -delete"
    added = await _difference(sandbox, f"{readable}; {GIT} add -A", timeout_s)
    if UNREADABLE not in added.output:
        return added.output
    marked = 'echo "* -diff" >> "$PRIVATE/git/info/attributes"'
    return (await _difference(sandbox, marked, timeout_s - added.seconds)).output


async def _difference(sandbox: Sandbox, before: str, timeout_s: float) -> Ran:
    """before: what is done first."""
    command = f'{before} && {GIT} diff --cached --binary --no-renames $(cat "$PRIVATE/tree")'
    ran = await sandbox.run(command, timeout_s, private=True, output_bytes=TEXT_BYTES)
    if ran.timed_out:
        raise PatchError(f"no patch: it cannot be taken within {timeout_s:g} s")
    if ran.exit_code != 0 or ran.left_out:
        raise PatchError(f"no patch: {f'it is above {TEXT_BYTES} bytes' if ran.left_out else _last(ran)}")
    return ran


async def apply(sandbox: Sandbox, patch: str, but: Sequence[str] = ()) -> Ran:
    """but: paths that are left as they are."""
    excluded = " ".join(f"--exclude={shlex.quote(path)}" for path in but)
    return await sandbox.run(f"git apply --whitespace=nowarn {excluded} -", GIT_S, stdin=patch.encode())


async def run_tests(sandbox: Sandbox, repair: Repair, ids: Sequence[str], timeout_s: float) -> Ran:
    """Exit code 0: all of them pass."""
    return await sandbox.run(f"{repair.test_command} {shlex.join(ids)}", timeout_s)


async def solves(open_sandbox: OpenSandbox, repair: Repair, patch: str, timeout_s: float) -> bool:
    """Whether FAIL_TO_PASS and PASS_TO_PASS pass with the patch, and that is to be believed.

    It is when the program gives the right answers to tests that do not state them, and the runner fails what is not there; and
    where the reference patch cannot do that either. Raises VerifierError when it cannot be found out.
    """
    if not patch.strip():
        return False
    async with _patched(open_sandbox, repair, patch) as patched:
        if patched is None:
            return False
        ran = await run_tests(patched[0], repair, _tests(repair), timeout_s)
    if ran.exit_code != 0:
        return False
    left_s = max(LEAST_S, timeout_s - ran.seconds)
    return await _credible(open_sandbox, repair, patch, left_s) or not await _credible(open_sandbox, repair, repair.patch, left_s)


async def _credible(open_sandbox: OpenSandbox, repair: Repair, patch: str, timeout_s: float) -> bool:
    tests = _tests(repair)
    async with _patched(open_sandbox, repair, patch, tests) as patched:
        if patched is None:
            return False
        sandbox, seals = patched
        await run_tests(sandbox, repair, tests, timeout_s)
        said = await _read(sandbox, seals.said_in) if seals.places else ""
        if said is None or not seals.judge(said.splitlines()):
            return False
        absent = await run_tests(sandbox, repair, [tests[0] + ABSENT], LEAST_S)
        return absent.exit_code != 0 and not absent.timed_out


@asynccontextmanager
async def _patched(
    open_sandbox: OpenSandbox, repair: Repair, patch: str, sealed: Sequence[str] = ()
) -> AsyncIterator[tuple[Sandbox, Seals] | None]:
    """A fresh sandbox with the test patch, the seals of `sealed` tests, and the patch; None when it does not apply."""
    sandbox = await open_sandbox("verify", repair.contents)
    try:
        _good(await apply(sandbox, repair.test_patch), f"the test patch of {repair.instance_id} does not apply")
        seals = await _seal(sandbox, sealed)
        applied = await apply(sandbox, patch, _kept(repair))
        yield (sandbox, seals) if applied.exit_code == 0 else None
    finally:
        await sandbox.close()


async def _seal(sandbox: Sandbox, tests: Sequence[str]) -> Seals:
    """In place."""
    asked: dict[str, set[str]] = {}
    """Path -> names of tests that may be in that file."""
    for test in tests:
        for path, name in _places(test):
            asked.setdefault(path, set()).add(name)
    if not asked:
        return Seals("")
    named = "\0".join(asked).encode()
    looking = await sandbox.run("pwd; xargs -0 ls -d -- 2>/dev/null || true", GIT_S, stdin=named, output_bytes=TEXT_BYTES)
    there = _good(looking, "the tests cannot be found").output.splitlines()
    seals = Seals(f"{there[0]}/.{secrets.token_hex(8)}")
    for path in there[1:]:
        source = await _read(sandbox, path) if path in asked else None
        text = None if source is None else seals.seal(source, asked[path])
        if text is not None:
            writing = await sandbox.run(f"cat > {shlex.quote(path)}", GIT_S, stdin=text.encode())
            _good(writing, f"{path} cannot be sealed")
    return seals


async def _read(sandbox: Sandbox, path: str) -> str | None:
    """None for what is no text, not there, or above TEXT_BYTES."""
    ran = await sandbox.run(f"cat -- {shlex.quote(path)}", GIT_S, output_bytes=TEXT_BYTES)
    return None if ran.exit_code != 0 or ran.left_out or UNREADABLE in ran.output else ran.output


def _tests(repair: Repair) -> list[str]:
    return [*repair.fail_to_pass, *repair.pass_to_pass]


def _places(test: str) -> list[tuple[str, str]]:
    """Where a test may be, by its id: (path, name in that file)."""
    path, *names = test.split("::")
    if path.endswith(".py"):
        return [(path, ".".join(names).partition("[")[0])]
    parts = test.split(".")
    return [("/".join(parts[:count]) + ".py", ".".join(parts[count:])) for count in range(1, len(parts) + 1)]


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
    named = {path for test in _tests(repair) for path, _ in _places(test)}
    tests = set(_TOUCHED.findall(repair.test_patch))
    stems = [PurePosixPath(file).with_suffix("") for file in tests]
    shadows = {f"{stem}{rest}" for stem in stems for rest in (".*", "/*")}
    return sorted(tests | named | shadows)


def _good(ran: Ran, what: str) -> Ran:
    if ran.exit_code != 0:
        raise VerifierError(f"{what}: {_last(ran)}")
    return ran


def _last(ran: Ran) -> str:
    lines = ran.output.strip().splitlines()
    return f"exit {ran.exit_code}: {lines[-1] if lines else 'no output'}"
