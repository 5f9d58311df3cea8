"""Configuration of the algorithm, the trainer, evaluation and what is shown."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, model_validator

from pipeline.config.base import Strict

Share = Annotated[float, Field(ge=0, lt=1)]


class Schedule(Strict):
    """A value by step. After warmup_steps `linear` and `cosine` go from start to end over decay_steps; `exponential` and `step`
    fall by their rate."""

    kind: Literal["constant", "linear", "cosine", "exponential", "step"] = "constant"
    start: float = 0.0
    end: float = 0.0
    """Also the floor of `exponential`."""
    rate: float = Field(0.9, gt=0)
    """`exponential`: factor a step. `step`: factor every `every` steps."""
    every: int = Field(10, ge=1)
    warmup_steps: int = Field(0, ge=0)
    """Steps at `start` before the decay begins."""
    decay_steps: int = Field(100, ge=1)


class TMax(Strict):
    """t_max(step) = min(start + slope * step, cap); slope 0 is a constant."""

    start: int = Field(0, ge=0)
    slope: float = Field(0.0, ge=0)
    cap: int = Field(16, ge=0)

    @model_validator(mode="after")
    def _starts_below_its_cap(self) -> TMax:
        if self.start > self.cap:
            raise ValueError(f"algorithm.t_max.start {self.start} is above algorithm.t_max.cap {self.cap}")
        return self


class Opd(Strict):
    """On-policy distillation: pull the student towards the teacher on the student's own tokens."""

    coefficient: float = Field(1.0, ge=0)
    signal: Literal["sampled", "topk", "full"] = "topk"
    """What the teacher returns: the logprob of the sampled token, of the top k tokens, or of the whole vocabulary."""
    direction: Literal["reverse", "forward"] = "forward"
    """`topk` and `full`: KL(student || teacher) or KL(teacher || student). `sampled` is always reverse."""
    top_k: int = Field(4, ge=1)
    advantage: Literal["raw", "mean", "whiten"] = "whiten"
    """`sampled`: the advantage as it is, minus the batch mean, or whitened over the batch."""
    ratio_truncate: float = Field(4.0, gt=0)
    """Importance weights pi / mu are cut here."""
    ratio_low: float = Field(0.0, ge=0)
    ratio_high: float = Field(1e4, gt=0)
    """Tokens whose ratio is outside [ratio_low, ratio_high] are masked and counted."""


class Grpo(Strict):
    """Group-relative policy optimisation."""

    coefficient: float = Field(1.0, ge=0)
    std: bool = True
    """Divide by the group's standard deviation."""
    clip_low: float = Field(0.2, gt=0, lt=1)
    clip_high: float = Field(0.2, gt=0)
    aggregate: Literal["token", "sequence"] = "token"
    """Mean over all tokens of the step, or over sequences of their token means."""


class Imitation(Strict):
    """Learning from what was done: `dagger` and `aggrevate` from the teacher's tokens, `iter_sft` from all of a kept sample."""

    coefficient: float = Field(1.0, ge=0)
    """Of the cross-entropy."""
    kl_coefficient: float = Field(0.1, ge=0)
    """`aggrevate`: of KL(behaviour || student) on the student's own tokens."""


class Algorithm(Strict):
    name: Literal["opd", "grpo", "grpo_opd", "dagger", "aggrevate", "iter_sft"] = "opd"
    opd: Opd = Opd()
    grpo: Grpo = Grpo()
    imitation: Imitation = Imitation()
    beta: Schedule = Schedule()
    """`dagger`: probability that the teacher acts in a turn."""
    t_max: TMax = TMax()
    """`aggrevate`: the student plays the first kappa turns of a task, kappa uniform on 0..t_max, and the teacher the rest."""
    passes: int = Field(1, ge=1)
    """Passes over each step's groups."""

    def wants_teacher(self) -> bool:
        """To score what the student said."""
        return self.name in ("opd", "grpo_opd")

    def mixes(self) -> bool:
        """A teacher plays some of the turns."""
        return self.name in ("dagger", "aggrevate")

    def imitates(self) -> bool:
        return self.mixes() or self.name == "iter_sft"


class Trainer(Strict):
    steps: int = Field(100, ge=1)
    lr: float = Field(1e-3, gt=0)
    """The highest learning rate: reached after `warmup_steps`, then following `lr_schedule`."""
    warmup_steps: int = Field(10, ge=0)
    lr_schedule: Literal["constant", "linear", "cosine"] = "linear"
    """From the end of the warm-up to the last of `steps`. With a constant rate a run may end in one of its dips."""
    lr_floor: float = Field(0.1, ge=0, le=1)
    """Share of `lr` that is left at the last step."""
    betas: tuple[Share, Share] = (0.9, 0.99)
    weight_decay: float = Field(0.0, ge=0)
    clip_norm: float = Field(1.0, gt=0)
    minibatches: int = Field(1, ge=1)
    """Optimizer steps a training step; the groups are split evenly."""
    max_tokens_per_chunk: int = Field(16384, ge=1)
    """Padded tokens of one forward pass; gradients accumulate over chunks."""
    max_sample_tokens: int | None = Field(None, ge=2)
    """Longer samples are rejected with a reason; None: the model's context."""
    save_every: int = Field(20, ge=1)
    keep_checkpoints: int = Field(2, ge=2)
    """At least two: resume falls back to the last but one when the newest is torn."""
    seed: int = 0
    threads: int = Field(1, ge=1)
    min_teacher_coverage: float = Field(0.99, ge=0, le=1)
    """Share of trained tokens that a teacher column must reach; less fails the run."""


class Eval(Strict):
    every: int = Field(25, ge=0)
    """Steps between evaluations; 0: only before the first and after the last step."""
    items: int = Field(256, ge=1)
    """Held-out items a dataset, at most."""
    n: int = Field(1, ge=1)
    """Samples an item."""
    k: tuple[Annotated[int, Field(ge=1)], ...] = Field((1,), min_length=1)
    """pass@k for each; k > n is refused."""
    temperature: float = Field(0.0, ge=0)
    max_tokens: int | None = Field(None, ge=1)
    min_coverage: float = Field(0.9, ge=0, le=1)
    """Share of samples that must be scored for the point to be valid."""
    hold_s: float = Field(60.0, gt=0)
    """How long publishing new weights waits for a running evaluation."""
    teacher: bool = True
    """Evaluate the teachers once, for the summary."""
    beta: float = Field(0.0, ge=0, le=1)
    """Probability that the teacher acts in a turn of an evaluation; 0: the student plays alone."""


TrackerName = Literal["tensorboard", "wandb", "trackio"]


class Observe(Strict):
    trackers: tuple[TrackerName, ...] = ("tensorboard",)
    """Where scalars go beside metrics.jsonl; `wandb` (offline) and `trackio` (local) are extras of these names."""
    bars: bool = True
    stall_s: float = Field(120.0, gt=0)
    """No progress for this long, anywhere, fails the run and names the stage. Samples that play may take as long as the deadlines
    of their spec allow."""
    details: bool = True
    """Write eval_details for training steps, too."""


class Ray(Strict):
    num_cpus: int | None = Field(None, ge=1)
    """Logical CPUs that Ray may hand out; None: the machine's."""
    num_gpus: int | None = Field(None, ge=0)
    """GPUs that Ray may hand out; None: the machine's."""
    address: str | None = None
    """An existing cluster, with workflow storage, whose nodes all see the run folder; None: a private one on loopback that lives
    with the run."""
    object_store_mb: int = Field(256, ge=80)


class Run(Strict):
    id: str | None = None
    name: str = "run"
    """Generated ids start with it."""
    seed: int = Field(0, ge=0)
    stop_grace_s: float = Field(30.0, ge=0)
    window_steps: int = Field(40, ge=1)
    """Training steps of one workflow."""
    max_actor_restarts: int = Field(3, ge=0)
    """Restarts of one actor without progress in between that fail the run."""
    start_timeout_s: float = Field(180.0, gt=0)
    ray: Ray = Ray()
