"""The server's page in a browser: what it asks, what it shows, its check, keys, and nothing wider than the screen."""

import re
from contextlib import contextmanager

import pytest

from serve.browser import ask, in_a_browser, opened
from serve.page_server import ANSWER, FILES, PageServer, served

WHOLE = "".join(text for text, _ in ANSWER)
pytestmark = in_a_browser


@contextmanager
def page_of(chromium, fake, **options):
    with served(fake) as url, opened(chromium, url, **options) as (tab, complaints):
        yield tab, complaints


def test_the_files_name_no_other_server_and_never_make_markup_of_text():
    for file in FILES.values():
        text = file.read_text()
        assert not re.search(r"https?://(?!www\.w3\.org/2000/svg)", text), file.name
        assert not re.search(r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|\beval\(", text), file.name


def test_an_answer_is_shown_by_origin_and_the_conversation_goes_on(chromium):
    fake = PageServer()
    with page_of(chromium, fake) as (tab, complaints):
        tab.wait_for_selector("#model:text-is('tiny-model')")
        tab.fill("#seed", "7")
        ask(tab)
        assert tab.locator(".words").text_content() == WHOLE
        shown = [(t.text_content(), t.get_attribute("class")) for t in tab.locator(".words .t").all()]
        assert shown == [(text, f"t {origin}") for text, origin in ANSWER]
        assert tab.locator(".words b").count() == 0  # the text of a model is never markup
        facts = tab.inner_text(".facts")
        assert "5 tokens · 2.50 per pass · 50 % of the guesses kept" in facts
        assert "seed 7" in facts
        ask(tab, "And at\nnight?")
        assert complaints == []
    first, second = fake.bodies
    assert {name: first[name] for name in ("stream", "draftproof_trace", "seed", "model")} == {
        **{"stream": True, "draftproof_trace": True, "seed": 7, "model": "tiny-model"}
    }
    assert (first["temperature"], first["max_tokens"]) == (0.7, 256)
    assert first.keys().isdisjoint({"rule", "num_draft_tokens"})  # the server's own
    assert second["messages"] == [
        {"role": "user", "content": "Why?"},
        {"role": "assistant", "content": WHOLE},
        {"role": "user", "content": "And at\nnight?"},
    ]


def test_the_load_is_shown_and_plotted(chromium):
    with page_of(chromium, PageServer()) as (tab, complaints):
        tab.wait_for_selector("[data-field=running] path[d*=L]", state="attached")
        values = {n: tab.inner_text(f"[data-field={n}] dd") for n in ("running", "waiting", "kv", "tokens_per_second")}
        assert values == {"running": "2", "waiting": "1", "kv": "25 %", "tokens_per_second": "88"}
        assert tab.inner_text("[data-field=acceptance] dd") == "–"
        assert tab.inner_text("#state") == "connected"
        assert complaints == []


class TestTheCheck:
    @pytest.mark.parametrize(
        ("temperature", "rule", "why"),
        [("0", "", "every token is the most likely one"), ("0.7", "coupled", "random numbers of the seed")],
    )
    def test_the_same_text_is_confirmed(self, chromium, temperature, rule, why):
        fake = PageServer()
        with page_of(chromium, fake) as (tab, complaints):
            tab.fill("#temperature", temperature)
            tab.select_option("#rule", rule)
            ask(tab)
            assert why in tab.inner_text(".check p")
            assert why in tab.inner_text("#promise")
            tab.click(".check button")
            tab.wait_for_selector(".check .same")
            assert f"The same {len(WHOLE)} characters" in tab.inner_text(".check p")
            assert complaints == []
        with_drafts, without = fake.bodies
        assert without == with_drafts | {"num_draft_tokens": 0}

    def test_the_very_request_is_repeated_even_if_the_models_name_arrived_in_between(self, chromium):
        fake = PageServer()
        fake.listed.clear()
        with page_of(chromium, fake) as (tab, _):
            tab.fill("#temperature", "0")
            ask(tab)
            fake.listed.set()
            tab.wait_for_selector("#model:text-is('tiny-model')")
            tab.click(".check button")
            tab.wait_for_selector(".check .same")
        with_drafts, without = fake.bodies
        assert "model" not in with_drafts
        assert without == with_drafts | {"num_draft_tokens": 0}

    def test_another_text_is_found(self, chromium):
        with page_of(chromium, PageServer(plain=WHOLE[:9] + "<i>or not</i>")) as (tab, complaints):
            tab.fill("#temperature", "0")
            ask(tab)
            tab.click(".check button")
            tab.wait_for_selector(".check .different")
            assert 'differ from character 10 on: "s blue' in tab.inner_text(".check p")
            assert tab.locator(".check i").count() == 0
            assert complaints == []

    def test_it_is_not_offered_where_it_does_not_hold_and_says_why(self, chromium):
        fake = PageServer()
        with page_of(chromium, fake) as (tab, complaints):
            ask(tab)
            assert "the same distribution as without speculation" in tab.inner_text(".check p")
            tab.uncheck("#speculation")
            ask(tab)
            assert "nothing to compare" in tab.locator(".check p").last.inner_text()
            assert tab.locator(".check button").count() == 0
            assert complaints == []
        assert [body.get("num_draft_tokens") for body in fake.bodies] == [None, 0]


class TestWhatGoesWrong:
    def test_a_key_is_asked_for_once_and_then_sent(self, chromium):
        with page_of(chromium, PageServer(api_key="secret")) as (tab, complaints):
            tab.wait_for_selector("#key-dialog[open]")
            tab.keyboard.type("secret")
            tab.keyboard.press("Enter")
            tab.wait_for_selector("#state:text-is('connected')")
            ask(tab)
            assert tab.locator(".words").text_content() == WHOLE
            assert all("401" in complaint for complaint in complaints)  # the browser's own log of the first calls

    def test_without_the_key_the_answer_says_so(self, chromium):
        with page_of(chromium, PageServer(api_key="secret")) as (tab, _):
            tab.wait_for_selector("#key-dialog[open]")
            tab.keyboard.press("Escape")
            tab.fill("#question", "Why?")
            tab.press("#question", "Enter")
            tab.wait_for_selector("#key-dialog[open]")
            tab.click("#key-cancel")
            assert tab.inner_text(".answer .problem") == "The server asks for a key."

    def test_a_refusal_and_an_error_in_the_stream_are_shown_as_text(self, chromium):
        with page_of(chromium, PageServer(refusal=(429, "<b>256 wait</b>", "3"))) as (tab, _):
            ask(tab)
            assert tab.inner_text(".answer .problem") == "<b>256 wait</b> Try again in 3 s."
        with page_of(chromium, PageServer(failure="the engine has stopped")) as (tab, complaints):
            ask(tab)
            assert tab.inner_text(".answer .problem") == "the engine has stopped"
            assert complaints == []

    def test_a_server_without_origins_is_shown_without_colours(self, chromium):
        with page_of(chromium, PageServer(origins=False)) as (tab, complaints):
            ask(tab)
            assert tab.locator(".words").text_content() == WHOLE
            assert tab.locator(".words .t").count() == 0
            assert complaints == []


def test_escape_stops_and_new_chat_forgets(chromium):
    fake = PageServer(answer=(("word ", "draft"),) * 200, pause=0.02)
    with page_of(chromium, fake) as (tab, complaints):
        tab.fill("#question", "Why?")
        tab.press("#question", "Enter")
        tab.wait_for_selector(".words .t")
        tab.keyboard.press("Escape")
        tab.wait_for_selector(".answer[aria-busy=false]")
        assert "Stopped." in tab.inner_text(".answer")
        assert tab.locator(".words .t").count() < 200
        assert tab.evaluate("document.activeElement.id") == "question"
        tab.click("#clear")
        assert tab.locator(".answer").count() == 0
        fake.pause = 0.0
        ask(tab, "Again?")
        assert complaints == []
    assert fake.bodies[-1]["messages"] == [{"role": "user", "content": "Again?"}]


OUTSIDE = (  # elements that end beyond the right border
    "[...document.querySelectorAll('main *')].filter(e => e.getBoundingClientRect().right > innerWidth + 1).length"
)


@pytest.mark.parametrize(("width", "scheme"), [(1280, "light"), (390, "dark")])
def test_nothing_is_wider_than_the_screen(chromium, width, scheme):
    long = (("wordwithoutanyspaces" * 20, "draft"), ("\n" + "x" * 200, "residual"))
    with page_of(chromium, PageServer(answer=long), width=width, scheme=scheme) as (tab, complaints):
        tab.fill("#temperature", "0")
        ask(tab, "why" * 100)
        tab.click(".check button")
        tab.wait_for_selector(".check .same")
        assert tab.evaluate("document.documentElement.scrollWidth") <= width
        assert tab.evaluate(OUTSIDE) == 0
        assert complaints == []
