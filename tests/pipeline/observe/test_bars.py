import io

import pytest

from pipeline.observe.bars import Bars, PlainLines, display, progress
from tests.pipeline.observe.fakes import status


class Terminal(io.StringIO):
    def isatty(self):
        return True


def test_progress_counts_groups_past_each_stage():
    counts = progress(status(50), tasks_per_step=32)
    assert counts["trained"] == (1600, 120 * 32)
    assert counts["scored"] == (1603, 120 * 32)
    assert counts["rolled out"] == (1607, 120 * 32)
    assert counts["fetched"] == (1634, 120 * 32)


def test_bars_show_every_stage_with_a_rate_and_the_newest_figures():
    stream = Terminal()
    bars = display(stream, 32)
    assert isinstance(bars, Bars)
    for step in range(3):
        bars.update(status(step), {"accuracy": 0.123, "loss": None}, float(step))
    bars.close()
    shown = stream.getvalue()
    for text in ("steps", "fetched", "rolled out", "scored", "trained", "accuracy=0.123", "2/120", "groups/s"):
        assert text in shown
    assert "loss" not in shown


def test_a_resumed_run_starts_where_it_was():
    stream = Terminal()
    bars = Bars(stream, 32)
    bars.update(status(60), {}, 0.0)
    bars.close()
    assert "60/120" in stream.getvalue()


def test_without_a_terminal_there_is_a_line_now_and_then_and_one_at_the_end():
    stream = io.StringIO()
    lines = display(stream, 32)
    assert isinstance(lines, PlainLines)
    for second in range(25):
        lines.update(status(second), {"accuracy": 0.5, "loss": None}, float(second))
    assert len(stream.getvalue().splitlines()) == 3
    lines.close()
    lines.close()
    shown = stream.getvalue().splitlines()
    assert len(shown) == 4
    assert shown[-1].startswith("step 24/120; accuracy 0.5; groups: fetched ")
    assert "loss" not in shown[-1] and "\r" not in stream.getvalue()


@pytest.mark.parametrize("state", [{}, {"steps": None, "ordinals": {}}])
def test_a_run_that_has_not_begun_is_shown_too(state):
    for stream in (Terminal(), io.StringIO()):
        shown = display(stream, 32)
        shown.update(state, {"accuracy": None}, 0.0)
        shown.close()
        assert stream.getvalue()
