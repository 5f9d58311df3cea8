"""What an evaluation is asked to be, and the tasks that it becomes.

Invariant: the plan of a request is a pure function of (request, configuration), and holds every sample that will be played.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass, replace
from typing import Annotated, Any

from pydantic import ConfigDict, Field, field_validator, model_validator

from pipeline.config.base import Many, Request, RequestPart
from pipeline.config.schema import RunConfig
from pipeline.config.stages import SamplingPart
from pipeline.errors import RequestRefused
from pipeline.fetcher.catalog import Catalog
from pipeline.fetcher.verifiers import NEED_ANSWER
from pipeline.importing import is_reference
from pipeline.records import Sampling, Stopping, Task

INLINE = "inline"
"""Name of a data set whose items come with the request, unless it says one."""
INLINE_TYPE = "single_turn"
MAX_N = 1024
MAX_SAMPLES = 100_000
PassAt = Annotated[int, Field(ge=1, le=MAX_N)]
_ANSWERED = {
    "anyOf": [
        {"required": ["answer"], "properties": {"answer": {"type": "string"}}},
        {"required": ["verifier"], "properties": {"verifier": {"not": {"enum": list(NEED_ANSWER)}}}},
    ]
}
_ONE_SOURCE = {
    "anyOf": [
        {"required": ["name"], "properties": {"name": {"type": "string"}, "items": {"type": "null"}}},
        {"required": ["items"], "properties": {"items": {"type": "array"}, "limit": {"type": "null"}}},
    ]
}


class Item(RequestPart):
    """One problem that comes with the request."""

    model_config = ConfigDict(json_schema_extra=_ANSWERED)

    prompt: str = Field(min_length=1)
    answer: str | None = None
    verifier: str = "exact"
    """`exact`, `numeric`, `contains`, or a verifier that the configuration names."""

    @model_validator(mode="after")
    def _answered(self) -> Item:
        if self.verifier in NEED_ANSWER and self.answer is None:
            raise ValueError(f"verifier {self.verifier!r} compares with an answer")
        return self


class DatasetPart(RequestPart):
    """A data set of the configuration by `name`, or `items` (then `name` is what the results are called)."""

    model_config = ConfigDict(json_schema_extra=_ONE_SOURCE)

    name: str | None = Field(None, min_length=1)
    items: Many[Item] | None = Field(None, min_length=1)
    limit: int | None = Field(None, ge=1)
    """Held-out items at most; None: `eval.items`."""

    @model_validator(mode="after")
    def _one_source(self) -> DatasetPart:
        if self.name is None and self.items is None:
            raise ValueError("a data set needs a name or items")
        if self.items is not None and self.limit is not None:
            raise ValueError("limit is for data sets by name: send fewer items")
        return self


class RequestSampling(SamplingPart):
    model_config = ConfigDict(strict=True)


class EvalRequest(Request):
    """Body of `POST /v1/evals`."""

    model: str = "live"
    """`live`, or the path of a checkpoint below the folder of runs."""
    datasets: Many[DatasetPart] = ()
    """Empty: every data set of the configuration that is evaluated."""
    n: int | None = Field(None, ge=1, le=MAX_N)
    """Samples an item; None: `eval.n`, and no fewer than `k` needs."""
    k: PassAt | Many[PassAt] | None = None
    """pass@k for each, a number or a list; None: those of `eval.k` that n allows."""
    sampling: RequestSampling = RequestSampling()
    """What it leaves out is as in the configuration's evaluation."""
    seed: int | None = None
    """Modulo 2^63; None: `run.seed`."""

    @field_validator("k")
    @classmethod
    def _one_is_a_list(cls, k: int | tuple[int, ...] | None) -> tuple[int, ...] | None:
        return tuple(dict.fromkeys([k] if isinstance(k, int) else k)) if k is not None else None


@dataclass(frozen=True, slots=True)
class Plan:
    tasks: tuple[Task, ...]
    k: tuple[int, ...]

    @property
    def total(self) -> int:
        return sum(task.samples for task in self.tasks)


def make_plan(request: EvalRequest, config: RunConfig, catalog: Catalog) -> Plan:
    """Raises RequestRefused, naming the key: 404 for a name that is not known, 409 for what contradicts itself or is too much."""
    n = max([config.eval.n, *(request.k or ())]) if request.n is None else request.n
    k = tuple(size for size in config.eval.k if size <= n) if request.k is None else request.k
    if k and max(k) > n:
        raise RequestRefused(409, "invalid_k", f"pass@{max(k)} needs at least as many samples: k <= n = {n}", "k")
    seed = config.run.seed if request.seed is None else request.seed % 2**63
    tasks = [
        replace(
            task,
            samples=n,
            seed=seed,
            sampling=_sampling(task.sampling, request.sampling),
            needs=(),
            teacher=task.teacher if config.eval.beta else None,
        )
        for task in (*_named(request, catalog), *_inline(request, config, catalog))
    ]
    plan = Plan(tuple(replace(task, ordinal=ordinal) for ordinal, task in enumerate(tasks)), k)
    if plan.total > MAX_SAMPLES:
        raise RequestRefused(409, "too_large", f"{plan.total} samples are asked for, at most {MAX_SAMPLES} are played", "datasets")
    return plan


def _sampling(base: Sampling, part: RequestSampling) -> Sampling:
    return replace(base, **{name: value for name, value in part.model_dump().items() if value is not None})


def _named(request: EvalRequest, catalog: Catalog) -> list[Task]:
    """In the order in which the configuration's own evaluations play them."""
    evaluated = {name for name, shelf in catalog.shelves.items() if shelf.settings.evaluate}
    if not request.datasets:
        return catalog.eval_tasks()
    tasks: list[Task] = []
    limits: dict[str, int | None] = {}
    for place, part in enumerate(request.datasets):
        if part.items is not None:
            continue
        if part.name not in evaluated:
            message = f"{part.name!r} is no data set that is evaluated here; known are {sorted(evaluated)}"
            raise RequestRefused(404, "unknown_dataset", message, f"datasets.{place}.name")
        if part.name in limits:
            raise RequestRefused(409, "double_dataset", f"{part.name!r} is named twice", f"datasets.{place}.name")
        limits[part.name] = part.limit
    for limit in dict.fromkeys(limits.values()):
        tasks += [task for task in catalog.eval_tasks(limit) if task.dataset in limits and limits[task.dataset] == limit]
    return tasks


def _inline(request: EvalRequest, config: RunConfig, catalog: Catalog) -> list[Task]:
    known = {*NEED_ANSWER, *(item.verifier for shelf in catalog.shelves.values() for item in shelf.held_out)} - {"reasoning_gym"}
    names = {part.name for part in request.datasets if part.items is None}
    base = Sampling(temperature=config.eval.temperature, max_tokens=config.eval.max_tokens or Sampling().max_tokens)
    tasks: list[Task] = []
    for place, part in enumerate(request.datasets):
        if part.items is None:
            continue
        if all(spec.task_type != INLINE_TYPE for spec in config.specs):
            message = f"items are played as {INLINE_TYPE!r}, for which the configuration has no spec"
            raise RequestRefused(409, "no_spec", message, f"datasets.{place}.items")
        name = part.name or (INLINE if INLINE not in names else f"{INLINE}_{place}")
        if name in names:
            raise RequestRefused(409, "double_dataset", f"two data sets are called {name!r}", f"datasets.{place}.name")
        names.add(name)
        for number, item in enumerate(part.items):
            _check_item(item, known, f"datasets.{place}.items.{number}")
            tasks.append(_task(name, number, item, base))
    return tasks


def _check_item(item: Item, known: set[str], key: str) -> None:
    """A verifier by reference loads code: only one that the server's configuration names is taken from a request."""
    if item.verifier not in known:
        what = "is not one that the configuration names" if is_reference(item.verifier) else "is unknown"
        raise RequestRefused(404, "unknown_verifier", f"{item.verifier!r} {what}; known are {sorted(known)}", f"{key}.verifier")


def _task(dataset: str, number: int, item: Item, sampling: Sampling) -> Task:
    return Task(
        ordinal=0,
        task_id=f"{dataset}/{number}",
        dataset=dataset,
        task_type=INLINE_TYPE,
        messages=(("user", item.prompt),),
        answer=item.answer,
        verifier=item.verifier,
        samples=1,
        sampling=sampling,
        stopping=Stopping(),
        seed=0,
    )


def task_record(task: Task) -> dict[str, Any]:
    """JSON-able; `task_of` reads it."""
    return asdict(task)


def task_of(record: dict[str, Any]) -> Task:
    parts = dict(record)
    parts["messages"] = tuple((role, content) for role, content in parts["messages"])
    parts["needs"] = tuple(parts["needs"])
    return Task(**parts | {"sampling": Sampling(**parts["sampling"]), "stopping": Stopping(**parts["stopping"])})
