"""A task of your own: where the problems come from, and what a response is worth."""

from random import Random


def sums(count: int, largest: int, seed: int = 0):
    """Problems as dicts: `prompt`, and `answer` where there is one; other keys reach the verifier as `task.metadata["row"]`."""
    rng = Random(seed)
    for _ in range(count):
        left, right = rng.randint(0, largest), rng.randint(0, largest)
        yield {"prompt": f"{left}+{right}=", "answer": str(left + right), "largest": largest}


def close_enough(task, text: str) -> float:
    """1.0 for the right number, less the further away it is, 0.0 for what is no number."""
    if not text.strip().isdigit():
        return 0.0
    return max(0.0, 1.0 - abs(int(text) - int(task.answer)) / task.metadata["row"]["largest"])
