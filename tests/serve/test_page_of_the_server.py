"""The page on the real server: the texts are the library's, every token has its origin, and the check holds."""

import pytest

from draftproof.core.sampling import SamplingParams
from serve.browser import ask, in_a_browser, opened

pytestmark = in_a_browser
QUESTION = "the fox and the fox and the fox and the"


@pytest.mark.parametrize(
    ("temperature", "rule"), [(0, ""), (0.9, "coupled"), (0.9, "block")], ids=["greedy", "coupled", "block"]
)
def test_a_chat_is_the_librarys_text_and_the_check_holds_where_it_is_offered(endless, chromium, temperature, rule):
    options = {"rule": rule} if rule else {}
    sampling = SamplingParams(temperature=temperature, seed=7)
    expected = endless.engine.generate([{"role": "user", "content": QUESTION}], sampling, max_tokens=48, **options)
    with opened(chromium, f"{endless.url}/") as (tab, complaints):
        tab.wait_for_selector("#model:text-is('tiny')")
        tab.wait_for_selector("#state:text-is('connected')")
        tab.fill("#temperature", str(temperature))
        tab.fill("#seed", "7")
        tab.fill("#max-tokens", "48")
        tab.select_option("#rule", rule)
        ask(tab, QUESTION)
        assert tab.locator(".words").text_content() == expected.text
        assert "48 tokens · " in tab.inner_text(".facts")
        origins = {t.get_attribute("class") for t in tab.locator(".words .t").all()}
        assert origins <= {"t draft", "t residual", "t bonus", "t plain"}
        assert "t residual" in origins  # n-grams of a random model are mostly wrong
        if rule == "block":
            assert tab.locator(".check button").count() == 0
        else:
            tab.click(".check button")
            tab.wait_for_selector(".check .same, .check .different, .check .problem")
            assert "The same" in tab.inner_text(".check p")
        assert complaints == []


def test_the_load_of_the_server_is_shown(endless, chromium):
    with opened(chromium, f"{endless.url}/") as (tab, complaints):
        tab.wait_for_selector("[data-field=running] path[d*=L]", state="attached")
        assert tab.inner_text("[data-field=running] dd") == "0"
        assert tab.inner_text("[data-field=kv] dd").endswith(" %")
        assert complaints == []
