"""Where a student or a teacher comes from, and what a teacher says. Imports no torch."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Literal

from pydantic import Field, model_validator

from pipeline.config.base import Strict


class Architecture(Strict):
    """A small Llama, made from nothing."""

    hidden: int = Field(64, ge=8)
    layers: int = Field(2, ge=1)
    heads: int = Field(4, ge=1)
    kv_heads: int | None = Field(None, ge=1)
    """None: as many as heads."""
    mlp: int = Field(192, ge=8)
    max_positions: int = Field(64, ge=8)
    """Context length in tokens."""
    init_std: float = Field(0.08, gt=0)

    @model_validator(mode="after")
    def _heads_share_the_width(self) -> Architecture:
        if self.hidden % self.heads:
            raise ValueError(f"hidden {self.hidden} is not a multiple of heads {self.heads}")
        return self


class Supervised(Strict):
    """Supervised training on the answers of the training split, before the run."""

    steps: int = Field(100, ge=0)
    """Optimizer steps at most."""
    batch: int = Field(128, ge=1)
    lr: float = Field(4e-3, gt=0)
    warmup_steps: int = Field(10, ge=0)
    stop_at: float | None = Field(None, gt=0, le=1)
    """Stop once greedy accuracy on a slice of the *training* split reaches this; None: all steps.

    Held-out items are never looked at.
    """
    max_seconds: float = Field(120.0, gt=0)


class ModelSource(Strict):
    """Exactly one of `path`, `package` or `architecture`."""

    path: Path | None = None
    """A folder in Hugging Face format."""
    package: Literal["smollm2"] | None = None
    """A pretrained model that a package on the index ships (extra `smollm`)."""
    architecture: Architecture | None = None
    """A new model with the run's character tokenizer."""
    supervised: Supervised | None = None
    """Training before the run; the result is cached by the hash of all that it depends on."""
    dtype: Literal["float32", "bfloat16"] = "float32"
    seed: int = 0

    @model_validator(mode="after")
    def _one_source(self) -> ModelSource:
        given = [name for name in ("path", "package", "architecture") if getattr(self, name) is not None]
        if len(given) != 1 and (given or self.needs_model()):
            raise ValueError(f"give exactly one of path, package, architecture; got {given or 'none'}")
        return self

    def needs_model(self) -> bool:
        return True


ServerKind = Literal["openai", "vllm", "sglang"]
LAUNCHED = ("vllm", "sglang")
"""Kinds that a replica can start itself, and that take new weights."""
SERVERS = ("openai", *LAUNCHED)


class Launch(Strict):
    """A server that each replica starts, restarts and ends, in an environment of the engine's own."""

    python: Path
    """Interpreter of the environment that has the engine (`make engines` makes such environments)."""
    args: dict[str, Any] = {}
    """The engine's own arguments, over ours: of vLLM's AsyncEngineArgs, or of SGLang's ServerArgs."""
    env: dict[str, str] = {}
    """Environment variables of the server."""
    cpus: float = Field(0.0, ge=0)
    """CPUs that Ray sets aside for a replica; 0: none, it shares what there is."""
    gpus: float = Field(0.0, ge=0)
    """GPUs, or a fraction of one, for a replica. The server sees these and no others."""
    start_timeout_s: float = Field(300.0, gt=0)
    """From the start of the server to its first answer."""


class Server(Strict):
    """Where a `vllm`, `sglang` or `openai` engine is: exactly one of `url` and `launch`."""

    url: str | tuple[str, ...] = ()
    """One server that exists, or several: calls go to the least busy, and to another when one fails."""
    launch: Launch | None = None
    served_model: str | None = None
    """`openai`: the model's name there; None: the first that the server lists."""

    @property
    def urls(self) -> tuple[str, ...]:
        return (self.url,) if isinstance(self.url, str) else self.url

    def check_server(self, kind: str) -> None:
        """Raises ValueError when what is given does not fit the kind of engine."""
        given = [name for name in ("url", "launch") if getattr(self, name)]
        if kind not in SERVERS and given:
            raise ValueError(f"{given[0]} is for the engines {', '.join(SERVERS)}; the engine is {kind!r}")
        if kind in SERVERS and len(given) != 1:
            raise ValueError(f"engine {kind!r} needs exactly one of url and launch; got {given or 'neither'}")
        if kind == "openai" and self.launch is not None:
            raise ValueError("engine 'openai' cannot be launched: give the url of a server that runs")
        if kind != "openai" and self.served_model is not None:
            raise ValueError(f"served_model is for the engine openai; the engine is {kind!r}")
        wrong = [url for url in self.urls if not url.startswith(("http://", "https://"))]
        if wrong:
            raise ValueError(f"url {wrong[0]!r} does not start with http:// or https://")


class Teacher(ModelSource, Server):
    """A teacher: a model, and how it reads the task."""

    shots: int = Field(0, ge=0)
    """Solved examples of the training split put before the task in the teacher's own prompt."""
    smoothing: float = Field(0.0, ge=0, lt=1)
    """Probability mass spread evenly over the vocabulary: p' = (1 - s) p + s / V."""
    replicas: int = Field(1, ge=1)
    engine: Literal["torch", "fixed_cost", "reference"] | ServerKind = "torch"
    """`fixed_cost` scores every token with the same logprob after a stated time: for tests, demos and benchmarks. `reference`
    knows the reference answers and plays them, turn by turn: it can act (dagger, aggrevate), and it cannot score."""
    fixed_cost_s: float = Field(0.0, ge=0)
    """`fixed_cost` engine: seconds a scoring call."""
    row_cost_s: float = Field(0.0, ge=0)
    """`fixed_cost` engine: seconds a row, on top."""

    @model_validator(mode="after")
    def _server_fits(self) -> Teacher:
        self.check_server(self.engine)
        if self.engine == "openai" and self.path is None:
            raise ValueError(
                "engine 'openai' needs `path`: a folder with the model's config.json and tokenizer; weights are not read"
            )
        return self

    def needs_model(self) -> bool:
        return self.engine == "torch" or self.engine in SERVERS

    def is_made(self) -> bool:
        """It has weights of ours: made before the run, or read from `path`."""
        return self.engine == "torch" or self.engine in LAUNCHED

    def has_engine(self) -> bool:
        return self.engine != "reference"


class Script(Strict):
    """What the `scripted` engine plays: fixed token streams, delays and failures by ordinal."""

    tokens: int = Field(8, ge=0)
    """Length of every response unless `tokens_by_ordinal` says otherwise."""
    tokens_by_ordinal: dict[int, int] = {}
    seconds: float = Field(0.0, ge=0)
    """Duration of one call of one sequence."""
    seconds_by_ordinal: dict[int, float] = {}
    fail_by_ordinal: dict[int, str] = {}
    """ordinal -> exception name of pipeline.errors (or `hang`), raised for every attempt of that ordinal."""
    fail_once_by_ordinal: dict[int, str] = {}
    """The same, but only for the first attempt in this process."""
    vocab_size: int = Field(64, ge=4)


class Engine(Server):
    """The student's engine."""

    kind: Literal["torch", "scripted"] | ServerKind = "torch"
    """`vllm` and `sglang` run behind servers and take new weights; `openai` takes none: for evaluations and teachers."""
    slots: int = Field(64, ge=1)
    """Sequences generated at the same time (rows of the key-value cache)."""
    max_context: int | None = Field(None, ge=8)
    """Tokens a sequence; None: the model's own bound."""
    replicas: int = Field(1, ge=1)
    swap: Literal["drain", "abort"] = "drain"
    """What happens to running sequences when new weights arrive: wait for them, or start them again."""
    swap_timeout_s: float = Field(30.0, gt=0)
    call_timeout_s: float = Field(120.0, gt=0)
    """Deadline of one call without progress."""
    threads: int = Field(1, ge=1)
    """torch threads of an engine process."""
    script: Script | None = None
    """`scripted` engine: what it plays."""

    @model_validator(mode="after")
    def _server_fits(self) -> Engine:
        self.check_server(self.kind)
        return self
