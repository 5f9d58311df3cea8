from __future__ import annotations

import pytest
from pydantic import ValidationError

from pipeline.config.training import Schedule, TMax, Trainer
from pipeline.trainer.schedules import learning_rate, t_max, value


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
    with pytest.raises(ValidationError, match="algorithm.t_max.start 20 is above algorithm.t_max.cap 16"):
        TMax(start=20)


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        ({"lr_schedule": "constant"}, {1: 0.25, 2: 0.5, 4: 1.0, 5: 1.0, 14: 1.0}),
        ({"lr_schedule": "constant", "warmup_steps": 0}, {1: 1.0, 14: 1.0}),
        ({"lr_schedule": "linear", "lr_floor": 0.2}, {1: 0.25, 4: 1.0, 5: 0.92, 9: 0.6, 14: 0.2, 20: 0.2}),
        ({"lr_schedule": "linear", "lr_floor": 0.0, "warmup_steps": 0}, {7: 0.5, 14: 0.0}),
        ({"lr_schedule": "cosine", "lr_floor": 0.2}, {2: 0.5, 4: 1.0, 9: 0.6, 14: 0.2, 15: 0.2}),
        ({"warmup_steps": 20}, {5: 0.25, 14: 0.7}),
    ],
)
def test_learning_rate_warms_up_and_falls_to_its_floor_at_the_last_step(settings, expected):
    trainer = Trainer(**{"steps": 14, "lr": 1.0, "warmup_steps": 4, **settings})
    assert {step: round(learning_rate(trainer, step), 6) for step in expected} == expected


def test_by_default_the_learning_rate_falls():
    trainer = Trainer()
    assert learning_rate(trainer, trainer.steps) < learning_rate(trainer, trainer.steps // 2) < trainer.lr
