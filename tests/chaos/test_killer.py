"""The seeded killer, in small: `make chaos KILLS=1000` is the long form."""

from dataclasses import asdict

import pytest

from tests.chaos.killer import campaign, figures, table


@pytest.mark.timeout(900)
@pytest.mark.fault(2)
def test_nothing_is_lost_trained_twice_or_regenerated(tmp_path):
    killer = campaign(tmp_path, 20, seed=1)
    found = figures(killer)
    print(f"\n{table(killer)}\n{found}")
    assert asdict(killer.verdict) == {"lost": [], "trained_twice": [], "regenerated": [], "wrong": []}
    assert found["resume_s_max"] is None or found["resume_s_max"] <= 45
