import subprocess
import sys

from pipeline.observe.tensorboard import TensorboardWriter, read_scalars


def test_steps_are_written_once_over_restarts_and_none_is_left_out(tmp_path):
    for upto in (2, 3):
        writer = TensorboardWriter(tmp_path)
        for step in range(1, upto + 1):
            writer.add(
                "train", step, {"loss": float(step), "reward_mean": None, "mode": "x", "by": {"spell": 0.5}}, at=100.0 + step
            )
        writer.close()
    scalars = [item for item in read_scalars(tmp_path) if item[0] == "train/loss"]
    assert scalars == [("train/loss", 1, 1.0), ("train/loss", 2, 2.0), ("train/loss", 3, 3.0)]
    assert {tag for tag, _, _ in read_scalars(tmp_path)} == {"train/loss", "train/by/spell"}


def test_a_step_torn_by_a_crash_is_written_again_as_a_whole(tmp_path):
    writer = TensorboardWriter(tmp_path)
    writer.add("train", 1, {"loss": 1.0, "entropy": 2.0}, at=1.0)
    writer.add("train", 2, {"loss": 1.0, "entropy": 2.0}, at=2.0)
    writer.close()
    (path,) = tmp_path.iterdir()
    path.write_bytes(path.read_bytes()[:-5])
    again = TensorboardWriter(tmp_path)
    assert [again.add("train", step, {"loss": 1.0, "entropy": 2.0}, at=3.0) for step in (1, 2)] == [False, True]
    again.close()
    assert sorted(read_scalars(tmp_path)) == [
        (f"train/{name}", step, value) for name, value in (("entropy", 2.0), ("loss", 1.0)) for step in (1, 2)
    ]


def test_training_and_evaluation_may_share_a_step(tmp_path):
    writer = TensorboardWriter(tmp_path)
    assert writer.add("train", 25, {"loss": 1.0}, at=1.0)
    assert writer.add("eval", 25, {"accuracy": 0.5}, at=1.0)
    assert not writer.add("eval", 25, {"accuracy": 0.5}, at=1.0)
    writer.close()


def test_the_observer_imports_neither_torch_nor_ray_nor_matplotlib():
    code = (
        "import sys, pipeline.observe.observer, pipeline.cli.status, pipeline.cli.report;"
        "print([name for name in ('torch', 'ray', 'matplotlib', 'tensorflow') if name in sys.modules])"
    )
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.strip() == "[]"
