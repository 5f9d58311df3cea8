"""The start-up proof: everything that a run asks of Ray fits, and every batch that a spec will ask for can be placed.

Invariant: the arithmetic is the pool's own (`nodes.capacity`, whole units), so what is admitted here can always be placed, and
what could never be placed is refused here, before anything starts, with the sum and the key to change.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from typing import Any

from pipeline.config.models import Launch
from pipeline.config.provenance import resolve_sampling
from pipeline.config.schema import RunConfig
from pipeline.config.stages import NodeLayout
from pipeline.errors import AdmissionError, ConfigError
from pipeline.evaluator.machine import Machine
from pipeline.evaluator.nodes import UNBOUNDED, Need, capacity, need_of
from pipeline.evaluator.spec import CPU_UNIT, CUSTOM_UNIT, MEMORY_UNIT, EvaluatorSpec, NodeSpec, Resource, Units, specs_from_config

INFRASTRUCTURE_CPU = 0.01
"""Logical CPUs of a stage actor, a workflow node, a replica and a worker: bookkeeping, so that one CPU is enough for all."""
STAGES = ("Fetcher", "Batcher", "EvaluatorPool", "TeacherScorer", "ReplayBuffer", "Trainer")
NODES_A_STEP = 6
"""Workflow nodes of one step, evaluation included, that may run at the same time."""


@dataclass(frozen=True, slots=True)
class Line:
    """One line of the bill: `count` times these resources for `who`."""

    who: str
    count: int
    cpu: float
    gpu: float = 0.0
    memory_gb: float = 0.0


@dataclass(frozen=True, slots=True)
class Tokens:
    """Of one spec: what a batch asks for at once, and what the empty pool holds (None: the samples ask for nothing)."""

    asked: int
    held: int | None


@dataclass(frozen=True, slots=True)
class Proof:
    lines: tuple[Line, ...]
    """What is asked, the pool's nodes last."""
    total: Line
    machine: Line
    remaining: Line
    pool: tuple[NodeSpec, ...]
    """Nodes of the placement pool: the bundles of the run's placement group."""
    tokens: dict[str, Tokens] = field(default_factory=dict)
    """By evaluator id."""

    def table(self) -> str:
        """For people: one line a demand, then the sum, then the tokens."""
        rows = [("asks", "count", "cpu", "gpu", "memory GB")]
        rows += [
            (line.who, str(line.count), _n(line.cpu * line.count), _n(line.gpu * line.count), _n(line.memory_gb * line.count))
            for line in (*self.lines, self.total, self.machine, self.remaining)
        ]
        widths = [max(len(row[column]) for row in rows) for column in range(5)]
        text = ["  ".join(cell.ljust(widths[0]) if not i else cell.rjust(widths[i]) for i, cell in enumerate(row)) for row in rows]
        for name, tokens in self.tokens.items():
            held = "any number of" if tokens.held is None else str(tokens.held)
            text.append(f"spec {name}: a batch asks for {tokens.asked} tokens; the pool holds {held}")
        return "\n".join(text)

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)


def prove(config: RunConfig, machine: Machine) -> Proof:
    """Raises AdmissionError (a demand that can never be met) or ConfigError (a layout that says too little)."""
    check_student_engine(config)
    check_interpreters(config)
    specs = specs_from_config(config)
    nodes = list(machine.by_node())
    layout = layout_nodes(config)
    fixed = fixed_lines(config, workers=max(1, len(layout) if layout is not None else len(nodes)))
    left = _without(nodes, fixed)
    if layout is None:
        pool = tuple(left)
        left = [NodeSpec(node.node) for node in left]
    else:
        left = _place_layout(left, layout)
        pool = layout
    tokens = {spec.evaluator_id: _check_spec(config, spec, pool, layout is not None) for spec in specs.values()}
    lines = (*fixed, *(Line(f"pool on {node.node}", 1, node.cpu, float(len(node.gpu_ids)), node.memory_gb) for node in pool))
    return Proof(lines, _sum("total asked", lines), _line("machine", machine.by_node()), _line("remaining", left), pool, tokens)


def check_student_engine(config: RunConfig) -> None:
    """Raises ConfigError for an engine that cannot do what training asks of it."""
    if config.engine.kind == "openai":
        raise ConfigError("engine.kind 'openai' takes no new weights: the student of a run needs torch, vllm or sglang")
    if config.engine.kind != "sglang":
        return
    for name, dataset in config.datasets.items():
        sampling = resolve_sampling(config, name).value
        if dataset.train and sampling.temperature > 0 and (sampling.top_p < 1 or sampling.top_k):
            raise ConfigError(
                f"datasets.{name}: sampling top_p {sampling.top_p:g}, top_k {sampling.top_k}: engine.kind 'sglang' gives"
                " logprobs of the uncut distribution, which are not those sampled from; set top_p 1, top_k 0, or use vllm or torch"
            )


def check_interpreters(config: RunConfig) -> None:
    """Raises ConfigError for a launched engine whose environment is not there."""
    launched = {"engine": config.engine.launch} | {f"teachers.{name}": each.launch for name, each in config.teachers.items()}
    for key, launch in launched.items():
        if launch is not None and not launch.python.is_file():
            raise ConfigError(f"{key}.launch.python {launch.python}: no such interpreter; `make engines` makes environments")


def layout_nodes(config: RunConfig) -> tuple[NodeSpec, ...] | None:
    """The configured layout as nodes; None when there is none. Raises ConfigError for a node that has no cpu or memory."""
    layout = config.layout
    if layout is None:
        return None
    nodes = []
    for name, entry in layout.nodes.items():
        part = entry if isinstance(entry, NodeLayout) else NodeLayout(gpus=entry)
        cpu = part.cpu if part.cpu is not None else layout.default_cpu
        memory_gb = part.memory_gb if part.memory_gb is not None else layout.default_memory_gb
        for key, value in (("cpu", cpu), ("memory_gb", memory_gb)):
            if value is None:
                raise ConfigError(
                    f"layout.nodes.{name} says no {key}; set layout.nodes.{name}.{key} or layout.default_{key}"
                    " (leaving it out does not mean zero)"
                )
        if len(set(part.gpus)) != len(part.gpus):
            raise ConfigError(f"layout.nodes.{name}.gpus {list(part.gpus)} names a GPU twice")
        nodes.append(NodeSpec(name, part.gpus, cpu, memory_gb, tuple(sorted(part.custom.items()))))
    if not nodes:
        raise ConfigError("layout.nodes is empty; leave `layout` out to use what the machine has left")
    return tuple(nodes)


def fixed_lines(config: RunConfig, workers: int) -> tuple[Line, ...]:
    """What a run asks for besides its pool."""
    cpu = INFRASTRUCTURE_CPU
    steps = config.rollout.max_staleness + 1
    lines = [
        *(Line(f"actor {stage}", 1, cpu) for stage in STAGES),
        Line("actor EvaluatorWorker", workers, cpu),
        Line("workflow nodes", NODES_A_STEP * steps, cpu),
        _engine_line("engine student", config.engine.replicas, config.engine.launch),
    ]
    served = {alias: teacher for alias, teacher in config.teachers.items() if teacher.has_engine()}
    lines += [_engine_line(f"engine teacher {alias}", teacher.replicas, teacher.launch) for alias, teacher in served.items()]
    return tuple(lines)


def _engine_line(who: str, replicas: int, launch: Launch | None) -> Line:
    if launch is None:
        return Line(who, replicas, INFRASTRUCTURE_CPU)
    return Line(f"{who}, launched", replicas, max(INFRASTRUCTURE_CPU, launch.cpus), launch.gpus)


def _check_spec(config: RunConfig, spec: EvaluatorSpec, pool: tuple[NodeSpec, ...], from_layout: bool) -> Tokens:
    per_sample = spec.sample_resource
    held = capacity(pool, per_sample)
    if held == 0:
        raise AdmissionError(_fits_nowhere(spec, pool, from_layout))
    most_tasks = config.rollout.tasks_per_step if spec.batch_size is None else spec.batch_size
    samples = min(most_tasks, config.rollout.tasks_per_step) * config.rollout.samples_per_task
    asked = spec.tokens_for(samples)
    if asked > held:
        sums = "; ".join(f"{node.node} holds {capacity([node], per_sample)}" for node in pool)
        raise AdmissionError(
            f"spec {spec.evaluator_id!r}: a batch asks for {asked} tokens (at most {samples} samples and concurrency"
            f" {spec.resource.concurrency}) of {_sample(per_sample)}, but the pool"
            f" holds {held} ({sums}); lower specs.{spec.task_type}.resource.concurrency to {held} or less, or"
            f" {'enlarge layout.nodes' if from_layout else 'ask for less a sample'}"
        )
    return Tokens(asked, None if held >= UNBOUNDED else held)


def _fits_nowhere(spec: EvaluatorSpec, pool: tuple[NodeSpec, ...], from_layout: bool) -> str:
    wanted = spec.sample_resource
    need = need_of(wanted)
    nearest = max(pool, key=lambda node: _nearness(node, need))
    short = []
    if need.gpu and not nearest.gpu_ids:
        short.append(("gpu", f"gpu {_n(wanted.gpu)} > 0"))
    have = Units.of(0, nearest.cpu, nearest.memory_gb)
    if need.cpu > have.cpu:
        short.append(("cpu", f"cpu {_n(wanted.cpu)} > {_n(nearest.cpu)}"))
    if need.memory > have.memory:
        short.append(("memory_gb", f"memory_gb {_n(wanted.memory_gb)} > {_n(nearest.memory_gb)}"))
    for name, units in need.custom:
        there = dict(nearest.custom).get(name, 0.0)
        if units > there * CUSTOM_UNIT:
            short.append((f"custom.{name}", f"{name} {_n(wanted.custom[name])} > {_n(there)}"))
    keys = " and ".join(f"specs.{spec.task_type}.resource.{key}" for key, _ in short)
    enlarge = f", or raise layout.nodes.{nearest.node}" if from_layout else ", or use a machine that has it"
    return (
        f"spec {spec.evaluator_id!r}: one sample asks for {_sample(wanted)}, which fits no"
        f" node; the nearest is {nearest.node!r}: {', '.join(text for _, text in short)}; lower {keys}{enlarge}"
    )


def _nearness(node: NodeSpec, need: Need) -> tuple[int, float]:
    """How many of the demands the node meets, then the smallest share of a demand that it has."""
    have = Units.of(0, node.cpu, node.memory_gb)
    shares = [have.cpu / need.cpu if need.cpu else 1.0, have.memory / need.memory if need.memory else 1.0]
    shares.append(1.0 if not need.gpu or node.gpu_ids else 0.0)
    shares += [dict(node.custom).get(name, 0.0) * CUSTOM_UNIT / units for name, units in need.custom]
    return sum(share >= 1.0 for share in shares), min(shares)


def _without(nodes: list[NodeSpec], lines: tuple[Line, ...]) -> list[NodeSpec]:
    """Nodes minus the fixed demands, one by one, each on the first node that still holds it. A GPU that a part of is taken from
    is no GPU of the pool."""
    free = [Units.of(0, node.cpu, node.memory_gb).cpu for node in nodes]
    shares = [dict.fromkeys(node.gpu_ids, 1.0) for node in nodes]
    for line in lines:
        need = Units.of(0, line.cpu, 0).cpu
        for _ in range(line.count):
            fitting = (index for index, cpu in enumerate(free) if cpu >= need and _gpus_for(line.gpu, shares[index]) is not None)
            place = next(fitting, None)
            if place is None:
                total, have = _sum("", lines), _sum("", [_line(node.node, [node]) for node in nodes])
                gpus, key = ("GPU", "run.ray.num_cpus or run.ray.num_gpus") if line.gpu else ("", "run.ray.num_cpus")
                raise AdmissionError(
                    f"{line.who} asks for {_of(line, gpus)} and no node has it left: the run asks for {_of(total, gpus)} besides"
                    f" its pool, the machine has {_of(have, gpus)}; raise {key}"
                )
            free[place] -= need
            for gpu in _gpus_for(line.gpu, shares[place]):
                shares[place][gpu] -= min(line.gpu, 1.0)
    rest = zip(nodes, free, shares, strict=True)
    return [
        NodeSpec(node.node, tuple(gpu for gpu, share in gpus.items() if share == 1.0), cpu / CPU_UNIT, node.memory_gb)
        for node, cpu, gpus in rest
    ]


def _of(line: Line, gpus: str) -> str:
    return f"{_n(line.cpu)} CPU" + (f" and {_n(line.gpu)} {gpus}" if gpus else "")


def _gpus_for(amount: float, shares: dict[int, float]) -> list[int] | None:
    """Whole GPUs, or the fullest one that still holds a fraction, as Ray packs them; None: not on this node."""
    if amount == 0:
        return []
    if amount >= 1:
        whole = [gpu for gpu, share in shares.items() if share == 1.0]
        return whole[: int(amount)] if len(whole) >= amount else None
    holding = [gpu for gpu, share in shares.items() if round(share - amount, 6) >= 0]
    return [min(holding, key=lambda gpu: shares[gpu])] if holding else None


def _place_layout(left: list[NodeSpec], layout: tuple[NodeSpec, ...]) -> list[NodeSpec]:
    """What remains when each node of the layout stands on a node of the machine: its namesake, else the tightest that fits."""
    left = list(left)
    for wanted in sorted(layout, key=lambda node: (-len(node.gpu_ids), -node.cpu, -node.memory_gb)):
        fitting = [index for index, node in enumerate(left) if _holds(node, wanted)]
        if not fitting:
            nearest = max(left, key=lambda node: (len(node.gpu_ids) >= len(wanted.gpu_ids), node.cpu, node.memory_gb))
            raise AdmissionError(
                f"layout.nodes.{wanted.node} asks for {_resource(len(wanted.gpu_ids), wanted.cpu, wanted.memory_gb)}, which fits no"
                f" node of the machine; the nearest, {nearest.node!r}, has"
                f" {_resource(len(nearest.gpu_ids), nearest.cpu, nearest.memory_gb)} left; lower layout.nodes.{wanted.node} or"
                " raise run.ray.num_cpus"
            )
        chosen = min(fitting, key=lambda index: (left[index].node != wanted.node, left[index].cpu, left[index].memory_gb))
        node, gpus = left[chosen], len(wanted.gpu_ids)
        have, need = Units.of(0, node.cpu, node.memory_gb), Units.of(0, wanted.cpu, wanted.memory_gb)
        cpu, memory_gb = (have.cpu - need.cpu) / CPU_UNIT, (have.memory - need.memory) / MEMORY_UNIT
        left[chosen] = NodeSpec(node.node, node.gpu_ids[gpus:], cpu, memory_gb)
    return left


def _holds(node: NodeSpec, wanted: NodeSpec) -> bool:
    have, need = Units.of(0, node.cpu, node.memory_gb), Units.of(0, wanted.cpu, wanted.memory_gb)
    return len(node.gpu_ids) >= len(wanted.gpu_ids) and have.cpu >= need.cpu and have.memory >= need.memory


def _sum(who: str, lines: tuple[Line, ...]) -> Line:
    return Line(
        who,
        1,
        round(sum(line.cpu * line.count for line in lines), 3),
        round(sum(line.gpu * line.count for line in lines), 4),
        round(sum(line.memory_gb * line.count for line in lines), 3),
    )


def _line(who: str, nodes: tuple[NodeSpec, ...] | list[NodeSpec]) -> Line:
    return _sum(who, tuple(Line(node.node, 1, node.cpu, float(len(node.gpu_ids)), node.memory_gb) for node in nodes))


def _sample(wanted: Resource) -> str:
    custom = "".join(f", {name} {_n(amount)}" for name, amount in sorted(wanted.custom.items()))
    return _resource(wanted.gpu, wanted.cpu, wanted.memory_gb) + custom


def _resource(gpu: float, cpu: float, memory_gb: float) -> str:
    return f"gpu {_n(gpu)}, cpu {_n(cpu)}, memory_gb {_n(memory_gb)}"


def _n(value: float) -> str:
    return f"{value:.4f}".rstrip("0").rstrip(".")
