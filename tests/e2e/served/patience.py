"""A verifier that takes its time, so that a test can stop an evaluation in the middle."""

import time


def patient(task, text: str) -> float:
    time.sleep(0.1)
    return 1.0
