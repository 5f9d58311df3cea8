from __future__ import annotations

import pytest

from pipeline.config.training import Schedule, TMax
from pipeline.trainer.schedules import t_max, value, warmed_lr


@pytest.mark.parametrize(
    ("schedule", "expected"),
    [
        ({"kind": "constant", "start": 0.3}, {0: 0.3, 1: 0.3, 500: 0.3}),
        ({"kind": "linear", "start": 1.0, "end": 0.0, "decay_steps": 10}, {0: 1.0, 1: 0.9, 5: 0.5, 10: 0.0, 11: 0.0}),
        (
            {"kind": "linear", "start": 1.0, "end": 0.2, "warmup_steps": 4, "decay_steps": 4},
            {4: 1.0, 5: 0.8, 6: 0.6, 8: 0.2, 99: 0.2},
        ),
        (
            {"kind": "cosine", "start": 1.0, "end": 0.0, "decay_steps": 4},
            {0: 1.0, 1: 0.853553, 2: 0.5, 3: 0.146447, 4: 0.0, 9: 0.0},
        ),
        ({"kind": "exponential", "start": 1.0, "end": 0.1, "rate": 0.5}, {0: 1.0, 1: 0.5, 2: 0.25, 3: 0.125, 4: 0.1, 90: 0.1}),
        ({"kind": "step", "start": 1.0, "rate": 0.5, "every": 10}, {0: 1.0, 9: 1.0, 10: 0.5, 19: 0.5, 20: 0.25}),
        ({"kind": "step", "start": 1.0, "rate": 0.5, "every": 2, "warmup_steps": 3}, {3: 1.0, 4: 1.0, 5: 0.5, 7: 0.25}),
    ],
)
def test_values_by_step(schedule, expected):
    found = {step: round(value(Schedule(**schedule), step), 6) for step in expected}
    assert found == expected


def test_t_max_rises_to_its_cap_and_a_slope_of_zero_is_a_constant():
    assert [t_max(TMax(start=1, slope=0.5, cap=3), step) for step in range(1, 7)] == [1, 2, 2, 3, 3, 3]
    assert {t_max(TMax(start=5, slope=0.0, cap=16), step) for step in range(1, 50)} == {5}


def test_learning_rate_warms_up_by_step():
    assert [warmed_lr(1.0, 4, step) for step in (1, 2, 4, 5)] == [0.25, 0.5, 1.0, 1.0]
    assert warmed_lr(1.0, 0, 1) == 1.0
