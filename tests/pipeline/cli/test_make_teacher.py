import json


def test_a_teacher_is_made_once_and_judged_on_held_out_items(rollout, config_file, tmp_path):
    small = [
        "teachers.big={architecture: {hidden: 16, layers: 1, heads: 2, mlp: 16}, supervised: {steps: 2, batch: 4}}",
        "eval.items=5",
        "student.supervised={steps: 1}",
    ]
    code, out, _ = rollout("make-teacher", config_file, *small, "--runs-dir", tmp_path / "runs", "--json")
    made = json.loads(out)["teachers"]["big"]
    assert code == 0
    assert (made["total"], made["accuracy"]) == (5, made["solved"] / 5)
    assert made["path"].startswith(str(tmp_path / "runs" / ".cache" / "teachers"))
    again = rollout("make-teacher", config_file, *small, "--runs-dir", tmp_path / "runs", "--alias", "big")[1]
    assert made["path"] in again and f"{made['solved']}/5 held-out items solved" in again


def test_unknown_alias(rollout, config_file):
    code, _, err = rollout("make-teacher", config_file, "--alias", "bigg")
    assert (code, err) == (2, "error: --alias 'bigg': teachers are ['big']; did you mean 'big'?\n")
    code, _, err = rollout("make-teacher", config_file, "teachers={}", "algorithm.name=grpo")
    assert (code, err) == (2, "error: teachers: the configuration has none with a model\n")
