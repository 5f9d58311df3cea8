"""Values by step, as pure functions: what `plan` prints is what a run uses.

Steps are 1-based; at step 0 (before training) and during the warm-up a schedule has its start value.
"""

from __future__ import annotations

import math

from pipeline.config.training import Schedule, TMax, Trainer


def value(schedule: Schedule, step: int) -> float:
    """The schedule's value at a training step. n = max(0, step - warmup_steps) steps of decay have been taken.

    linear: start + (end - start) n / decay_steps; cosine: end + (start - end) (1 + cos(pi n / decay_steps)) / 2, both held at
    `end` afterwards; exponential: max(end, start rate^n); step: start rate^(n // every).
    """
    taken = max(0, step - schedule.warmup_steps)
    share = min(1.0, taken / schedule.decay_steps)
    if schedule.kind == "linear":
        return schedule.start + (schedule.end - schedule.start) * share
    if schedule.kind == "cosine":
        return schedule.end + (schedule.start - schedule.end) * (1.0 + math.cos(math.pi * share)) / 2.0
    if schedule.kind == "exponential":
        return max(schedule.end, schedule.start * schedule.rate**taken)
    if schedule.kind == "step":
        return schedule.start * schedule.rate ** (taken // schedule.every)
    return schedule.start


def t_max(settings: TMax, step: int) -> int:
    """min(start + slope * step, cap), rounded down; slope 0 is a constant."""
    return int(min(settings.start + settings.slope * step, settings.cap))


def learning_rate(settings: Trainer, step: int) -> float:
    """Learning rate of a training step: linear from lr / warmup_steps to lr, then down to lr * lr_floor at the last step.

    It depends on `trainer.steps`, which a resume may raise: a recorded step is replayed with the rate that was recorded.
    """
    warmup = settings.warmup_steps
    decay = Schedule(
        kind=settings.lr_schedule,
        start=settings.lr,
        end=settings.lr * settings.lr_floor,
        warmup_steps=warmup,
        decay_steps=max(1, settings.steps - warmup),
    )
    return value(decay, step) * (min(1.0, step / warmup) if warmup else 1.0)
