"""Which Docker the tests of containers use: a stand-in, or with `--docker-image` the one that answers here."""

from __future__ import annotations

import pytest


def pytest_addoption(parser: pytest.Parser) -> None:
    text = "of the Docker that answers here, with bash, python3, swe-rex and a file /tmp/testbed/a.py that says x = 1"
    parser.addoption("--docker-image", default=None, help=text)


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    if config.getoption("--docker-image") is None:
        terminalreporter.write_line("NOT TESTED: a real Docker: containers were a stand-in's; `--docker-image IMAGE` tests one")
