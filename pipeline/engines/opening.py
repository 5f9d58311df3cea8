"""The engine that a configuration asks for. Imports torch only when it is a torch engine."""

from __future__ import annotations

from pathlib import Path

from pipeline.config.schema import RunConfig
from pipeline.engines.base import Engine
from pipeline.engines.weights import WeightStore


def open_student(config: RunConfig, folder: Path, weights: WeightStore | None, version: int = 0) -> Engine:
    """Of the newest published weights; without `weights`, of the folder, as this version. Blocks while it loads."""
    if config.engine.kind == "scripted":
        from pipeline.engines.scripted import ScriptedEngine

        return ScriptedEngine(config.engine, weights, folder, version)
    from pipeline.engines.torch_engine import TorchEngine

    return TorchEngine(folder, weights, config.engine, dtype=config.student.dtype, version=version)
