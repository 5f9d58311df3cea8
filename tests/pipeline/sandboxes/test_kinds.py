"""The sandboxes that a configuration asks for, and what it is told when it cannot have them."""

from __future__ import annotations

from typing import Any

import pytest
from pydantic import ValidationError

from pipeline.config.stages import SandboxPart
from pipeline.errors import ConfigError
from pipeline.sandboxes.kinds import sandboxes_by_type
from pipeline.sandboxes.local import LocalSandboxes
from pipeline.sandboxes.rex import DockerSandboxes, RemoteSandboxes

DOCKER = SandboxPart(kind="docker", image="a:1")
REMOTE = SandboxPart(kind="remote", url="http://127.0.0.1:9", token_env="TOKEN_OF_A_TEST")


@pytest.mark.parametrize(
    ("given", "wanted"),
    [
        ({"kind": "docker"}, "sandbox.kind 'docker' needs sandbox.image"),
        ({"kind": "remote", "token_env": "X"}, "sandbox.kind 'remote' needs sandbox.url"),
        ({"kind": "remote", "url": "http://a"}, "sandbox.kind 'remote' needs sandbox.token_env"),
        ({"image": "a:1"}, "sandbox.image is not for sandbox.kind 'local'"),
    ],
)
def test_a_kind_without_its_place_is_refused(given: dict[str, Any], wanted: str):
    with pytest.raises(ValidationError, match=wanted):
        SandboxPart(**given)


def test_kinds_that_are_not_installed_or_have_no_token_are_refused(monkeypatch: pytest.MonkeyPatch):
    with pytest.raises(ConfigError, match="'TOKEN_OF_A_TEST' is not set"):
        sandboxes_by_type({"a": REMOTE})
    monkeypatch.setattr("pipeline.sandboxes.kinds.find_spec", lambda name: None)
    with pytest.raises(ConfigError, match=r"'docker' needs swe-rex, which is not installed: pip install -e '\.\[swerex\]'"):
        sandboxes_by_type({"a": DOCKER})


def test_types_at_one_place_share_their_sandboxes(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("TOKEN_OF_A_TEST", "t")
    made = sandboxes_by_type({"a": SandboxPart(), "b": SandboxPart(starts=1), "c": DOCKER, "d": REMOTE})
    assert isinstance(made["a"], LocalSandboxes) and made["a"] is made["b"]
    assert isinstance(made["c"], DockerSandboxes) and isinstance(made["d"], RemoteSandboxes)
