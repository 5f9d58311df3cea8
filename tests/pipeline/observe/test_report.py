import re
from html.parser import HTMLParser

import pytest

from pipeline.errors import UserError
from pipeline.observe.report import learning_curve_png, write_report
from pipeline.observe.summary import build_summary, write_summary
from pipeline.paths import RunPaths
from tests.pipeline.observe.fakes import STEPS, make_run, status, write_evaluation

VOID = {"meta", "br", "img", "link", "input", "hr"}


class Page(HTMLParser):
    """Collects ids and links, and that every tag that is opened is closed in order."""

    def __init__(self, text):
        super().__init__()
        self.open, self.ids, self.links, self.text = [], [], [], []
        self.feed(text)
        self.close()

    def handle_starttag(self, tag, attrs):
        if tag not in VOID:
            self.open.append(tag)
        self._attributes(attrs)

    def handle_startendtag(self, tag, attrs):
        self._attributes(attrs)

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        self.text.append(data)

    def _attributes(self, attrs):
        self.ids += [value for name, value in attrs if name == "id"]
        self.links += [value for name, value in attrs if name in ("src", "href", "xlink:href", "action")]


@pytest.fixture(scope="module")
def report(tmp_path_factory):
    paths = make_run(tmp_path_factory.mktemp("runs"))
    text = write_report(paths, status(STEPS, state="finished")).read_text()
    return text, Page(text)


def test_the_page_is_well_formed_and_needs_nothing_else(report):
    text, page = report
    assert page.open == []
    assert len(page.ids) == len(set(page.ids))
    assert page.links and all(link.startswith("#") and link[1:] in page.ids for link in page.links)
    assert "http" not in text and "<script" not in text and "@import" not in text
    assert set(re.findall(r"url\(#([^)]+)\)", text)) <= set(page.ids)


def test_the_page_has_the_figures_and_the_curves(report):
    text, page = report
    words = " ".join(page.text)
    for part in (
        "12.8 %",
        "86.8 %",
        "+74.0 points",
        "92.8 %",
        "3840",
        "zero_advantage",
        "finish_unresolved",
        "student, held-out",
        "trainer",
    ):
        assert part in words
    assert text.count("<svg") == 8
    assert "no data yet" not in words
    assert "tasks_per_step: 32" in words


def test_colours_follow_the_theme_of_the_reader(report):
    text, _ = report
    assert "prefers-color-scheme: dark" in text
    drawn = "".join(re.findall(r"<svg.*?</svg>", text, re.DOTALL))
    assert "var(--accent)" in drawn
    assert not re.findall(r"#(?!000000)[0-9a-f]{6}\b", drawn)


def test_what_models_and_data_say_is_escaped(report):
    text, page = report
    assert "<b>bold</b>" not in text
    assert "Spell this word backward: &lt;b&gt;bold" in text
    assert "Spell this word backward: <b>bold</b>" in page.text


def test_a_gap_in_the_metrics_is_a_gap_in_the_line(report):
    """Steps 60 to 62 have no reward: the line is drawn in two pieces, and nowhere falls to zero."""
    text, _ = report
    curve = re.search(r'<svg[^>]*aria-label="plot: learning".*?</svg>', text, re.DOTALL)[0]
    pieces = [len(re.findall(r"M ", path)) for path in re.findall(r'<path d="([^"]*)"[^>]*var\(--slate\)', curve)]
    assert 2 in pieces


def test_a_folder_with_nothing_in_it_says_so(tmp_path):
    paths = RunPaths(tmp_path / "new")
    paths.root.mkdir()
    page = Page(write_report(paths).read_text())
    assert page.open == [] and " ".join(page.text).count("no data yet") >= 8
    with pytest.raises(UserError, match="nothing to draw"):
        learning_curve_png(paths, tmp_path / "curve.png")


@pytest.mark.parametrize("steps", [0, 1, 30])
def test_a_run_in_progress(tmp_path, steps):
    paths = make_run(tmp_path, steps)
    page = Page(write_report(paths, status(steps)).read_text())
    words = " ".join(page.text)
    assert page.open == [] and f"Step {steps} of {STEPS}" in words and "running" in words


def test_an_evaluation_that_does_not_count_is_a_gap_and_says_why(tmp_path):
    paths = make_run(tmp_path, 20)
    write_evaluation(paths, "eval_000020", 0.9, items=100, unscored=50)
    words = " ".join(Page(write_report(paths, status(20)).read_text()).text)
    assert "does not count" in words and "50 of 100 samples are scored" in words and "ConnectionError: refused" in words


def test_without_a_ledger_the_last_summary_is_used(tmp_path):
    paths = make_run(tmp_path)
    write_summary(paths, build_summary(paths, status(STEPS, state="finished")))
    words = " ".join(Page(write_report(paths).read_text()).text)
    assert "finished" in words and f"Step {STEPS} of {STEPS}" in words


def test_the_picture_for_the_readme(tmp_path):
    out = learning_curve_png(make_run(tmp_path), tmp_path / "curve.png")
    data = out.read_bytes()
    assert data.startswith(b"\x89PNG") and int.from_bytes(data[16:20]) == 1600
