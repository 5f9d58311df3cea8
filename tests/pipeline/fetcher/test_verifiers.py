import math

import pytest

from pipeline.errors import ConfigError, VerifierError
from pipeline.fetcher.verifiers import load_verifier
from pipeline.records import Sampling, Stopping, Task


def task(answer="42", **metadata) -> Task:
    return Task(0, "d/1", "d", "t", (("user", "q"),), answer, "v", 1, Sampling(), Stopping(), 0, metadata=metadata)


def gym(generator, index=0, reward="exact", **params) -> Task:
    return task("", generator=generator, params=params, seed=0, size=50, index=index, reward=reward)


@pytest.mark.parametrize(
    ("name", "answer", "text", "reward"),
    [
        ("exact", "cat", " cat\n", 1.0),
        ("exact", "cat", "a cat", 0.0),
        ("exact", "cat", "", 0.0),
        ("contains", "Cat", "it is a CAT.", 1.0),
        ("contains", "cat", "dog", 0.0),
        ("numeric", "42", "the answer is 42.", 1.0),
        ("numeric", "1234.5", "1,234.50", 1.0),
        ("numeric", "-7", "first 3, then -7", 1.0),
        ("numeric", "42", "43", 0.0),
        ("numeric", "42", "no idea", 0.0),
        ("numeric", "1e3", "1000", 1.0),
    ],
)
def test_built_in_verifiers(name, answer, text, reward):
    assert load_verifier(name)(task(answer), text) == reward


def test_no_answer_is_not_zero():
    for name in ("exact", "contains", "numeric"):
        with pytest.raises(VerifierError):
            load_verifier(name)(task(None), "x")
    with pytest.raises(VerifierError, match="holds no number"):
        load_verifier("numeric")(task("cat"), "3")


def test_partial_credit_only_when_asked_for():
    verify = load_verifier("reasoning_gym")
    right = "".join(reversed(_word()))
    nearly = right[:-1] + "#"
    assert verify(gym("spell_backward"), right) == 1.0
    assert verify(gym("spell_backward"), nearly) == 0.0
    assert 0.0 < verify(gym("spell_backward", reward="score"), nearly) < 1.0


def _word() -> str:
    from pipeline.fetcher.gym import make_generator

    return make_generator("spell_backward", {}, seed=0, size=50)[0]["metadata"]["word"]


def test_scorer_of_tuples_and_of_junk():
    from pipeline.fetcher.gym import make_generator

    entry = make_generator("arc_agi", {}, seed=0, size=50)[3]
    assert load_verifier("reasoning_gym")(gym("arc_agi", 3), entry["answer"]) == 1.0
    with pytest.raises(VerifierError, match="is no item of reasoning_gym"):
        load_verifier("reasoning_gym")(task(), "x")


def test_own_verifier(tmp_path, monkeypatch):
    (tmp_path / "own_verifier_for_test.py").write_text(
        "def half(task, text): return 0.5\n"
        "def none(task, text): return None\n"
        "def raises(task, text): raise KeyError('x')\n"
        "def nan(task, text): return float('nan')\n"
        "def text(task, text): return '1'\n"
        "constant = 3\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    own = "own_verifier_for_test:"
    assert load_verifier(own + "half")(task(reward="score"), "") == 0.5
    assert load_verifier(own + "half")(task(), "") == 0.0
    assert load_verifier(own + "none")(task(), "") is None
    for name in ("raises", "nan", "text"):
        with pytest.raises(VerifierError, match=own + name):
            load_verifier(own + name)(task(), "")
    with pytest.raises(ConfigError, match="is a int, not a callable"):
        load_verifier(own + "constant")
    with pytest.raises(ConfigError, match="did you mean 'numeric'"):
        load_verifier("numerc")


def test_rewards_are_finite():
    assert math.isfinite(load_verifier("exact")(task("x"), "y"))
