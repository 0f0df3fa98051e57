"""Drafters are made from their names; anything else is refused."""

import pytest

from drafters.every_drafter import tiny_llama, toy
from drafters.toy_rounds import rng_of, row
from draftproof.drafters.model import ModelDrafter
from draftproof.drafters.ngram import NGram
from draftproof.drafters.prompt_lookup import PromptLookup
from draftproof.drafters.registry import DRAFTERS, is_name, resolve
from draftproof.drafters.suffix import Suffix


@pytest.mark.parametrize(("name", "kind"), [("ngram", NGram), ("prompt-lookup", PromptLookup), ("suffix", Suffix)])
def test_a_name_makes_its_drafter(name, kind):
    assert type(resolve(name)) is kind
    assert resolve(name) is not resolve(name)  # drafters share no state


def test_early_exit_is_made_of_the_target():
    assert type(resolve("early-exit:1", tiny_llama())) is ModelDrafter


def test_a_drafter_is_itself_and_none_is_none():
    drafter = NGram()
    assert resolve(drafter) is drafter
    assert resolve(None) is None


@pytest.mark.parametrize("name", ["ngram", "suffix", "early-exit:1"])
def test_branches_make_a_tree(name):
    drafter = resolve(name, tiny_llama(), branches=2)
    assert drafter is not None
    rows = [row(0, [1, 2, 1, 3, 1])]
    assert drafter.propose(rows, [4], rng_of(rows)).parents is not None


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        (
            "n-gram",
            r'one of "auto", "ngram", .*"early-exit:n", "head", .*"mtp", None or a Drafter; got \'n-gram\'',
        ),
        ("early-exit", "as in \"early-exit:6\"; got 'early-exit'"),
        ("early-exit:two", "wants a number of layers"),
        ("early-exit:9", "has 2 layers"),
        (3, r"must have a method propose\(contexts, k, rng\); int has none"),
    ],
)
def test_what_is_no_drafter_is_refused_and_the_names_are_listed(spec, message):
    with pytest.raises(ValueError, match=message):
        resolve(spec, tiny_llama())


def test_early_exit_without_a_target_or_layers_is_refused():
    with pytest.raises(ValueError, match="pass the target"):
        resolve("early-exit:2")
    with pytest.raises(ValueError, match="a Toy has none"):
        resolve("early-exit:2", toy())


def test_prompt_lookup_makes_no_trees():
    with pytest.raises(ValueError, match="copies one text"):
        resolve("prompt-lookup", branches=2)


def test_names_of_drafters_are_distinguished_from_models():
    assert all(map(is_name, [*DRAFTERS, "early-exit:6", "early-exit", "head", "head:./mine", "suffix+head", "auto"]))
    assert not any(map(is_name, ["Qwen/Qwen3-0.6B", "./model", "smollm2"]))
