"""The swe agent in real sandboxes: what it says and sees, what ends it, and what it is rewarded for."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from pipeline.agents.commands import block, command_in
from pipeline.agents.reference import first_file, mending_command, next_message, replaced_lines
from pipeline.agents.sealing import Seals
from pipeline.records import STUDENT, TEACHER, StepContext, Task
from pipeline.sandboxes.local import MISSING
from tests.pipeline.agents.repairing import DOWN, MEND, World

TASKS = Path(__file__).parents[2] / "configs" / "data" / "swe_tasks.jsonl"
ROWS = [json.loads(line) for line in TASKS.read_text().splitlines()]


@pytest.fixture(scope="module", autouse=True)
def needed() -> None:
    if shutil.which("bwrap") is None:
        pytest.skip(MISSING)


@pytest.fixture
def world(tmp_path: Path) -> World:
    return World(tmp_path, [DOWN])


async def test_a_mended_file_solves_the_task_and_the_patch_is_kept(world: World):
    sample, student = await world.play("I look. " + block("cat a.py"), block(MEND), block("submit"))
    assert (sample.status, sample.reward, sample.finish_reason) == ("ok", 1.0, "finish")
    assert "-    return x + 1\n+    return x - 1\n" in sample.text
    first, second, last = sample.turns
    assert first["action"] == "cat a.py" and first["output"] == DOWN["files"]["a.py"] and first["exit_code"] == 0
    assert second["action"] == MEND and last["patch"] == sample.text and first["executor"] == "student"
    assert "exit 0\ndef down(x):\n    return x + 1\n" in world.renderer.decode(student.prompts[1])


async def test_tokens_are_only_appended_and_what_was_said_stays_as_it_was(world: World):
    sample, student = await world.play(block("cat a.py"), block("ls"), block("submit"))
    for earlier, later in zip(student.prompts, student.prompts[1:], strict=False):
        assert (later[: len(earlier)] == earlier).all()
    whole = world.renderer.render(
        (
            *world.task.messages,
            ("assistant", block("cat a.py")),
            ("user", "exit 0\n" + DOWN["files"]["a.py"]),
            ("assistant", block("ls")),
            ("user", "exit 0\na.py\n"),
        )
    )
    assert student.prompts[2].tolist() == whole.tolist()
    said = sample.token_ids[sample.loss_mask == 1]
    assert world.renderer.decode(said) == block("cat a.py") + block("ls") + block("submit")
    assert (sample.executor[sample.loss_mask == 1] == STUDENT).all()


@pytest.mark.parametrize(
    ("stopping", "lines", "reason"),
    [
        ({"max_turns": 2}, [block("ls"), block("pwd")], "max_turns"),
        ({"max_repeats": 3}, [block("ls")], "repeated_action_loop"),
        ({"max_repeats": 2}, ["no command here"], "repeated_action_loop"),
        ({"max_context": 200}, [block("ls"), block("cat a.py a.py a.py"), block("pwd")], "context_overflow"),
        ({"max_seconds": 5}, [block("sleep 19"), block("pwd"), block("ls")], "agent_timeout"),
    ],
)
async def test_what_ends_an_episode(tmp_path: Path, stopping: dict[str, Any], lines: list[str], reason: str):
    world = World(tmp_path, [DOWN], **stopping)
    sample, _ = await world.play(*lines)
    assert (sample.status, sample.finish_reason, sample.reward) == ("ok", reason, 0.0)
    assert len(sample.token_ids) <= stopping.get("max_context", 10_000)


async def test_a_message_without_a_command_is_answered_by_what_is_expected(world: World):
    sample, student = await world.play("hello", block("ls") + block("pwd"), block(MEND), block("submit"))
    assert "exactly one command" in world.renderer.decode(student.prompts[1])
    assert [turn["action"] for turn in sample.turns] == [None, None, MEND, "submit"]
    assert sample.reward == 1.0


async def test_a_command_past_its_deadline_is_told_to_the_model(tmp_path: Path):
    world = World(tmp_path, [DOWN])
    world.config = world.config.model_copy(
        update={"specs": (world.config.specs[0].model_copy(update={"sandbox": world.config.specs[0].sandbox.model_copy(
            update={"command_timeout_s": 0.5})}),)}
    )  # fmt: skip
    _, student = await world.play(block("echo begun; sleep 60"), block("submit"))
    assert "stopped after 0.5 s\nbegun\n" in world.renderer.decode(student.prompts[1])


PASSING = "printf 'import unittest\\nclass T(unittest.TestCase):\\n  test_new = test_old = lambda self: None\\n'"


async def test_rewriting_the_tests_wins_nothing(world: World):
    sample, _ = await world.play(block(f"{PASSING} > test_a.py"), block("submit"))
    assert "test_a.py" in sample.text
    assert sample.reward == 0.0


ANYTHING = "class A({}):\n    __eq__ = lambda *a: True\n    __hash__ = int.__hash__\ndef down(x): return A({})\n"
TRICKS = {
    "shadows_the_runner": "echo > unittest.py",
    "shadows_the_tests": f"mkdir test_a; {PASSING} > test_a/__init__.py",
    "ends_at_import": "echo 'import os; os._exit(0)' > a.py",
    "ends_in_a_test": "echo 'def down(x): raise SystemExit(0)' > a.py",
    "ends_at_exit": "printf 'import atexit, os\\natexit.register(lambda: os._exit(0))\\ndef down(x): return 3\\n' > a.py",
    "ends_when_asked_for_tests": "printf 'import sys, os\\nif sys.argv[1:]: os._exit(0)\\n' > a.py",
    "equals_everything": f"cat > a.py <<'END'\n{ANYTHING.format('object', '')}END",
    "equals_everything_and_is_a_number": f"cat > a.py <<'END'\n{ANYTHING.format('int', '9')}END",
    "no_failure_is_recorded": "cat > a.py <<'END'\nimport unittest\nunittest.TestResult.addFailure = lambda *a: None\n"
    "down = lambda x: 9\nEND",
    "no_test_is_run": "cat > a.py <<'END'\nimport unittest\nunittest.TestCase.run = lambda self, into: into.addSuccess(self)\n"
    "down = lambda x: 9\nEND",
    "reads_the_answer": "cat > a.py <<'END'\nimport re\n"
    "down = lambda x: int((re.findall('== ([0-9]+)', open('test_a.py').read()) or '9')[0])\nEND",
    "fails_and_ends": "printf 'import atexit, os\\natexit.register(lambda: os._exit(0))\\ndef down(x): return 1 / 0\\n' > a.py",
    "says_what_is_asked_for": "cat > a.py <<'END'\nimport os, re, glob\nfor file in glob.glob('.[0-9a-f]*'):\n"
    "    for place in range(9): open(file, 'a').write(f'{place}\\n')\ndown = lambda x: 9\nEND",
}


@pytest.mark.parametrize("trick", TRICKS.values(), ids=TRICKS)
async def test_what_is_done_to_the_tests_and_their_runner_wins_nothing(world: World, trick: str):
    sample, _ = await world.play(block(trick), block("submit"))
    assert (sample.status, sample.reward) == ("ok", 0.0) and sample.text


def test_pytest_and_its_fixtures_see_the_same_tests(tmp_path: Path):
    seals = Seals(str(tmp_path / "said"))
    source = "import pytest\n@pytest.mark.parametrize('n', [1, 2])\ndef test_n(n, tmp_path):\n    assert n + 1 == n - -1\n"
    text = seals.seal(source + "    with pytest.raises(ValueError):\n        int('x')\n", ["test_n"])
    assert text is not None
    (tmp_path / "test_n.py").write_text(text)
    subprocess.run([sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "test_n.py"], cwd=tmp_path, check=True)
    assert seals.judge((tmp_path / "said").read_text().splitlines())


WRAPPED = {
    **DOWN,
    "patch": DOWN["patch"].replace("-1,2 +1,2", "-5,2 +5,2").replace("x + 1", "N(x + 1)").replace("x - 1", "N(x - 1)"),
    "files": {
        "a.py": "class N(object):\n    def __init__(self, n): self.n = n\n    def __eq__(self, other): return self.n == other\n\n"
        "def down(x):\n    return N(x + 1)\n"
    },
    "PASS_TO_PASS": [],
}


async def test_another_value_than_that_of_the_reference_counts_as_the_test_has_it(tmp_path: Path):
    task = {**DOWN, "PASS_TO_PASS": "[]"}
    fraction = "printf 'from fractions import Fraction\ndef down(x): return Fraction(x - {})\n' > a.py"
    for less, reward in ((1, 1.0), (2, 0.0)):
        sample, _ = await World(tmp_path, [task]).play(block(fraction.format(less)), block("submit"))
        assert sample.reward == reward


async def test_a_task_whose_tests_go_by_their_own_failures_can_be_solved(tmp_path: Path):
    test = "        with self.assertRaises(AssertionError):\n            self.assertEqual(down(2), 3)\n"
    patch = DOWN["test_patch"].replace("+        assert down(2) == 1\n", "".join(f"+{line}\n" for line in test.splitlines()))
    task = {**DOWN, "test_patch": patch.replace("+1,8", "+1,9")}
    sample, _ = await World(tmp_path, [task]).play(block(MEND), block("submit"))
    assert sample.reward == 1.0


async def test_a_program_whose_values_are_its_own_is_compared_by_the_test_where_the_reference_is_too(tmp_path: Path):
    sample, _ = await World(tmp_path, [WRAPPED]).play(block(MEND), block("submit"))
    assert sample.reward == 1.0
    sample, _ = await World(tmp_path, [WRAPPED]).play(block("sed -i 's/x + 1/x + 7/' a.py"), block("submit"))
    assert sample.reward == 0.0


@pytest.mark.parametrize(
    "left",
    [
        "mkfifo .gitignore",
        "mkdir x; chmod 000 x",
        "chmod 000 .",
        "git init -q x; touch x/y",
        "echo '* working-tree-encoding=none filter=x diff=y ident text eol=crlf' > .gitattributes",
        "printf 'x = \"\\351\"\\r\\n' > \"$(printf 'caf\\351')\"",
    ],
)
async def test_what_an_agent_leaves_behind_keeps_no_solution_from_counting(world: World, left: str):
    sample, _ = await world.play(block(MEND), block(left), block("submit"))
    assert (sample.status, sample.reward) == ("ok", 1.0)


async def test_a_change_that_breaks_what_worked_is_no_solution(world: World):
    sample, _ = await world.play(block("echo 'down = lambda x: 1 if x else 0.5' > a.py"), block("submit"))
    assert sample.reward == 0.0


async def test_a_patch_that_cannot_be_had_is_no_solution_and_says_why(world: World):
    sample, _ = await world.play(block(MEND), block("head -c 3000000 /dev/urandom > big"), block("submit"))
    assert (sample.status, sample.reward, sample.text, sample.turns[-1]["patch"]) == ("ok", 0.0, "", None)
    assert sample.turns[-1]["fault"] == "no patch: it is above 1048576 bytes"


async def test_a_file_that_is_not_utf8_is_mended(tmp_path: Path):
    folder = tmp_path / "repo"
    folder.mkdir()
    (folder / "a.py").write_bytes("# coding: latin-1\r\nNAME = 'é'\r\n".encode("latin-1") + DOWN["files"]["a.py"].encode())
    world = World(tmp_path, [{**{k: v for k, v in DOWN.items() if k != "files"}, "folder": str(folder)}])
    sample, _ = await world.play(block(MEND), block("submit"))
    assert sample.reward == 1.0
    assert "GIT binary patch" in sample.text and json.loads(json.dumps(sample.text)).encode() == sample.text.encode()


async def test_a_folder_that_does_not_exist_any_more_is_the_sandboxes_fault(tmp_path: Path):
    folder = tmp_path / "repo"
    folder.mkdir()
    (folder / "a.py").write_text(DOWN["files"]["a.py"])
    world = World(tmp_path, [{**{k: v for k, v in DOWN.items() if k != "files"}, "folder": str(folder)}])
    sample, _ = await world.play(block(MEND), block("submit"))
    assert sample.reward == 1.0 and (folder / "a.py").read_text() == DOWN["files"]["a.py"]
    shutil.rmtree(folder)
    sample, _ = await world.play(block("submit"))
    assert (sample.status, sample.abort_reason, sample.phase) == ("aborted", "infra_sandbox", "init")


def test_the_reference_teacher_says_commands_as_the_agent_reads_them(tmp_path: Path):
    task = World(tmp_path, [DOWN]).task
    asked = {"One command in a bash block.": ("bash", "submit")}
    asked["One ```mswea_bash_command block."] = ("mswea_bash_command", "echo COMPLETE_TASK_AND_SUBMIT_FINAL_OUTPUT")
    for so_far, (fence, submit) in asked.items():
        said = []
        for _ in range(3):
            said.append(next_message(task, so_far))
            so_far += said[-1]
        assert said[0] == f"```{fence}\ncat a.py\n```" and said[2] == f"```{fence}\n{submit}\n```"
        assert said[1].startswith(f"```{fence}\nsed -i")


async def test_the_reference_teacher_solves_the_task_and_takes_over_from_a_student(tmp_path: Path):
    world = World(tmp_path, [DOWN], "dagger")
    sample, _ = await world.play("?", context=StepContext(1, beta=1.0))
    assert sample.reward == 1.0 and len(sample.turns) == 3
    assert (sample.executor[sample.loss_mask == 1] == TEACHER).all() and (sample.versions == -1).all()
    world = World(tmp_path, [DOWN], "aggrevate", max_turns=8)
    task = replace(world.task, ordinal=next(o for o in range(99) if _kappa(world.task, o) == 2))
    sample, _ = await world.play(block("ls"), "what?", task=task, context=StepContext(1, t_max=3))
    assert [turn["executor"] for turn in sample.turns] == ["student"] * 2 + ["teacher"] * 3
    assert sample.reward == 1.0


def _kappa(task: Task, ordinal: int) -> int:
    from pipeline.agents.mixing import kappa

    return kappa(replace(task, ordinal=ordinal), 3)


@pytest.mark.parametrize("row", ROWS, ids=[row["instance_id"] for row in ROWS])
def test_the_teachers_command_has_the_effect_of_the_patch(row: dict[str, Any], tmp_path: Path):
    assert replaced_lines(row["patch"]) is not None
    name = first_file(row["patch"])
    (tmp_path / name).write_text(row["files"][name])
    subprocess.run(["bash", "-c", mending_command(row["patch"])], cwd=tmp_path, check=True)
    mended = (tmp_path / name).read_text()
    (tmp_path / name).write_text(row["files"][name])
    subprocess.run(["git", "apply", "-"], cwd=tmp_path, input=row["patch"], text=True, check=True)
    assert mended == (tmp_path / name).read_text() != row["files"][name]


def test_a_patch_that_adds_lines_is_applied_as_it_is(tmp_path: Path):
    patch = "--- a/a.txt\n+++ b/a.txt\n@@ -1,1 +1,2 @@\n one's\n+two\n"
    (tmp_path / "a.txt").write_text("one's\n")
    assert replaced_lines(patch) is None
    subprocess.run(["bash", "-c", mending_command(patch)], cwd=tmp_path, check=True)
    assert (tmp_path / "a.txt").read_text() == "one's\ntwo\n"


@pytest.mark.parametrize(
    ("text", "command"),
    [
        ("```bash\nls\n```", "ls"),
        ("I think\n```\nls -l\n```\nso", "ls -l"),
        ("```bash\na\n```\n```bash\nb\n```", None),
        ("ls", None),
        ("```bash\n\n```", None),
        ("```bash\ncat <<'E'\nx\nE\n```", "cat <<'E'\nx\nE"),
    ],
)
def test_which_command_a_message_holds(text: str, command: str | None):
    assert command_in(text) == command


def test_the_shipped_set_is_large_and_whole():
    assert len(ROWS) >= 25 and len({row["instance_id"] for row in ROWS}) == len(ROWS)
    assert all(row["FAIL_TO_PASS"] and row["PASS_TO_PASS"] for row in ROWS)
