"""`python -m tests.simulation`: as many seeds as one likes, or one seed again.

python -m tests.simulation --seeds 20000
python -m tests.simulation --seed 4711          a failing one, exactly as it was
python -m tests.simulation --bug forgets_what_it_selected
"""

from __future__ import annotations

import argparse
import contextlib
import sys
import time

import typer

from tests.simulation.bugs import BUGS, planted
from tests.simulation.seeds import first_failure, play, warm_up
from tests.simulation.world import SCENARIOS, simulate


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.simulation", description="Seeds of the simulated run.")
    parser.add_argument("--seeds", type=int, default=2000, help="how many (2000)")
    parser.add_argument("--first", type=int, default=0, help="the first one (0)")
    parser.add_argument("--seed", type=int, help="this one only, with its outcome")
    parser.add_argument("--bug", choices=sorted(BUGS), help="plant this fault, and look for the seed that finds it")
    options = parser.parse_args()
    warm_up()
    with planted(options.bug) if options.bug else contextlib.nullcontext():
        if options.seed is not None:
            return _one(options.seed)
        seeds = range(options.first, options.first + options.seeds)
        return _look_for(seeds) if options.bug else _all(seeds)


def _one(seed: int) -> int:
    failure = first_failure([seed])
    typer.echo(f"seed {seed} ({SCENARIOS[seed % len(SCENARIOS)].name}): {failure or simulate(seed)}")
    return int(failure is not None)


def _look_for(seeds: range) -> int:
    failure = first_failure(seeds)
    typer.echo(str(failure) if failure else f"not found in {len(seeds)} seeds")
    return int(failure is None)


def _all(seeds: range) -> int:
    began = time.perf_counter()
    played = play(seeds)
    for failure in played.failures:
        typer.echo(str(failure))
    seconds = time.perf_counter() - began
    typer.echo(
        f"{played.seeds} seeds, {len(played.failures)} failed; {played.kills} kills, {played.resumes} resumes,"
        f" {played.commits} groups committed; {seconds:.1f} s, {played.seeds / seconds:.1f} seeds/s"
    )
    return int(bool(played.failures))


if __name__ == "__main__":
    sys.exit(main())
