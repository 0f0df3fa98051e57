"""The slash commands of a chat."""

import json
from dataclasses import replace
from types import SimpleNamespace

import pytest
from rich.console import Console

from draftproof.cli.compare import choices_to_compare, run_side_by_side, same_seed_if_coupled, why_texts_differ
from draftproof.cli.conversation import Conversation, Settings, load_conversation
from draftproof.cli.generate import Answer
from draftproof.cli.options import Choice
from draftproof.cli.slash import COMMANDS, LeaveChat, run_command
from draftproof.core.sampling import SamplingParams

SAMPLING = {"temperature": 0.7, "top_k": None, "top_p": 1.0, "min_p": 0.0, "seed": 3}


@pytest.fixture
def conversation(model):
    return Conversation(Settings(Choice(model), dict(SAMPLING), max_tokens=8))


def ask(conversation, text):
    answer = Answer()
    list(conversation.say(text, answer))
    return answer


def test_help_lists_every_command(conversation):
    listed = run_command(conversation, "/help")
    assert all(name in listed for name in COMMANDS)


@pytest.mark.parametrize(
    ("line", "shown"),
    [
        ("/drafter suffix", "suffix"),
        ("/drafter none", "plain decoding"),
        ("/drafter early-exit:1", "early-exit:1"),
        ("/rule token", "rule token"),
        ("/draft-length 3", "draft length 3"),
        ("/sampling temperature=0.2 top-k=5", "top-k=5"),
        ("/sampling top-k=0", "top-k=off"),
        ("/sampling temperature=off", "temperature=1 "),
        ("/seed 11", "seed 11"),
        ("/seed off", "seed off"),
        ("/compare on", "comparison on"),
        ("/compare on", "/rule coupled makes them equal"),
        ("/rounds on", "shown"),
    ],
)
def test_a_command_switches_and_shows(conversation, line, shown):
    assert shown in run_command(conversation, line)


def test_default_restores_the_model_s_own_value(conversation, model):
    engine = conversation.engines.get(Choice(model))
    conversation.engines.get = lambda choice: SimpleNamespace(default_sampling=SamplingParams(temperature=0.3, top_k=9))
    assert "temperature=0.3  top-k=9  top-p=1  min-p=0  seed=3" in run_command(
        conversation, "/sampling temperature=default top-k=default"
    )
    assert "top-k=off" in run_command(conversation, "/sampling top-k=off")
    assert conversation.settings.sampling == {"top_p": 1.0, "min_p": 0.0, "seed": 3, "top_k": None}
    assert engine.tokenizer is not None


def test_a_command_alone_shows_and_changes_nothing(conversation, model):
    shown = [
        run_command(conversation, line)
        for line in ("/target", "/drafter", "/rule", "/draft-length", "/sampling", "/seed")
    ]
    assert shown[:4] == [model, "auto", "block", "auto"]
    assert shown[5] == "seed 3"
    assert conversation.settings.sampling == SAMPLING


@pytest.mark.parametrize(
    ("line", "complaint"),
    [
        ("/nonsense", "/help lists"),
        ("/rul token", r"no command /rul; did you mean /rule\?"),
        ("/drafter ngramm", r"no drafter 'ngramm'; did you mean ngram\?"),
        ("/rule strict", "the rules are block"),
        ("/drafter no-such-model", "neither"),
        ("/draft-length long", "neither 'auto'"),
        ("/sampling heat=2", "temperature"),
        ("/sampling temperature=-1", "temperature: -1.0 is not in the range"),
        ("/sampling top-k=many", "top-k: 'many' is not a valid integer"),
        ("/sampling temperature=0.1 min-p=2", "min-p: 2.0 is not in the range"),
        ("/compare maybe", "must be on or off"),
        ("/save", "/save chat.json"),
        ("/load", "/load chat.json"),
    ],
)
def test_what_cannot_be_done_leaves_everything_as_it_was(conversation, line, complaint):
    before = (conversation.settings.choice, dict(conversation.settings.sampling))
    with pytest.raises(ValueError, match=complaint):
        run_command(conversation, line)
    assert before == (conversation.settings.choice, conversation.settings.sampling)


def test_rounds_are_refused_under_rules_without_a_coin(conversation):
    run_command(conversation, "/rounds on")
    with pytest.raises(ValueError, match="token and block"):
        run_command(conversation, "/rule coupled")
    assert conversation.settings.choice.rule == "block"


def test_turns_are_remembered_and_forgotten(conversation):
    answer = ask(conversation, "the fox")
    assert [m["role"] for m in conversation.messages] == ["user", "assistant"]
    assert conversation.messages[1]["content"] == answer.text
    run_command(conversation, "/new")
    assert conversation.messages == []


def test_a_seed_gives_the_same_answer_under_another_drafter_if_coupled(conversation):
    run_command(conversation, "/rule coupled")
    first = ask(conversation, "the fox").text
    run_command(conversation, "/new")
    run_command(conversation, "/drafter none")
    assert ask(conversation, "the fox").text == first


def test_a_saved_conversation_goes_on(conversation, tmp_path):
    ask(conversation, "the fox")
    run_command(conversation, "/draft-length 2")
    file = tmp_path / "talk.json"
    run_command(conversation, f"/save {file}")
    found = load_conversation(file)
    assert (found.settings, found.messages) == (conversation.settings, conversation.messages)
    conversation.messages.clear()
    assert "2 messages" in run_command(conversation, f"/load {file}")


def test_a_file_that_is_no_conversation_is_refused(conversation, tmp_path):
    file = tmp_path / "other.json"
    file.write_text(json.dumps({"messages": []}))
    with pytest.raises(ValueError, match="not a conversation"):
        run_command(conversation, f"/load {file}")


def test_quit_leaves_the_chat(conversation):
    with pytest.raises(LeaveChat):
        run_command(conversation, "/quit")


def side_by_side(conversation, rule, temperature=1.0):
    """Answer a prompt with all drafters to compare; return the texts' tokens and the line below them."""
    choice = replace(conversation.settings.choice, rule=rule)
    sampling = same_seed_if_coupled(SamplingParams(temperature=temperature), choice)
    choices = choices_to_compare(choice, conversation.engines.get(choice).hf)
    arguments = {"sampling": sampling, "max_tokens": 24}
    answers = run_side_by_side(Console(quiet=True), conversation.engines, choices, "the fox", arguments)
    return [answer.tokens for answer in answers.values()], why_texts_differ(answers.values(), sampling, choice)


def test_a_comparison_of_sampled_texts_says_why_they_differ(conversation):
    tokens, line = side_by_side(conversation, "block")
    assert tokens[0] != tokens[1]
    assert "a different random draw from the same distribution" in line
    assert "/rule coupled" in line


@pytest.mark.parametrize(("rule", "temperature"), [("coupled", 1.0), ("block", 0.0)])
def test_a_comparison_of_coupled_or_greedy_texts_shows_one_text(conversation, rule, temperature):
    tokens, line = side_by_side(conversation, rule, temperature)
    assert tokens[0] == tokens[1] == tokens[2]
    assert line == "The texts are equal, token for token."
