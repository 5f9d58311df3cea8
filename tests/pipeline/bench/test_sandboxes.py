"""The figures of sandboxes have the names that are promised, and nothing is left of what they are measured on."""

from __future__ import annotations

import shutil

import pytest

from pipeline.bench.sandboxes import figures, of_config
from pipeline.sandboxes.local import MISSING


def test_the_figures_have_the_names_that_are_promised():
    if shutil.which("bwrap") is None:
        pytest.skip(f"did not run: {MISSING}")
    found = figures(of_config(None), one_by_one=2, at_once=3, owners=4)
    names = [f"local_{what}_ms_p{part}" for what in ("start", "command", "close", "start_of_3") for part in (50, 99)]
    kills = [f"local_kills{what}" for what in ("", "_begun", "_running")]
    left = [f"local_left{what}" for what in ("", "_folders", "_processes", "_mounts", "_groups")]
    assert list(found["figures"]) == [*names, "local_all_3_s", left[0], *kills, *left[1:]]
    assert all(found["figures"][name] > 0 for name in names) and not any(found["figures"][name] for name in left)
    assert found["figures"]["local_kills"] == 4 and found["figures"]["local_kills_begun"] > 0
