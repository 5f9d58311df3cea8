"""Tests without the answers: where a test compares a value with one that it states, the statement is taken out of it and kept here.
What the program under test gave is said by the test and judged here, so that no runner has a say in it, and nothing that equals
everything.

Invariant: of a program with which the test passes, a sealed test says what is right, unless the test goes by its own failures; from
a test that is not understood nothing is taken.
"""

from __future__ import annotations

import ast
from collections.abc import Collection, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from pipeline.agents import saying

SAYING = Path(saying.__file__).read_text(encoding="utf-8")
COMPARED: dict[str, type[ast.cmpop]] = {
    **dict.fromkeys(("assertEqual", "assertListEqual", "assertTupleEqual", "assertSetEqual", "assertDictEqual"), ast.Eq),
    **{"assertMultiLineEqual": ast.Eq, "assertNotEqual": ast.NotEq, "assertIs": ast.Is, "assertIsNot": ast.IsNot},
    **{"assertIn": ast.In, "assertNotIn": ast.NotIn, "assertLess": ast.Lt, "assertLessEqual": ast.LtE},
    **{"assertGreater": ast.Gt, "assertGreaterEqual": ast.GtE, "assertIsNone": ast.Is, "assertIsNotNone": ast.IsNot},
}
FALSE = frozenset(saying.text(value) for value in (None, False, "", b"", (), [], {}, set()))
Function = ast.FunctionDef | ast.AsyncFunctionDef


@dataclass(frozen=True, slots=True)
class Place:
    """Where a test says something."""

    kind: Literal["equal", "true", "false", "end"]
    wanted: str | None = None
    """Text that the value must have; None: both values are said."""

    def holds(self, said: list[str]) -> bool:
        if self.kind == "end":
            return not said
        if self.kind == "equal":
            return said == [self.wanted] if self.wanted is not None else len(said) == 2 and said[0] == said[1]
        return len(said) == 1 and (said[0] in FALSE) == (self.kind == "false")


@dataclass(slots=True)
class Seals:
    """Of all test files of one task."""

    said_in: str
    """Absolute path, in the sandbox, of the file that sealed tests write."""
    places: list[Place] = field(default_factory=list)
    needed: set[int] = field(default_factory=set)
    """Those at which every course of a test comes by."""

    def seal(self, source: str, tests: Collection[str]) -> str | None:
        """tests: `Class.method`, `function`, `Class`, or "" for all. Returns the sealed text; None when none of them is in it."""
        try:
            tree = ast.parse(source)
        except (SyntaxError, ValueError, RecursionError):
            return None
        asked = [function for name, function in _functions(tree.body) if any(_is_part(name, test) for test in tests)]
        if not asked:
            return None
        for function in asked:
            self._seal(function)
        at = 1 if ast.get_docstring(tree) is not None else 0
        while at < len(tree.body) and isinstance(tree.body[at], ast.ImportFrom) and tree.body[at].module == "__future__":
            at += 1
        beginning = f"_said = {{}}; exec({SAYING!r}, _said); _say, _look = _said['begin']({self.said_in!r})"
        tree.body[at:at] = ast.parse(beginning).body
        return ast.unparse(ast.fix_missing_locations(tree))

    def judge(self, lines: list[str]) -> bool:
        """Whether all that was to be said was said, and is right. What is no plain data is, unless it equals everything."""
        numbers = {str(number): number for number in range(len(self.places))}
        said: set[int] = set()
        for line in lines:
            name, *texts = line.split(" ")
            number = numbers.get(name)
            if number is None or saying.LIAR in texts:
                return False
            if saying.FOREIGN not in texts and not self.places[number].holds(texts):
                return False
            said.add(number)
        return self.needed <= said

    def place(self, place: Place) -> int:
        self.places.append(place)
        return len(self.places) - 1

    def _seal(self, function: Function) -> None:
        end = self.place(Place("end"))
        self.needed.add(end)
        sealer = _Sealer(self, end)
        body: list[ast.stmt] = []
        for statement in function.body:
            made = sealer.visit(statement)
            body += made if isinstance(made, list) else [made]
        if not sealer.returns:
            self.needed |= sealer.straight
        function.body = [*body, _say(end)]


class _Sealer(ast.NodeTransformer):
    """Of the statements of one test."""

    def __init__(self, seals: Seals, end: int) -> None:
        self._seals = seals
        self._end = end
        self._branches = 0
        self.straight: set[int] = set()
        """Places that are in no branch."""
        self.returns = False

    def visit_Assert(self, node: ast.Assert) -> ast.stmt:
        return self._assertion(node.test)

    def visit_Expr(self, node: ast.Expr) -> ast.stmt:
        test = _asserted(node.value)
        return node if test is None else self._assertion(test)

    def visit_If(self, node: ast.stmt) -> ast.AST:
        self._branches += 1
        try:
            return self.generic_visit(node)
        finally:
            self._branches -= 1

    visit_Try = visit_While = visit_Match = visit_If

    def visit_Return(self, node: ast.Return) -> list[ast.stmt]:
        self.returns = True
        return [_say(self._end), node]

    def visit_FunctionDef(self, node: ast.AST) -> ast.AST:
        """What is defined within a test is no part of its course."""
        return node

    visit_AsyncFunctionDef = visit_ClassDef = visit_Lambda = visit_FunctionDef

    def _assertion(self, test: ast.expr) -> ast.stmt:
        if isinstance(test, ast.Compare) and len(test.ops) == 1 and isinstance(test.ops[0], ast.Eq):
            left, right = test.left, test.comparators[0]
            known = [_literal(side) for side in (left, right)]
            values = [left] if known[1] is not None else [right] if known[0] is not None else [left, right]
            return _say(self._place(Place("equal", known[1] or known[0])), *values)
        negated = isinstance(test, ast.UnaryOp) and isinstance(test.op, ast.Not)
        number = self._place(Place("false" if negated else "true"))
        return _say(number, _Looker(number).visit(test.operand if negated else test))

    def _place(self, place: Place) -> int:
        number = self._seals.place(place)
        if not self._branches:
            self.straight.add(number)
        return number


class _Looker(ast.NodeTransformer):
    """A class decides what its objects are compared with, and what comes of reckoning with them."""

    def __init__(self, place: int) -> None:
        self._place = place

    def visit_Compare(self, node: ast.Compare) -> ast.AST:
        self.generic_visit(node)
        node.left, node.comparators = self._look(node.left), [self._look(other) for other in node.comparators]
        return node

    def visit_BinOp(self, node: ast.BinOp) -> ast.AST:
        self.generic_visit(node)
        node.left, node.right = self._look(node.left), self._look(node.right)
        return node

    def _look(self, node: ast.expr) -> ast.expr:
        return node if isinstance(node, ast.Constant) else _call("_look", self._place, node)


def _functions(body: list[ast.stmt], within: str = "") -> Iterator[tuple[str, Function]]:
    """Name in its module -> the last definition of it."""
    found: dict[str, Function] = {}
    for node in body:
        if isinstance(node, Function):
            found[within + node.name] = node
        elif isinstance(node, ast.ClassDef):
            found |= dict(_functions(node.body, f"{within}{node.name}."))
    yield from found.items()


def _is_part(name: str, test: str) -> bool:
    """Of a class or a module that is asked for, its tests are."""
    whole = not test or name.startswith(f"{test}.")
    return name == test or (whole and name.rpartition(".")[2].startswith("test"))


def _asserted(call: ast.expr) -> ast.expr | None:
    """What a method of unittest asserts, as an expression."""
    match call:
        case ast.Call(func=ast.Attribute(value=ast.Name(id="self"), attr=name), args=[first, *others]):
            pass
        case _:
            return None
    if any(isinstance(argument, ast.Starred) for argument in (first, *others)):
        return None
    if name in ("assertTrue", "assertFalse"):
        return first if name == "assertTrue" else ast.UnaryOp(ast.Not(), first)
    if name not in COMPARED:
        return None
    other = ast.Constant(None) if name.endswith("None") else others[0] if others else None
    return None if other is None else ast.Compare(first, [COMPARED[name]()], [other])


def _literal(node: ast.expr) -> str | None:
    """The text of what it states."""
    try:
        text = saying.text(ast.literal_eval(node))
    except (ValueError, TypeError, SyntaxError, MemoryError, RecursionError):
        return None
    return None if text == saying.FOREIGN else text


def _say(number: int, *values: ast.expr) -> ast.stmt:
    return ast.Expr(_call("_say", number, *values))


def _call(name: str, number: int, *values: ast.expr) -> ast.Call:
    return ast.Call(ast.Name(name, ast.Load()), [ast.Constant(number), *values], [])
