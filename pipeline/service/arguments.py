"""The arguments of the service and what they settle: which configuration, which run, which address, which token.

Invariant: a service that listens beyond loopback has a token. Whatever is wrong is one line, found before anything starts.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Mapping
from dataclasses import dataclass
from ipaddress import ip_address
from pathlib import Path
from typing import Any

from pydantic import Field, ValidationError

from pipeline.cli.checks import check_names
from pipeline.cli.runs import find_run, run_root
from pipeline.config.base import Strict
from pipeline.config.faults import describe
from pipeline.config.loading import read_config
from pipeline.config.schema import RunConfig
from pipeline.errors import ConfigError, UserError
from pipeline.paths import RunPaths, SharedPaths

DEFAULT_CONFIG = Path("configs/quickstart.yaml")


class ServeArguments(Strict):
    """`serve run deployments:app KEY=VALUE ...`."""

    config: Path | None = None
    """A configuration file; None: that of the run, else configs/quickstart.yaml."""
    run_id: str | None = None
    """The run whose newest weights are live; None: the configuration's own student, as it begins."""
    resume: bool = False
    """Go on with training that was interrupted, as a process of its own: with `run_id` that run, else all, one after the other."""
    runs_dir: Path | None = None
    """Where runs lie; None: $ROLLOUT_RUNS, else ./runs."""
    host: str = "127.0.0.1"
    port: int = Field(8000, ge=1, le=65535)
    token_env: str | None = None
    """Name of the environment variable that holds the bearer token; required when the host is not loopback."""


@dataclass(frozen=True, slots=True)
class Settings:
    """What every process of the service is given."""

    config: RunConfig
    code: tuple[str, ...]
    """Folders from which the configuration's own modules are imported."""
    configs: Path
    """The folder whose configurations can be run by name."""
    runs: SharedPaths
    run: RunPaths | None
    resume: bool
    host: str
    port: int
    token_sha256: str | None
    """Digest of the bearer token; None: none is asked for."""

    @property
    def loopback(self) -> bool:
        return is_loopback(self.host)


def parse_arguments(given: Mapping[str, Any]) -> ServeArguments:
    """Raises ConfigError, one line a fault."""
    try:
        return ServeArguments.model_validate(dict(given))
    except ValidationError as error:
        raise ConfigError("\n".join(f"deployments:app: {line}" for line in describe(error, ServeArguments))) from None


def settle(arguments: ServeArguments, environment: Mapping[str, str] = os.environ, beside: Path = Path()) -> Settings:
    """beside: the folder that holds configs/ when the current one does not. Raises UserError."""
    root = run_root(arguments.runs_dir, environment)
    run = find_run(root, arguments.run_id) if arguments.run_id is not None else None
    default = _default_config(beside)
    path = arguments.config or (run.config if run is not None else default)
    if path is None:
        raise UserError(f"config: there is no {DEFAULT_CONFIG} here; say config=FILE or run_id=RUN")
    loaded = read_config(path)
    check_names(loaded.config)
    folder = loaded.path.resolve().parent
    code = tuple(str(part) for part in (folder, folder / "code") if part.is_dir())
    token = _token(arguments, environment)
    configs = (arguments.config or default or path).resolve().parent
    return Settings(loaded.config, code, configs, SharedPaths(root), run, arguments.resume, arguments.host, arguments.port, token)


def is_loopback(host: str) -> bool:
    try:
        return ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def token_digest(token: str) -> str:
    return hashlib.sha256(token.encode()).hexdigest()


def _default_config(beside: Path) -> Path | None:
    return next((folder / DEFAULT_CONFIG for folder in (Path(), beside) if (folder / DEFAULT_CONFIG).is_file()), None)


def _token(arguments: ServeArguments, environment: Mapping[str, str]) -> str | None:
    if arguments.token_env is None:
        if not is_loopback(arguments.host):
            raise UserError(
                f"host {arguments.host!r} is not loopback: whoever reaches it could use the models; say token_env=NAME of an"
                " environment variable that holds a bearer token"
            )
        return None
    token = environment.get(arguments.token_env, "").strip()
    if not token:
        raise UserError(f"token_env {arguments.token_env!r}: the environment variable is not set, or empty")
    return token_digest(token)
