"""The page in a real headless Chromium: it loads, follows what goes on, and opens down to what was said in a sample.

Needs the extra `browser` and a Chromium of the system; where one is missing, the one line of the skip says so.
"""

from __future__ import annotations

import os
import shutil

import pytest

from pipeline.evaluation.plan import EvalRequest
from tests.deployments.site import STEPS_BEFORE, WAIT_S, Site

MISSING = "the page was not opened in a browser: pip install -e '.[browser]' and apt-get install chromium"
PROGRAMS = ("chromium", "chromium-browser", "google-chrome")
sync_api = pytest.importorskip("playwright.sync_api", reason=MISSING)
CHROMIUM = next(filter(None, map(shutil.which, PROGRAMS)), None)
if CHROMIUM is None:
    pytest.skip(MISSING, allow_module_level=True)
SIZE = {"width": 1280, "height": 900}


@pytest.fixture(scope="module")
def browser():
    with sync_api.sync_playwright() as playwright:
        arguments = ["--no-sandbox"] if os.geteuid() == 0 else []
        opened = playwright.chromium.launch(executable_path=CHROMIUM, args=arguments)
        yield opened
        opened.close()


@pytest.fixture
def site(tmp_path):
    with Site(tmp_path) as made:
        yield made


@pytest.fixture
def look(browser, tmp_path):
    """Opens a page, and at the end leaves its picture in light and dark. What its console complains of fails the test, unless it
    is the refused request that the test made (`refused`)."""
    pages, complaints = [], []

    def opened(address: str, *, refused: bool = False):
        page = browser.new_page(viewport=SIZE, color_scheme="light")
        page.set_default_timeout(1000 * WAIT_S)

        def heard(said) -> None:
            if said.type in ("error", "warning") and not (refused and said.text.startswith("Failed to load resource")):
                complaints.append(said.text)

        page.on("console", heard)
        page.on("pageerror", lambda error: complaints.append(str(error)))
        page.goto(address)
        pages.append(page)
        return page

    yield opened
    for number, page in enumerate(pages):
        for scheme in ("light", "dark"):
            page.emulate_media(color_scheme=scheme)
            page.screenshot(path=tmp_path / f"{number}-{scheme}.png", full_page=True)
        page.close()
    assert complaints == []


def test_a_run_is_shown_and_followed(site, look):
    page = look(site.url)
    assert page.title() == "rollout"
    page.get_by_role("heading", name=site.paths.run_id).wait_for()
    for title in ("Stages", "Placement pool", "Over time", "Learning", "Held-out evaluations, and what the samples came to"):
        page.get_by_role("heading", name=title, exact=True).wait_for()
    for figure in ("Groups in the pipeline", "Backlog (items)", "Staleness (versions)", "Held-out accuracy", "Loss"):
        page.get_by_role("img", name=figure, exact=True).wait_for()
    states = page.get_by_role("img", name="running 8").get_attribute("aria-label")
    assert states == "pending 11, running 8, written 8, ready 4, dropped 1"
    pool = page.locator("[data-key=pool]").inner_text()
    assert "tokens held\n7\n" in pool and "gpu-b: gpu\t0.25 of 1" in pool
    row = page.get_by_role("row").filter(has_text="teacher scorer").inner_text().split("\t")
    assert row[1] == "3" and row[3] == "1.2 s"
    chart = page.get_by_role("img", name="Loss", exact=True)
    curve = chart.locator("polyline").get_attribute("points")
    chart.evaluate("node => node.mark = 'the same'")
    for _ in range(2):
        site.do(site.go_on())
    page.locator("#detail").get_by_text(f"step {STEPS_BEFORE + 2} of 120").wait_for()
    sync_api.expect(chart.locator("polyline")).not_to_have_attribute("points", curve, timeout=1000 * WAIT_S)
    assert chart.evaluate("node => node.mark") == "the same", "what has not changed is left alone"


def test_an_evaluation_of_a_run_opens_down_to_the_conversation(site, look):
    page = look(site.url)
    page.get_by_role("link", name="step 20").click()
    page.get_by_text("student at step 20").wait_for()
    page.get_by_label("failure class").select_option("finish_unresolved")
    page.locator("summary").first.click()
    talk = page.locator(".talk").inner_text()
    assert "Spell this word backward" in talk and "reference answer" in talk
    page.go_back()
    page.get_by_role("heading", name="Stages", exact=True).wait_for()


def test_an_evaluation_is_followed_and_stays_as_a_person_left_it(site, look):
    name = site.do(site.jobs.submit(EvalRequest(n=2)))["id"]
    page = look(f"{site.url}/#eval/{name}")
    page.get_by_text("0 of 16 samples").wait_for()
    site.do(site.player.let(6))
    page.get_by_text("6 of 16 samples").wait_for()
    page.locator("summary").filter(has_text="2.0").click()
    talk = page.locator(".talk")
    assert "The test of <b>add</b> fails." in talk.inner_text(), "a model's text is text"
    assert "sandbox, exit code 0" in talk.inner_text()
    talk.evaluate("node => node.mark = 'the same'")
    site.do(site.player.let(10))
    page.get_by_text("16 of 16 samples").wait_for()
    page.get_by_text("done").first.wait_for()
    assert talk.evaluate("node => node.mark") == "the same"
    page.get_by_label("failure class").select_option("infra")
    page.locator("summary").first.click()
    page.get_by_text("SandboxError: no space left").first.wait_for()
    assert page.locator("summary").count() == 4


@pytest.mark.parametrize("address", ["nonsense", "run/none", "run/{run}/eval_000999", "eval/none"])
def test_an_address_that_names_nothing_says_so(site, look, address):
    page = look(f"{site.url}/#{address.format(run=site.paths.run_id)}", refused=True)
    page.get_by_role("heading", name="There is no such thing").wait_for()
    assert page.get_by_role("alert").count() == 0
    page.get_by_role("link", name="what is newest").click()
    page.get_by_role("heading", name="Stages", exact=True).wait_for()


def test_the_page_asks_for_the_token(browser, look, tmp_path):
    with Site(tmp_path / "closed", token="s3cret") as site:
        page = look(site.url, refused=True)
        page.get_by_label("bearer token").fill("s3cret")
        page.get_by_role("button", name="use it").click()
        page.get_by_role("heading", name=site.paths.run_id).wait_for()


def test_a_service_that_goes_away_is_said_and_found_again(site, look):
    page = look(site.url, refused=True)
    page.get_by_role("heading", name="Stages", exact=True).wait_for()
    page.route("**/v1/**", lambda route: route.abort())
    page.get_by_role("alert").wait_for()
    page.unroute("**/v1/**")
    page.get_by_role("alert").wait_for(state="hidden")
