"""The page on the real server: the texts are the library's, every token has its origin, and the check holds."""

from draftproof.core.sampling import SamplingParams
from serve.browser import ask, in_a_browser, opened

pytestmark = in_a_browser
QUESTION = "the fox and the fox and the fox and the"


def test_chats_are_the_librarys_texts_and_are_the_same_without_speculation(endless, chromium):
    with opened(chromium, f"{endless.url}/") as (tab, complaints):
        tab.wait_for_selector("#model:text-is('tiny')")
        tab.wait_for_selector("#state:text-is('connected')")
        tab.fill("#seed", "7")
        tab.fill("#max-tokens", "32")
        for temperature, rule in ((0, ""), (0.9, "coupled")):
            tab.click("#clear")
            tab.fill("#temperature", str(temperature))
            tab.select_option("#rule", rule)
            ask(tab, QUESTION)
            expected = endless.engine.generate(
                [{"role": "user", "content": QUESTION}],
                SamplingParams(temperature=temperature, seed=7),
                max_tokens=32,
                **({"rule": rule} if rule else {}),
            )
            assert tab.locator(".words").text_content() == expected.text
            assert f"{len(expected.tokens)} tokens · " in tab.inner_text(".facts")
            origins = {t.get_attribute("class") for t in tab.locator(".words .t").all()}
            assert "t residual" in origins  # n-grams of a random model are mostly wrong
            assert origins <= {"t draft", "t residual", "t bonus", "t plain"}
            tab.click(".check button")
            tab.wait_for_selector(".check .same, .check .different, .check .problem")
            assert "The same" in tab.inner_text(".check p")
        tab.wait_for_selector("[data-field=running] path[d*=L]", state="attached")
        assert tab.inner_text("[data-field=waiting] dd") == "0"
        assert tab.inner_text("[data-field=kv] dd").endswith(" %")
        assert complaints == []
