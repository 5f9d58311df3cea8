"""Who can be killed: every process that a run is made of, by name.

Invariant: a victim is found among the processes of the one program given, and nowhere else.
"""

from __future__ import annotations

from tests.e2e.program import Command, Program

STAGES = {
    "fetcher": "ray::FetcherActor",
    "batcher": "ray::BatcherActor",
    "evaluator_pool": "ray::EvaluatorPoolActor",
    "teacher_scorer": "ray::TeacherScorerActor",
    "replay_buffer": "ray::ReplayBuffer",
    "trainer": "ray::TrainerActor",
}
OTHERS = {
    "evaluator_worker": "ray::EvaluatorWorkerActor",
    "student_replica": "ray::ServeReplica:{run}:student",
    "teacher_replica": "ray::ServeReplica:{run}:teacher",
    "workflow_manager": "ray::WorkflowManagementActor",
    "raylet": "raylet",
    "gcs": "gcs_server",
}
DRIVER, EVERYTHING = "driver", "everything"
VICTIMS = (*STAGES, *OTHERS, DRIVER, EVERYTHING)
HEALING = frozenset((*STAGES, "evaluator_worker", "student_replica", "teacher_replica", "workflow_manager"))
"""What the run replaces by itself; after any other a resume may be needed."""


def kill(victim: str, program: Program, command: Command, run_id: str) -> bool:
    """SIGKILL. False when there is no such process at the moment."""
    if victim == EVERYTHING:
        program.kill_all()
        return True
    if victim == DRIVER:
        command.process.kill()
        return True
    title = (STAGES | OTHERS)[victim].format(run=run_id)
    found = program.find(title)
    program.kill(found)
    return bool(found)
