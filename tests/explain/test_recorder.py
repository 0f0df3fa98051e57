"""A recorder does not change the run, and its record is what the rule did."""

import pytest

from draftproof.engine.load import load
from draftproof.explain.recorder import WATCHED, Recorder
from explain.runs import TARGET, V, drawing, recorded
from models.tiny_tokenizers import byte_level

DRAFTERS = {"drawn": drawing, "chosen": lambda: "ngram"}


@pytest.mark.parametrize("kind", DRAFTERS)
@pytest.mark.parametrize("rule", WATCHED)
def test_a_recorded_run_is_the_same_run(rule, kind):
    engine = load(TARGET, DRAFTERS[kind](), rule=rule, num_draft_tokens=4, tokenizer=byte_level())
    plain = engine.generate("the quick brown fox", seed=5, max_tokens=48)
    assert recorded(rule, DRAFTERS[kind](), seed=5).output == plain.tokens


@pytest.mark.parametrize("kind", DRAFTERS)
@pytest.mark.parametrize("rule", WATCHED)
def test_the_rounds_make_up_the_text(rule, kind):
    made = recorded(rule, DRAFTERS[kind]())
    emitted = [token for round_ in made.rounds for token in round_.tokens]
    assert emitted[: len(made.output)] == made.output
    assert sum(len(round_.slots) for round_ in made.rounds) == made.stats.drafted
    assert sum(round_.kept for round_ in made.rounds) == made.stats.accepted


@pytest.mark.parametrize("kind", DRAFTERS)
def test_by_token_a_coin_below_the_ratio_keeps_and_the_first_rejection_ends_the_round(kind):
    made = recorded("token", DRAFTERS[kind](), tokens=150, temperature=0.5)
    slots = [(r, i, slot) for r in made.rounds for i, slot in enumerate(r.slots)]
    for round_, i, slot in slots:
        assert slot.chance == pytest.approx(min(1.0, slot.p / slot.q), rel=1e-5)
        assert slot.judged == (i <= round_.kept)
        if slot.judged:
            assert slot.kept == (slot.coin < slot.chance)
    assert {round_.fate(i) for round_, i, _ in slots} >= {"kept", "rejected"}


def test_by_block_the_longest_part_whose_coin_is_below_its_chance_is_kept():
    rounds = recorded("block", drawing(), tokens=120).rounds
    assert all(round_.as_block for round_ in rounds if round_.slots)
    for round_ in rounds:
        accepted = [i + 1 for i, slot in enumerate(round_.slots) if slot.coin < slot.chance]
        assert round_.kept == max(accepted, default=0)
    assert any(0 < round_.kept < len(round_.slots) for round_ in rounds)


def test_a_chosen_guess_has_all_of_q():
    slots = [slot for round_ in recorded("block", "ngram", temperature=0.5).rounds for slot in round_.slots]
    assert slots
    assert all(slot.q == 1 and not slot.drawn for slot in slots)


@pytest.mark.parametrize("rule", WATCHED)
def test_the_token_after_a_rejection_comes_from_the_residual(rule):
    last_tokens = [r.closing for r in recorded(rule, drawing(), tokens=120).rounds]
    replaced = [c for c in last_tokens if c.after_rejection]
    assert replaced
    for closing in replaced:
        drawn = next(c for c in closing.candidates if c.token == closing.token)
        assert drawn.residual == pytest.approx(max(0.0, closing.weight * drawn.p - drawn.q), abs=1e-6)
        assert drawn.residual > 0
        assert closing.chance >= drawn.residual  # normalised by a mass of at most 1
    assert all(c.chance == pytest.approx(c.p) for c in last_tokens if not c.after_rejection)


def test_candidates_are_few_and_include_the_draft_token():
    for round_ in recorded("token", drawing()).rounds:
        for slot in round_.slots:
            tokens = [c.token for c in slot.candidates]
            assert slot.token in tokens
            assert len(tokens) == len(set(tokens)) <= 10 < V


def test_rules_without_coins_are_refused():
    with pytest.raises(ValueError, match="token and block"):
        Recorder("coupled")


def test_a_batch_is_refused():
    engine = load(TARGET, "ngram", rule=Recorder("token"), tokenizer=byte_level())
    with pytest.raises(ValueError, match="one request at a time"):
        engine.generate(["one", "two"], max_tokens=4)
