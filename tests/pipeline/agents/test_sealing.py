"""Sealed tests: what they say of a program, and how that is judged."""

from __future__ import annotations

from collections import OrderedDict
from fractions import Fraction
from pathlib import Path

import pytest

from pipeline.agents import saying
from pipeline.agents.sealing import Seals

ANYTHING = "type('A', (int,), {'__eq__': lambda *a: True, '__lt__': lambda *a: True, '__hash__': int.__hash__})(9)"
LIAR = (
    "type('A', (), {'__eq__': lambda *a: True, '__lt__': lambda *a: True, '__hash__': id,"
    " '__sub__': lambda *a: a[0], '__abs__': lambda a: a})()"
)


def judged(folder: Path, test: str, got: str) -> bool:
    """test: statements of a test. got: an expression, the value of f()."""
    seals = Seals(str(folder / "said"))
    source = f"'''Doc.'''\nfrom __future__ import annotations\ndef f(): return {got}\ndef test_f(self=None):\n"
    sealed = seals.seal(source + "".join(f"    {line}\n" for line in test.splitlines()), ["test_f"])
    assert sealed is not None
    (folder / "said").touch()
    globals_: dict = {}
    exec(compile(sealed, "t.py", "exec"), globals_)
    globals_["test_f"]()
    return seals.judge((folder / "said").read_text().splitlines())


@pytest.mark.parametrize(
    ("test", "right", "wrong"),
    [
        ("assert f() == 3", "3", "4"),
        ("assert 3 == f()", "3.0", "'3'"),
        ("self.assertEqual(f(), [1, (2.5, None)], 'why')", "[1, (2.5, None)]", "[1, [2.5, None]]"),
        ("assert f() == {'a': {1, 2}}", "{'a': {2, True}}", "{'b': {1, 2}}"),
        ("assert f() == 'é\\ud800'", "'é\\ud800'", "'e'"),
        ("got, wanted = f(), 2 * 2\nassert got == wanted", "4", "5"),
        ("assert f()", "[0]", "[]"),
        ("assert not f()", "{}", "1"),
        ("self.assertFalse(f())", "0.0", "'no'"),
        ("self.assertIsNone(f())", "None", "0"),
        ("self.assertIn(f(), (1, 2))", "2", "3"),
        ("assert abs(f() - 0.5) < 0.1", "0.45", "0.7"),
        ("for n in (1, 2):\n    assert f() == [n, n][n - 1] + 2 - n", "2", "1"),
    ],
)
def test_a_value_is_judged_as_the_test_would(tmp_path: Path, test: str, right: str, wrong: str):
    assert judged(tmp_path, test, right)
    (tmp_path / "said").unlink()
    assert not judged(tmp_path, test, wrong)


@pytest.mark.parametrize("test", ["assert f() == 3", "assert f() == 2 + 1", "self.assertEqual(3, f())", "assert [f()] == [3]"])
def test_what_equals_everything_is_never_right(tmp_path: Path, test: str):
    assert not judged(tmp_path, test, ANYTHING)


@pytest.mark.parametrize(
    "test", ["assert f() == 3", "assert [f()] == [3]", "assert f() < 3", "assert f()", "assert abs(f() - 3) < 1"]
)
def test_what_is_no_plain_data_is_left_to_the_test_unless_it_equals_everything(tmp_path: Path, test: str):
    assert judged(tmp_path, test, "__import__('fractions').Fraction(5, 2)")
    (tmp_path / "said").unlink()
    assert not judged(tmp_path, test, LIAR)


@pytest.mark.parametrize(
    ("test", "needed"),
    [
        ("with self.subTest():\n    assert f() == 3", True),
        ("for n in (1, 2):\n    assert f() == 3", True),
        ("def g(x):\n    return x\nassert g(f()) == 3", True),
        ("if f():\n    assert f() == 3", False),
        ("try:\n    assert f() == 3\nexcept KeyError:\n    pass", False),
    ],
)
def test_what_every_course_of_a_test_comes_by_must_be_said(test: str, needed: bool):
    seals = Seals("/said")
    seals.seal("def test_f():\n" + "".join(f"    {line}\n" for line in test.splitlines()), ["test_f"])
    assert seals.judge(["0", "1 n3"]) and seals.judge(["0"]) is not needed


@pytest.mark.parametrize(
    "lines", ["", "0", "1 n3", "0|1 n4", "0|1 n3|1 n4", "0|1 n3|", "0|1 n3|9 n3", "0 n3|1 n3", "00|1 n3", "0|1 n3 n3"]
)
def test_nothing_but_all_that_is_right_holds(lines: str):
    seals = Seals("/said")
    seals.seal("def test_f():\n    assert f() == 3\n", ["test_f"])
    assert seals.judge(["1 n3", "0"])
    assert not seals.judge(lines.split("|"))


def test_the_answers_are_not_in_a_sealed_test_and_the_others_stay():
    source = "class T:\n    def test_a(self):\n        assert f() == 1234\n    def test_b(self):\n        assert f() == 5678\n"
    for tests in (["T.test_a", "T.test_c"], ["T"]):
        text = Seals("/said").seal(source, tests)
        assert text is not None and "1234" not in text and ("5678" in text) == (tests != ["T"])
    assert Seals("/said").seal(source, ["T.test_c"]) is None


def test_a_test_may_end_early_and_one_that_is_not_understood_stays(tmp_path: Path):
    assert judged(tmp_path, "assert f() == 3\nif f():\n    return\nassert f() == 4", "3")
    assert Seals("/said").seal("def test_f(:\n", ["test_f"]) is None


def test_equal_values_have_one_text_and_others_another():
    class Word(str):
        def __eq__(self, other: object) -> bool:
            return True

        __hash__ = str.__hash__

    class Name(str):
        pass

    assert saying.text(Name("a")) == saying.text("a") != saying.text(b"a") and saying.text([Word("a")]) == saying.LIAR
    assert saying.text(OrderedDict(a=1)) == saying.FOREIGN, "it decides what it equals"
    assert saying.text({1: [True], "b": {1.5}}) == saying.text({"b": frozenset([1.5]), True: [1.0]})
    assert len({saying.text(value) for value in (0, "", b"", None, [], (), {}, set(), "0", 0.5, "x" * 999, "x" * 998)}) == 12
    assert all(saying.text(value) == saying.FOREIGN for value in (Fraction(1), [object()], float("nan"), {1: iter(())}))
