from pathlib import Path

import pytest

from tests.e2e.program import Program, program

HERE = Path(__file__).parent


@pytest.fixture
def rollout(tmp_path) -> Program:
    with program(tmp_path) as made:
        yield made


@pytest.fixture(scope="module")
def shared_rollout(tmp_path_factory) -> Program:
    with program(tmp_path_factory.mktemp("rollout")) as made:
        yield made


@pytest.fixture(scope="session")
def tiny() -> Path:
    """The smallest configuration that goes through everything."""
    return HERE / "tiny.yaml"
