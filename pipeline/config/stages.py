"""Configuration of datasets, specs, rollouts, buffer and teacher stage."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Literal

from pydantic import Field, model_validator

from pipeline.config.base import Strict

SWE_CONCURRENCY = 4
"""Samples of one evaluator of task type `swe` that run at the same time."""


class SamplingPart(Strict):
    """None inherits from the level above."""

    temperature: float | None = Field(None, ge=0)
    top_p: float | None = Field(None, gt=0, le=1)
    top_k: int | None = Field(None, ge=0, lt=2**31)
    max_tokens: int | None = Field(None, ge=1, lt=2**31)


class StoppingPart(Strict):
    """None inherits from the level above."""

    max_turns: int | None = Field(None, ge=1)
    max_context: int | None = Field(None, ge=2)
    max_seconds: float | None = Field(None, gt=0)
    max_repeats: int | None = Field(None, ge=2)


class Split(Strict):
    """Held-out items are those with crc32(question) % modulus in `held_out`: a property of the item, not of its place."""

    modulus: int = Field(5, ge=2)
    held_out: tuple[int, ...] = (0,)


class Dataset(Strict):
    """One source of tasks."""

    source: str = "reasoning_gym"
    """`reasoning_gym`, `jsonl`, `parquet`, `swe`, or `module:attribute` (a callable that returns the items)."""
    task_type: str = "single_turn"
    """Decides which spec (agent, resources) plays it."""
    generator: str | None = None
    """reasoning_gym: name of the generator, for example spell_backward."""
    params: dict[str, Any] = {}
    """reasoning_gym: parameters of the generator; an own source: its keyword arguments."""
    size: int = Field(5000, ge=1)
    """reasoning_gym: items drawn before duplicates are removed."""
    seed: int = Field(0, ge=0)
    path: Path | None = None
    """jsonl, parquet and swe: the file, relative to the configuration file."""
    columns: dict[str, str] = {}
    """Maps `prompt`, `answer`, `id` to the file's own column names."""
    verifier: str | None = None
    """`exact`, `numeric`, `contains`, `reasoning_gym`, or `module:attribute`; None: the source's own."""
    reward: Literal["exact", "score"] = "exact"
    """`exact`: 1.0 when solved, else 0.0. `score`: the scorer's partial credit."""
    system: str | None = None
    """System message before every task."""
    template: str = "{question}"
    """How an item becomes the user's turn."""
    split: Split = Split()
    epochs: int | None = Field(None, ge=1)
    """Passes over the training split; None: as many as the steps need. When every dataset is exhausted the run ends."""
    weight: float = Field(1.0, gt=0)
    """Share of a training step, relative to the other datasets."""
    teacher: str | None = None
    """Alias in `teachers`; None: the only teacher, if there is exactly one and the algorithm needs one."""
    sampling: SamplingPart = SamplingPart()
    stopping: StoppingPart = StoppingPart()
    train: bool = True
    """Draw training tasks from it."""
    evaluate: bool = True
    """Evaluate on its held-out split."""


class ResourcePart(Strict):
    """What one sample needs while it runs."""

    gpu: float = Field(0.0, ge=0, le=1)
    cpu: float = Field(0.0, ge=0)
    memory_gb: float = Field(0.0, ge=0)
    concurrency: int = Field(64, ge=1)
    """Samples of one evaluator that run at the same time, at most; in a spec of task type `swe` 4 unless given."""
    custom: dict[str, float] = {}
    """Other things that a node has so many of (`layout.nodes.*.custom`): the pool counts them, Ray does not."""


class SandboxPart(Strict):
    """Where the commands of an agent run. CPU and memory are those of the sample's token; what it does not ask for is 1 each."""

    kind: Literal["local", "docker", "remote"] = "local"
    """`local`: bubblewrap on this machine. `docker`: a container each. `remote`: on a server of swe-rex. The last two need the
    extra `swerex`."""
    image: str | None = None
    """`docker`: the image, unless a task names its own. It has bash, python3 and git, and swe-rex or pipx."""
    url: str | None = None
    """`remote`: where `swerex-remote` answers."""
    token_env: str | None = None
    """`remote`: the environment variable that holds the server's token."""
    starts: int = Field(8, ge=1)
    """Sandboxes that a worker starts at the same time; this is apart from how many run."""
    processes: int = Field(64, ge=2)
    file_mb: int = Field(64, ge=1)
    """Of one file, and of each temporary folder."""
    command_timeout_s: float = Field(30.0, gt=0)
    output_bytes: int = Field(4096, ge=64)
    """Of one command's output that the model sees; the middle is left out."""

    @model_validator(mode="after")
    def _kind_has_its_place(self) -> SandboxPart:
        needed = {"local": (), "docker": ("image",), "remote": ("url", "token_env")}
        for key in ("image", "url", "token_env"):
            wanted, given = key in needed[self.kind], getattr(self, key) is not None
            if wanted and not given:
                raise ValueError(f"sandbox.kind {self.kind!r} needs sandbox.{key}")
            if given and not wanted:
                raise ValueError(f"sandbox.{key} is not for sandbox.kind {self.kind!r}")
        return self


class Spec(Strict):
    """How one task type is played; what a group or a sample sets itself comes before it."""

    evaluator_id: str | None = None
    """None: the task type."""
    task_type: str = "single_turn"
    agent: str = "single_turn"
    """Short name or `module:attribute`."""
    resource: ResourcePart = ResourcePart()
    run_resource: ResourcePart | None = None
    eval_resource: ResourcePart | None = None
    batch_size: int | None = Field(1, ge=1)
    """Tasks a batch; None: one open batch that is sealed at the end."""
    default_stopping: StoppingPart = StoppingPart()
    sandbox: SandboxPart = SandboxPart()
    init_timeout_s: float = Field(30.0, gt=0)
    turn_timeout_s: float = Field(120.0, gt=0)
    run_timeout_s: float = Field(600.0, gt=0)
    verify_timeout_s: float = Field(60.0, gt=0)
    cleanup_timeout_s: float = Field(30.0, gt=0)

    @model_validator(mode="before")
    @classmethod
    def _few_repairs_at_once(cls, said: Any) -> Any:
        """A repair keeps a sandbox busy: without a word in `resource.concurrency` fewer of them run than of other samples."""
        if not isinstance(said, dict) or said.get("task_type") != "swe":
            return said
        resource = said.get("resource", {})
        return said | {"resource": {"concurrency": SWE_CONCURRENCY} | resource} if isinstance(resource, dict) else said


class NodeLayout(Strict):
    gpus: tuple[int, ...] = ()
    cpu: float | None = Field(None, gt=0)
    memory_gb: float | None = Field(None, gt=0)
    custom: dict[str, float] = {}
    """How many there are of each thing that samples ask for in `custom`."""


class Layout(Strict):
    """The placement pool's nodes. Without one the pool is what the machine has left."""

    nodes: dict[str, NodeLayout | tuple[int, ...]] = {}
    """`{"node": [0, 1]}` (GPU ids; cpu and memory from the defaults) or `{"node": {"gpus": [0], "cpu": 8, "memory_gb": 32}}`."""
    default_cpu: float | None = Field(None, gt=0)
    default_memory_gb: float | None = Field(None, gt=0)


class Retries(Strict):
    infra: int = Field(3, ge=1)
    """Attempts an ordinal may lose to infrastructure faults."""
    data: int = Field(1, ge=1)
    """Attempts an ordinal may lose to faults of its own."""
    backoff_s: float = Field(0.5, ge=0)
    """Before the second attempt; doubles with each further one."""


class Filters(Strict):
    rejection: Literal["none", "all", "warmup_only"] = "none"
    """Keep samples with reward > 0: always, only while step < `warmup_steps`, or never."""
    warmup_steps: int = Field(0, ge=0)
    finish_only: bool = False
    """Keep samples that ended by themselves (`finish`)."""
    zero_advantage: bool = False
    """Drop groups whose rewards are all equal (they teach grpo nothing), and draw others."""
    max_refill: float = Field(1.0, ge=0)
    """Groups drawn in place of dropped ones, at most, as a share of `tasks_per_step`."""
    custom: str | None = None
    """`module:attribute`: a callable (Group) -> str | None, a reason to drop the group."""


class Rollout(Strict):
    tasks_per_step: int = Field(32, ge=1)
    samples_per_task: int = Field(4, ge=1)
    max_staleness: int = Field(1, ge=0)
    """Training step k uses rollouts of weight version >= k - 1 - max_staleness."""
    on_dropped: Literal["replace", "shrink"] = "replace"
    min_samples_per_group: int = Field(1, ge=1)
    """Samples that must have finished for a group to count."""
    min_step_fraction: float = Field(0.5, gt=0, le=1)
    """A step with a smaller share of its groups is skipped."""
    retries: Retries = Retries()
    max_consecutive_failures: int = Field(20, ge=1)
    """Failed groups in a row that end the run."""
    admission_patience_s: float = Field(30.0, gt=0)
    """A batch that waited longer is next, and nothing overtakes it."""
    strategy: str = "fifo"
    """`fifo`, `longest_first`, `interleaved` or `module:attribute`."""
    sampling: SamplingPart = SamplingPart()
    filters: Filters = Filters()
    reuse: str = "none"
    """`none`, or where the saved trajectories are that are replayed instead of rolling out: `run:<id>` (a run beside this one),
    `file:<path>` (a JSON object a line: task_id, samples: [{token_ids, loss_mask, logprobs, reward, executor}]), or a directory: a
    run's folder, or one of such files. A task without one is dropped as `not_saved`; `algorithm.passes` trains several times on
    each."""

    @model_validator(mode="after")
    def _group_holds_its_minimum(self) -> Rollout:
        if self.min_samples_per_group > self.samples_per_task:
            raise ValueError(
                f"rollout.min_samples_per_group {self.min_samples_per_group} is above "
                f"rollout.samples_per_task {self.samples_per_task}"
            )
        return self


class Buffer(Strict):
    capacity: int | None = Field(None, ge=1)
    """Groups reserved, written and ready at the same time; None: tasks_per_step * (max_staleness + 1)."""
    sampler: Literal["in_order", "ready_first", "windowed"] = "in_order"
    keep_groups: int | None = Field(None, ge=0)
    """Trained groups whose rows stay on disk behind what resume needs; None: all."""
    durable_samples: bool | None = None
    """Store each finished sample of an unfinished group; None: only for swe task types."""
    allow_network_fs: bool = False


class TeacherStage(Strict):
    max_batch_rows: int = Field(512, ge=1)
    """Rows (samples) of one scoring call."""
    max_batch_tokens: int = Field(65536, ge=1)
    linger_ms: float = Field(0.0, ge=0)
    """Wait this long for more work; void when upstream ended or the oldest group is of the step being trained."""
    call_timeout_s: float = Field(120.0, gt=0)
    max_consecutive_scoring_drops: int = Field(8, ge=1)
    mode: Literal["stage", "inline", "score_at_select"] = "stage"
    """`stage`: scored in batches while rollouts go on. `inline`: before the commit, with the permit held; there to be measured
    against. `score_at_select`: when the trainer takes the groups, which then waits for the teacher."""
