"""The whole configuration of a run. Cross-field rules that need no machine are checked here, once."""

from __future__ import annotations

from pydantic import Field, model_validator

from pipeline.config.base import Strict
from pipeline.config.models import Engine, ModelSource, Teacher
from pipeline.config.stages import Buffer, Dataset, Layout, Rollout, Spec, TeacherStage
from pipeline.config.training import Algorithm, Eval, Observe, Run, Trainer


class RunConfig(Strict):
    """Top level of a configuration file."""

    run: Run = Run()
    student: ModelSource
    teachers: dict[str, Teacher] = {}
    datasets: dict[str, Dataset] = Field(min_length=1)
    specs: tuple[Spec, ...] = (Spec(),)
    layout: Layout | None = None
    """Or the path of a file (YAML or JSON) that holds it, relative to the configuration file."""
    rollout: Rollout = Rollout()
    buffer: Buffer = Buffer()
    teacher_stage: TeacherStage = TeacherStage()
    algorithm: Algorithm = Algorithm()
    trainer: Trainer = Trainer()
    eval: Eval = Eval()
    engine: Engine = Engine()
    observe: Observe = Observe()

    @model_validator(mode="after")
    def _references_exist(self) -> RunConfig:
        types = {spec.task_type for spec in self.specs}
        for name, dataset in self.datasets.items():
            if dataset.task_type not in types:
                raise ValueError(f"datasets.{name}.task_type {dataset.task_type!r} has no spec; specs cover {sorted(types)}")
            if dataset.teacher is not None and dataset.teacher not in self.teachers:
                raise ValueError(f"datasets.{name}.teacher {dataset.teacher!r} is unknown; teachers are {sorted(self.teachers)}")
            if dataset.train and self.asks_teacher() and self.teacher_of(name) is None:
                raise ValueError(
                    f"algorithm.name {self.algorithm.name!r} needs a teacher for datasets.{name}; set datasets.{name}.teacher "
                    f"to one of {sorted(self.teachers)}"
                )
        if not any(dataset.train for dataset in self.datasets.values()):
            raise ValueError("no dataset has train: true")
        return self

    @model_validator(mode="after")
    def _teachers_can_do_what_is_asked(self) -> RunConfig:
        for name in self.datasets:
            alias = self.teacher_of(name)
            if alias is None:
                continue
            teacher = self.teachers[alias]
            if self.algorithm.wants_teacher() and teacher.engine == "reference":
                raise ValueError(f"teachers.{alias}.engine 'reference' cannot score tokens: use it with dagger or aggrevate")
            if self.algorithm.mixes() and teacher.engine == "fixed_cost":
                raise ValueError(f"teachers.{alias}.engine 'fixed_cost' cannot act: use torch or reference")
            if self.algorithm.mixes() and teacher.shots:
                raise ValueError(f"teachers.{alias}.shots {teacher.shots}: a teacher that acts reads the student's own prompt")
        if self.eval.beta and not self.algorithm.mixes():
            raise ValueError(f"eval.beta {self.eval.beta:g}: no teacher acts under algorithm.name {self.algorithm.name!r}")
        return self

    @model_validator(mode="after")
    def _capacity_holds_the_window(self) -> RunConfig:
        needed = self.rollout.tasks_per_step * (self.rollout.max_staleness + 1)
        if self.capacity < needed:
            raise ValueError(
                f"buffer.capacity {self.capacity} is below {needed} = rollout.tasks_per_step {self.rollout.tasks_per_step}"
                f" * (rollout.max_staleness {self.rollout.max_staleness} + 1)"
            )
        return self

    @model_validator(mode="after")
    def _pass_at_k_has_samples(self) -> RunConfig:
        if max(self.eval.k) > self.eval.n:
            raise ValueError(f"eval.k {max(self.eval.k)} is above eval.n {self.eval.n}: pass@k needs n >= k samples")
        return self

    @property
    def capacity(self) -> int:
        return self.buffer.capacity or self.rollout.tasks_per_step * (self.rollout.max_staleness + 1)

    def asks_teacher(self) -> bool:
        """To score, or to act."""
        return self.algorithm.wants_teacher() or self.algorithm.mixes()

    def teacher_of(self, dataset: str) -> str | None:
        """Alias of the teacher that scores a dataset or acts in it, or None when the algorithm asks for none."""
        if not self.asks_teacher():
            return None
        named = self.datasets[dataset].teacher
        if named is None and len(self.teachers) == 1:
            return next(iter(self.teachers))
        return named

    def evaluation_due(self, step: int) -> bool:
        """Before the first step (0), after the last one, and every `eval.every` steps between."""
        if step in (0, self.trainer.steps):
            return True
        return self.eval.every > 0 and step % self.eval.every == 0

    def needs_of(self, dataset: str) -> tuple[str, ...]:
        """Fields that must be produced before a group of this dataset is ready to be trained on."""
        if self.teacher_stage.mode == "score_at_select":  # the trainer has them produced once it has selected
            return ()
        return ("teacher",) if self.algorithm.wants_teacher() and self.teacher_of(dataset) is not None else ()
