"""The engine that a configuration asks for. Imports torch only when it is a torch engine."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path

from pipeline.config.models import LAUNCHED, Launch, Server
from pipeline.config.models import Engine as EngineSettings
from pipeline.config.schema import RunConfig
from pipeline.engines.base import Engine
from pipeline.engines.weights import Published, WeightStore

LOADED = {"HF_HUB_OFFLINE": "1", "TRANSFORMERS_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1"}
"""Of a launched server's process: it loads the folder that it is given and asks nobody."""
OURS = ("PYTHONPATH", "PYTHONHOME", "VIRTUAL_ENV")


def open_student(config: RunConfig, folder: Path, weights: WeightStore | None, version: int = 0, log: Path | None = None) -> Engine:
    """Of the newest published weights; without `weights`, of the folder, as this version. Blocks while it loads.

    log: takes the output of a server that is launched.
    """
    settings = config.engine
    if settings.kind == "scripted":
        from pipeline.engines.scripted import ScriptedEngine

        return ScriptedEngine(settings, weights, folder, version)
    if settings.kind == "openai":
        from pipeline.engines.completions import CompletionsEngine

        return CompletionsEngine(folder, settings, settings, version=version)
    if settings.kind in LAUNCHED:
        return _served(settings.kind, settings, settings, folder, weights, config.student.dtype, 0.0, version, log)
    from pipeline.engines.torch_engine import TorchEngine

    return TorchEngine(folder, weights, settings, dtype=config.student.dtype, version=version)


def open_teacher(config: RunConfig, alias: str, folder: Path, log: Path | None = None) -> Engine:
    """Of a teacher that has a model. Blocks while it loads."""
    teacher = config.teachers[alias]
    if teacher.engine == "openai":
        from pipeline.engines.completions import CompletionsEngine

        acts = config.algorithm.mixes()
        return CompletionsEngine(folder, teacher, config.engine, smoothing=teacher.smoothing, for_training=acts)
    if teacher.engine in LAUNCHED:
        return _served(teacher.engine, teacher, config.engine, folder, None, teacher.dtype, teacher.smoothing, 0, log)
    from pipeline.engines.torch_engine import TorchEngine

    return TorchEngine(folder, None, config.engine, smoothing=teacher.smoothing, dtype=teacher.dtype)


def _served(
    kind: str,
    server: Server,
    settings: EngineSettings,
    folder: Path,
    weights: WeightStore | None,
    dtype: str,
    smoothing: float,
    version: int,
    log: Path | None,
) -> Engine:
    from pipeline.engines.launcher import Launcher
    from pipeline.engines.served import ServedEngine

    launcher = None
    if server.launch is not None:
        command = server_command(kind, server.launch, settings, folder, weights, dtype, version)
        launcher = Launcher(kind, server.launch, command, server_environment(server.launch, settings), log)
        launcher.wait_ready()
    return ServedEngine(kind, folder, weights, settings, urls=server.urls, launcher=launcher, smoothing=smoothing, version=version)


def server_environment(launch: Launch, settings: EngineSettings) -> dict[str, str]:
    """Variables of a launched server's process. What is set for our own interpreter is not meant for the engine's."""
    inherited = {key: value for key, value in os.environ.items() if key not in OURS}
    return {**inherited, **LOADED, "OMP_NUM_THREADS": str(settings.threads), **launch.env}


def server_command(
    kind: str,
    launch: Launch,
    settings: EngineSettings,
    folder: Path,
    weights: WeightStore | None,
    dtype: str,
    version: int,
) -> Callable[[], list[str]]:
    """What starts a server of the newest weights; asked anew at every start."""
    from pipeline.engines.rows import Bounds

    program = Path(__file__).parent / "servers" / f"{kind}_server.py"
    arguments = {
        "--max-context": str(Bounds.of(folder, settings.max_context).max_context),
        "--slots": str(settings.slots),
        "--dtype": dtype,
        "--engine-args": json.dumps(launch.args),
    }

    def command() -> list[str]:
        held = (weights.latest() if weights is not None else None) or Published(version, folder)
        parts = {"--model": str(held.path.resolve()), "--version": str(held.version), **arguments}
        return [str(launch.python), str(program), *(text for pair in parts.items() for text in pair)]

    return command
