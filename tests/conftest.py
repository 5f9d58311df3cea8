"""Faults by class: `-m fault` runs the tests of all of them, `-k fault07` those of one."""

from __future__ import annotations

import pytest


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        for marker in item.iter_markers("fault"):
            item.extra_keyword_matches.update(f"fault{number:02d}" for number in marker.args)
