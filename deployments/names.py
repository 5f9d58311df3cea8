"""Names of everything a run places on Ray, and beside it. A name is a function of the run: any process can find any stage."""

from __future__ import annotations

import hashlib
import os
import tempfile
from pathlib import Path

from pipeline.paths import RunPaths

NAMESPACE = "rollout"


def actor_name(run_id: str, stage: str) -> str:
    return f"{run_id}:{stage}"


def worker_stage(bundle: int) -> str:
    return f"evaluator_worker_{bundle}"


def student_app(run_id: str) -> str:
    return f"{run_id}:student"


def teacher_app(run_id: str, alias: str) -> str:
    return f"{run_id}:teacher:{alias}"


def temporary_folder(paths: RunPaths) -> Path:
    """Of Ray's session and of the channels. Short, because socket paths end at 107 characters; one a run, because two Rays must
    not share it."""
    digest = hashlib.sha256(str(paths.root.resolve()).encode()).hexdigest()[:10]
    return Path(tempfile.gettempdir()) / f"rollout-{digest}"


def door(paths: RunPaths, stage: str) -> Path:
    """Where this process, which is the stage's, is asked beside Ray."""
    return temporary_folder(paths) / "channels" / f"{stage}.{os.getpid()}"


ENGINE_DEPLOYMENT = "Engine"

MODELS_DEPLOYMENT = "Models"
EVALUATIONS_DEPLOYMENT = "Evaluations"
SERVICE_DEPLOYMENT = "Service"
"""Of the service's application."""
