"""The page in a browser: clicks, keys, no errors, nothing wider than the screen."""

import json
import re
import shutil
from contextlib import contextmanager

import pytest

from budget import budgeted
from draftproof.explain.explanation import page, write_page
from explain.runs import drawing, recorded

CHROMIUM = shutil.which("chromium")
FLAGS = (
    "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-background-networking",
    "--disable-component-update", "--disable-sync",
)  # fmt: skip
RUNS = {
    "drawn": lambda: recorded("token", drawing()),
    "block": lambda: recorded("block", drawing()),
    "chosen": lambda: recorded("token", "ngram", temperature=0.5),
    "plain": lambda: recorded("token", "ngram", tokens=1),
}


def test_a_page_is_one_file_and_holds_its_data():
    explanation = RUNS["drawn"]()
    made = page(explanation)
    held = re.search(r'<script type="application/json" id="data">(.*?)</script>', made, re.S)
    assert json.loads(held[1]) == json.loads(json.dumps(explanation.as_dict()))
    assert not re.search(r'(src|href)="(?!data:)', made)
    assert "default-src 'none'" in made


def test_generated_text_cannot_escape_its_script_element():
    explanation = RUNS["drawn"]()
    hostile = type(explanation)(
        "</script><script>alert(1)</script>", {}, [], [], explanation.stats, explanation.tokenizer
    )
    assert "<script>alert(1)" not in page(hostile)


@contextmanager
def opened(file, width, scheme="light"):
    """Open the page in a window of this width, and collect its errors and requests."""
    playwright = pytest.importorskip("playwright.sync_api")
    with playwright.sync_playwright() as host:
        browser = host.chromium.launch(executable_path=CHROMIUM, args=list(FLAGS))
        tab = browser.new_page(viewport={"width": width, "height": 900}, color_scheme=scheme)
        complaints = []
        tab.on("console", lambda message: complaints.append(message.text) if message.type == "error" else None)
        tab.on("pageerror", lambda error: complaints.append(str(error)))
        tab.on("request", lambda request: complaints.append(request.url) if request.url.startswith("http") else None)
        tab.goto(file.as_uri())
        yield tab, complaints
        browser.close()


OUTSIDE = (  # elements that end beyond the right border; the strip of rounds scrolls by itself
    "[...document.querySelectorAll('main *:not(.strip *)')]"
    ".filter(e => e.getBoundingClientRect().right > innerWidth + 1).length"
)
browser = pytest.mark.skipif(CHROMIUM is None, reason="no chromium on this machine")


@browser
@pytest.mark.browser
@pytest.mark.parametrize("kind", budgeted(list(RUNS), ["block"]))
def test_the_page_can_be_walked_through(kind, tmp_path):
    explanation = RUNS[kind]()
    with opened(write_page(explanation, tmp_path / "page.html"), 1280) as (tab, complaints):
        assert tab.locator("#text .t:not(.gone)").count() == len(explanation.output)
        assert tab.locator(".column").count() == len(explanation.rounds)
        for _ in explanation.rounds:
            tab.keyboard.press("ArrowLeft")
        for number, round_ in enumerate(explanation.rounds, 1):
            assert f"Round {number} of {len(explanation.rounds)}" in tab.inner_text("#where")
            assert tab.locator(".chip").count() == len(round_.slots) + 1
            tab.keyboard.press("ArrowRight")
        tab.locator(".column").first.click()
        tab.locator(".chip").first.click()
        for round_ in explanation.rounds:
            for place in range(len(round_.slots) + 1):
                assert tab.locator(".chip[aria-pressed=true]").count() == 1
                assert tab.locator(".chip").nth(place).get_attribute("aria-pressed") == "true"
                assert tab.inner_text("#story")
                assert tab.locator(".bar-row").count() > 0
                tab.keyboard.press("Shift+ArrowRight")
        assert complaints == []


@browser
@pytest.mark.browser
def test_clicks_select(tmp_path):
    explanation = RUNS["drawn"]()
    with opened(write_page(explanation, tmp_path / "page.html"), 1280) as (tab, complaints):
        tab.locator("#text .t.residual:not(.part)").first.click()
        assert "replacement" in tab.inner_text("#detail-title")
        assert "max(0, p − q)" in tab.inner_text("#story")
        tab.locator(".chip.rejected").first.click()
        assert "rejected" in tab.inner_text("#detail-title")
        assert "coin" in tab.inner_text("#coin")
        assert tab.locator("#text .t.gone:visible").count() == 0
        tab.check("#show-rejected")
        assert tab.locator("#text .t.gone:visible").count() > 0
        tab.click("#next")
        tab.click("#previous")
        tab.locator(".intro summary").click()
        assert complaints == []


IN_VIEW = (
    "id => { const box = document.getElementById(id).getBoundingClientRect();"
    " return box.top >= 0 && box.bottom <= innerHeight; }"
)


@browser
@pytest.mark.browser
@pytest.mark.parametrize("key", ["ArrowLeft", "ArrowRight", "Shift+ArrowRight"])
def test_arrow_keys_change_only_what_is_on_the_screen(key, tmp_path):
    with opened(write_page(RUNS["drawn"](), tmp_path / "page.html"), 1280) as (tab, complaints):
        assert not tab.evaluate(IN_VIEW, "story")  # the control: the rounds begin below the fold
        tab.keyboard.press(key)
        assert all(tab.evaluate(IN_VIEW, id) for id in ("where", "chips", "detail-title", "story"))
        place = tab.evaluate("scrollY")
        tab.keyboard.press(key)
        assert tab.evaluate("scrollY") == place  # what is visible is not moved
        tab.evaluate("scrollTo(0, document.body.scrollHeight)")
        tab.keyboard.press(key)
        assert tab.evaluate(IN_VIEW, "where")
        assert complaints == []


@browser
@pytest.mark.browser
@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("width", [1280, 390])
def test_nothing_is_wider_than_the_screen(width, scheme, tmp_path):
    with opened(write_page(RUNS["drawn"](), tmp_path / "page.html"), width, scheme) as (tab, complaints):
        for _ in range(4):
            assert tab.evaluate("document.documentElement.scrollWidth") <= width
            assert tab.evaluate(OUTSIDE) == 0
            tab.keyboard.press("ArrowRight")
        assert complaints == []
