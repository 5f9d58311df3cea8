"""The figures of sandboxes have the names that are promised, and nothing is left of what they are measured on."""

from __future__ import annotations

import shutil

import pytest

from pipeline.bench.sandboxes import figures, of_config
from pipeline.sandboxes.local import MISSING


def test_the_figures_have_the_names_that_are_promised():
    if shutil.which("bwrap") is None:
        pytest.skip(f"did not run: {MISSING}")
    found = figures(of_config(None), one_by_one=2, at_once=3)
    names = [f"local_{what}_ms_p{part}" for what in ("start", "command", "close", "start_of_3") for part in (50, 99)]
    assert list(found["figures"]) == [*names, "local_all_3_s", "local_left"]
    assert all(found["figures"][name] > 0 for name in names) and found["figures"]["local_left"] == 0
