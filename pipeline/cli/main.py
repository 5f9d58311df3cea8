"""The `rollout` command. Invariant: what a user did wrong is one line on stderr and exit code 2, never a traceback.

Exit codes: 0 finished, 1 failed, 2 usage or configuration, 3 stopped and resumable, 4 locked by another process.
Command modules are light: what is heavy is imported inside the command.
"""

from __future__ import annotations

import os
import sys
import tempfile
import traceback
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import typer

from pipeline.cli import bench, cancel, doctor, fork, gc, make_teacher, plan, report, schema, status, tasks
from pipeline.cli import eval as eval_command
from pipeline.cli import run as run_command
from pipeline.cli.entry import INTERRUPTED
from pipeline.cli.exits import FAILED, FINISHED, USAGE, explain, say
from pipeline.errors import RolloutError

COMMANDS = (
    run_command, fork, cancel, plan, status, report, eval_command, tasks, make_teacher, bench, gc, doctor, schema,
)  # fmt: skip
"""Modules with `register(app)`, in the order of the help text."""

UsageError = typer.BadParameter.__base__
"""What the command line itself refuses, whichever way typer brings its parser along."""


def build_app() -> typer.Typer:
    app = typer.Typer(name="rollout", add_completion=False, pretty_exceptions_enable=False)

    @app.callback()
    def rollout(debug: Annotated[bool, typer.Option("--debug", help="Show tracebacks.")] = False) -> None:
        """Reinforcement learning and on-policy distillation of language models, as a durable actor pipeline on Ray."""

    for module in COMMANDS:
        module.register(app)
    return app


def main() -> None:
    sys.exit(run(sys.argv[1:]))


def run(arguments: Sequence[str]) -> int:
    """Run one command; returns its exit code. `--debug` may stand anywhere."""
    debug = "--debug" in arguments
    rest = [argument for argument in arguments if argument != "--debug"]
    try:
        result = build_app()(args=rest or ["--help"], prog_name="rollout", standalone_mode=False)
        return result if isinstance(result, int) else FINISHED
    except UsageError as error:
        return say(_usage(error), USAGE)
    except RolloutError as error:
        if debug:
            traceback.print_exc()
        return explain(error)
    except (KeyboardInterrupt, typer.Abort):
        return say("interrupted", INTERRUPTED)
    except BrokenPipeError:
        # The reader of our output went away, as `| head` does; keep the interpreter from complaining about it at its exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return FINISHED
    except Exception as error:
        if debug:
            traceback.print_exc()
            return FAILED
        return say(f"unexpected {type(error).__name__}: {error} (traceback in {_log_traceback()})", FAILED)


def _usage(error: Exception) -> str:
    """The parser's message as one line, with where to read on."""
    context = getattr(error, "ctx", None)
    message = " ".join(error.format_message().split())
    return f"{message} (see `{context.command_path if context else 'rollout'} --help`)"


def _log_traceback() -> Path:
    handle, name = tempfile.mkstemp(prefix="rollout-", suffix=".log")
    with os.fdopen(handle, "w") as file:
        traceback.print_exc(file=file)
    return Path(name)


if __name__ == "__main__":
    main()
