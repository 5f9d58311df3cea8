"""The arguments of the service: what is wrong is one line, and beyond loopback there is a token."""

from __future__ import annotations

import json

import pytest
import yaml

from pipeline.errors import ConfigError, UserError
from pipeline.service.arguments import is_loopback, parse_arguments, settle, token_digest


@pytest.fixture
def config(tmp_path):
    (tmp_path / "d.jsonl").write_text("\n".join(json.dumps({"prompt": f"say {n}", "answer": str(n)}) for n in range(40)))
    data = {
        "student": {"architecture": {}},
        "algorithm": {"name": "grpo"},
        "datasets": {"d": {"source": "jsonl", "path": "d.jsonl"}},
    }
    path = tmp_path / "c.yaml"
    path.write_text(yaml.safe_dump(data))
    return path


def settled(config, environment=None, **given):
    return settle(parse_arguments({"config": str(config), **given}), environment or {})


def test_arguments_are_text_and_become_typed(config, tmp_path):
    settings = settled(config, port="8111", runs_dir=str(tmp_path / "r"), resume="true")
    assert (settings.port, settings.host, settings.run, settings.token_sha256) == (8111, "127.0.0.1", None, None)
    assert settings.resume is True and settled(config).resume is False
    assert settings.configs == tmp_path
    assert settings.runs.cache == tmp_path / "r" / ".cache" and str(tmp_path) in settings.code


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"prot": "1"}, r"deployments:app: unknown key prot; did you mean port\?"),
        ({"port": "0"}, r"deployments:app: port: '?0'? is out of bounds, must be >= 1"),
        ({"port": "x"}, r"deployments:app: port: 'x': input should be a valid integer"),
        ({"resume": "r1"}, r"deployments:app: resume: 'r1': input should be a valid boolean"),
    ],
)
def test_wrong_arguments_are_one_line(given, message):
    with pytest.raises(ConfigError, match=message) as caught:
        parse_arguments(given)
    assert "\n" not in str(caught.value)


def test_what_is_not_there_is_named(config, tmp_path):
    with pytest.raises(UserError, match="no run 'r7'"):
        settled(config, run_id="r7", runs_dir=str(tmp_path / "r"))
    with pytest.raises(UserError, match="nofile.yaml"):
        settled(tmp_path / "nofile.yaml")


def test_beyond_loopback_there_is_a_token(config):
    with pytest.raises(UserError, match="host '0.0.0.0' is not loopback.*token_env"):
        settled(config, host="0.0.0.0")
    for environment in ({}, {"T": ""}, {"T": "  "}):
        with pytest.raises(UserError, match="token_env 'T'"):
            settled(config, environment, host="0.0.0.0", token_env="T")
    settings = settled(config, {"T": "secret"}, host="0.0.0.0", token_env="T")
    assert settings.token_sha256 == token_digest("secret") and "secret" not in repr(settings) and not settings.loopback
    assert settled(config, {"T": "secret"}, token_env="T").token_sha256 is not None, "a token that is given is asked for"


def test_loopback():
    assert all(map(is_loopback, ("127.0.0.1", "127.8.8.8", "::1", "localhost")))
    assert not any(map(is_loopback, ("0.0.0.0", "::", "10.0.0.1", "localhost.example.org", "")))
