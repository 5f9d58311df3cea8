"""Names of everything a run places on Ray. A name is a function of the run id, so that any process can find any stage."""

from __future__ import annotations

NAMESPACE = "rollout"


def actor_name(run_id: str, stage: str) -> str:
    return f"{run_id}:{stage}"


def worker_stage(bundle: int) -> str:
    return f"evaluator_worker_{bundle}"


def student_app(run_id: str) -> str:
    return f"{run_id}:student"


def teacher_app(run_id: str, alias: str) -> str:
    return f"{run_id}:teacher:{alias}"


ENGINE_DEPLOYMENT = "Engine"

MODELS_DEPLOYMENT = "Models"
EVALUATIONS_DEPLOYMENT = "Evaluations"
SERVICE_DEPLOYMENT = "Service"
"""Of the service's application."""
