"""What a person sees while a run goes on: one bar for the steps and one a stage, or plain lines when nobody watches a terminal.

Invariant: everything goes to the one stream given (stderr); a bar never goes back, and its rate counts this process's work only.
"""

from __future__ import annotations

from typing import Any, Protocol, TextIO

from tqdm import tqdm

PLAIN_EVERY_S = 10.0
STAGES = ("fetched", "rolled out", "scored", "trained")
_PAST = {
    "rolled out": ("written", "ready", "consumed", "trained"),
    "scored": ("ready", "consumed", "trained"),
    "trained": ("consumed", "trained"),
}
_FORMAT = "{desc:<11}{percentage:3.0f}% |{bar}| {n_fmt}/{total_fmt} [{elapsed}<{remaining}, {rate_fmt}{postfix}]"


class Display(Protocol):
    def update(self, status: dict[str, Any], figures: dict[str, float | None], now: float) -> None:
        """Show a status; `figures` are shown beside the steps; `now` in seconds of any clock."""
        ...

    def close(self) -> None: ...


def display(stream: TextIO, tasks_per_step: int) -> Display:
    """Bars on a terminal, plain lines elsewhere."""
    return Bars(stream, tasks_per_step) if stream.isatty() else PlainLines(stream, tasks_per_step)


def progress(status: dict[str, Any], tasks_per_step: int) -> dict[str, tuple[int, int]]:
    """stage -> (groups past it, groups expected past it in all). Dropped groups are expected to be replaced at the fetcher."""
    ordinals = status.get("ordinals") or {}
    expected = (status.get("steps") or 0) * tasks_per_step
    counts = {name: sum(ordinals.get(state) or 0 for state in states) for name, states in _PAST.items()}
    fetched = ordinals.get("fetched") or 0
    return {"fetched": (fetched, max(expected, fetched)), **{name: (n, max(expected, n)) for name, n in counts.items()}}


class Bars:
    def __init__(self, stream: TextIO, tasks_per_step: int) -> None:
        self._stream = stream
        self._tasks_per_step = tasks_per_step
        self._bars: dict[str, tqdm] = {}

    def update(self, status: dict[str, Any], figures: dict[str, float | None], now: float) -> None:
        done = status.get("step") or 0
        steps = self._advance("steps", "step", done, max(status.get("steps") or 0, done))
        shown = {name: f"{value:.3g}" for name, value in figures.items() if value is not None}
        steps.set_postfix(shown, refresh=False)
        for name, (count, expected) in progress(status, self._tasks_per_step).items():
            self._advance(name, "group", count, expected)
        for bar in self._bars.values():
            bar.refresh()

    def close(self) -> None:
        for bar in self._bars.values():
            bar.close()
        self._bars.clear()

    def _advance(self, name: str, unit: str, count: int, expected: int) -> tqdm:
        bar = self._bars.get(name)
        if bar is None:
            bar = self._bars[name] = tqdm(
                desc=name,
                total=expected,
                initial=count,
                unit=f" {unit}s" if unit == "group" else f" {unit}",
                file=self._stream,
                position=len(self._bars),
                dynamic_ncols=True,
                bar_format=_FORMAT,
                mininterval=0.0,
                smoothing=0.1,
            )
        bar.total = max(expected, bar.n)
        if count > bar.n:
            bar.update(count - bar.n)
        return bar


class PlainLines:
    """One line at once, then one every PLAIN_EVERY_S seconds, and one at the end."""

    def __init__(self, stream: TextIO, tasks_per_step: int) -> None:
        self._stream = stream
        self._tasks_per_step = tasks_per_step
        self._shown_at: float | None = None
        self._first: tuple[float, int] | None = None
        self._line = ""

    def update(self, status: dict[str, Any], figures: dict[str, float | None], now: float) -> None:
        rolled_out = progress(status, self._tasks_per_step)["rolled out"][0]
        self._first = self._first or (now, rolled_out)
        seconds, groups = now - self._first[0], rolled_out - self._first[1]
        self._line = _line(status, figures, self._tasks_per_step, groups / seconds if seconds > 0 else None)
        if self._shown_at is None or now - self._shown_at >= PLAIN_EVERY_S:
            self._shown_at = now
            self._show()

    def close(self) -> None:
        self._show()

    def _show(self) -> None:
        if self._line:
            self._stream.write(self._line + "\n")
            self._stream.flush()
            self._line = ""


def _line(status: dict[str, Any], figures: dict[str, float | None], tasks_per_step: int, rate: float | None) -> str:
    parts = [f"step {status.get('step') or 0}/{status.get('steps') or '?'}"]
    parts += [f"{name} {value:.3g}" for name, value in figures.items() if value is not None]
    parts.append("groups: " + ", ".join(f"{name} {n}" for name, (n, _) in progress(status, tasks_per_step).items()))
    if rate is not None:
        parts.append(f"{rate:.1f} groups/s")
    return "; ".join(parts)
