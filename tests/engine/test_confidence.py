"""Published drafters end greedy drafts by their own confidence, as heads that were trained here do.

Lengths are fixed here, because "auto" would choose them by measured times; the last test shows who asks for "auto".
"""

import pytest

import draftproof as dp
from draftproof.drafters.registry import resolve
from engine.perfect_drafters import DOWN, UP, acceptance, dflash_folder, eagle3_folder, target
from models.mtp_checkpoints import write
from models.numbered_weights import VOCABULARY
from models.reference_checkpoints import written
from models.tiny_targets import tiny_target

PROMPTS = [[1, 2, 3], [4], [5, 6, 7, 8, 9, 10, 11], [2, 2]]


@pytest.fixture(scope="module", params=["eagle3", "dflash", "mtp"])
def unsure(request, tmp_path_factory):
    """Return a target and the name of a drafter with random weights for it, of which nothing is likely."""
    folder = tmp_path_factory.mktemp(request.param) / "drafter"
    if request.param == "mtp":
        return write(folder, "deepseek_v3"), "mtp"
    name = {"eagle3": "full vocabulary", "dflash": "plain"}[request.param]
    return tiny_target(VOCABULARY, 16, 8), f"{request.param}:{written(request.param, name, folder)}"


def outputs(model, spec, confidence, temperature=0.0):
    drafter = resolve(spec, confidence=confidence, hf=model)
    return dp.load(model, drafter, num_draft_tokens=4).generate(PROMPTS, temperature=temperature, max_tokens=16)


def drafted(made) -> int:
    return sum(output.stats.drafted for output in made)


def test_auto_ends_unlikely_greedy_drafts(unsure):
    whole, ended = (outputs(*unsure, confidence) for confidence in (0.0, "auto"))
    assert [output.tokens for output in ended] == [output.tokens for output in whole]
    assert 0 < drafted(ended) < 0.8 * drafted(whole)


def test_auto_leaves_drawn_drafts_as_long_as_they_are(unsure):
    """A round drafts less than 4 tokens only where a text ends."""
    made = outputs(*unsure, "auto", temperature=0.9)
    assert drafted(made) > 3 * (sum(output.stats.rounds for output in made) - len(PROMPTS))


def test_a_number_is_taken_as_it_is(unsure):
    made = outputs(*unsure, 1.0)
    assert drafted(made) <= sum(output.stats.rounds for output in made)  # at most one token a round: it was submitted


@pytest.mark.parametrize(("kind", "write_to"), [("eagle3", eagle3_folder), ("dflash", dflash_folder)])
def test_auto_leaves_sure_drafts_as_long_as_they_are(kind, write_to, tmp_path):
    drafter = resolve(f"{kind}:{write_to(tmp_path, 'speculators')}", confidence="auto", hf=target())
    made = dp.load(target(), drafter, num_draft_tokens=4).generate([[UP], [DOWN, 3]], temperature=0, max_tokens=25)
    assert acceptance(made) > 0.99
    assert drafted(made) >= 2 * 4 * 4


@pytest.mark.parametrize("confidence", ["always", -0.1, 1.5])
def test_what_is_no_confidence_is_refused(confidence, tmp_path):
    with pytest.raises(ValueError, match="confidence must be a probability in"):
        resolve(f"dflash:{dflash_folder(tmp_path, 'original')}", confidence=confidence, hf=target())


def test_a_draft_length_of_auto_asks_for_it(unsure, monkeypatch):
    asked = []

    def noted(*arguments, **options):
        asked.append(options["confidence"])
        return resolve(*arguments, **options)

    monkeypatch.setattr("draftproof.engine.load.resolve", noted)
    model, spec = unsure
    dp.load(model, spec)
    dp.load(model, spec, num_draft_tokens=3)
    assert asked == ["auto", 0.0]
