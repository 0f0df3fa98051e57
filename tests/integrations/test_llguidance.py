"""llguidance's grammars under speculation: the output is valid under every rule and drafter."""

import json
import sys
from functools import cache

import pytest
import torch
import transformers as tf

import draftproof as dp
from draftproof.engine.engine import Engine
from models.tiny_tokenizers import byte_level

SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 5},
        "n": {"type": "integer", "minimum": 0, "maximum": 99},
        "tags": {"type": "array", "items": {"enum": ["a", "b"]}, "maxItems": 2},
    },
    "required": ["name", "n", "tags"],
    "additionalProperties": False,
    "x-guidance": {"whitespace_flexible": False},
}
EXAMPLE = '{"name":"fox","n":12,"tags":["a","b"]}'
PAIRS = [("ngram", "block"), ("suffix", "token"), ("ngram", "coupled"), ("early-exit:1", "block"), (None, "block")]
TREES = [("ngram", "tree"), ("early-exit:1", "tree")]


@cache
def model() -> tf.LlamaForCausalLM:
    """Return a model with random weights: without a grammar its output is never JSON."""
    tokenizer = byte_level()
    sizes = {"hidden_size": 16, "intermediate_size": 24, "num_attention_heads": 2, "num_hidden_layers": 2}
    config = tf.LlamaConfig(vocab_size=len(tokenizer) + 5, eos_token_id=tokenizer.eos_token_id, **sizes)
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return tf.LlamaForCausalLM(config).eval()


def engine_with(drafter: str | None = "ngram", rule: str = "block") -> Engine:
    pytest.importorskip("llguidance")
    return dp.load(model(), drafter, rule=rule, tokenizer=byte_level(), num_draft_tokens=6)


def prompts(n: int) -> list[list[int]]:
    return [byte_level().encode(f"{i} {EXAMPLE}\n{EXAMPLE}\n") for i in range(n)]


def fits(text: str) -> bool:
    made = json.loads(text)
    assert list(made) == ["name", "n", "tags"]
    assert isinstance(made["name"], str)
    assert len(made["name"]) <= 5
    assert made["n"] in range(100)
    return set(made["tags"]) <= {"a", "b"} and len(made["tags"]) <= 2


@pytest.mark.parametrize(("drafter", "rule"), PAIRS + TREES)
def test_json_keeps_to_its_schema_under_every_rule(drafter, rule):
    engine = engine_with(drafter, rule)
    allowed = dp.llguidance.json_schema(SCHEMA, engine)
    outputs = engine.generate(prompts(10), allowed=allowed, max_tokens=120, seed=1)
    assert all(output.finish_reason == "stop" for output in outputs)
    assert all(fits(output.text) for output in outputs)
    assert drafter is None or sum(output.stats.accepted for output in outputs) > 0


def test_without_the_grammar_no_output_is_json():
    for output in engine_with().generate(prompts(10), max_tokens=40, seed=1):
        with pytest.raises(ValueError):
            json.loads(output.text)


def test_drafting_does_not_change_a_seeded_text_under_a_grammar():
    texts = []
    for drafter in (None, "ngram", "early-exit:1"):
        engine = engine_with(drafter, "coupled")
        outputs = engine.generate(prompts(6), allowed=dp.llguidance.json_schema(SCHEMA, engine), max_tokens=80, seed=3)
        texts.append([output.tokens for output in outputs])
    assert texts[0] == texts[1] == texts[2]


def test_outputs_match_a_regular_expression_and_a_lark_grammar():
    engine = engine_with()
    for allowed in (
        dp.llguidance.regex("(ab|ba){2,3}", engine),
        dp.llguidance.lark('start: ("ab" | "ba"){2,3}', engine),
    ):
        text = engine.generate(prompts(1)[0], allowed=allowed, max_tokens=30, seed=0).text
        assert 2 <= len(text) // 2 <= 3
        assert {text[i : i + 2] for i in range(0, len(text), 2)} <= {"ab", "ba"}


def test_the_mask_depends_on_the_prefix_alone():
    engine = engine_with()
    one, other = (dp.llguidance.json_schema(SCHEMA, engine) for _ in range(2))
    tokens = byte_level().encode(EXAMPLE)
    forward = [one(tokens[:n]) for n in range(len(tokens) + 1)]
    backward = [other(tokens[:n]) for n in reversed(range(len(tokens) + 1))]
    assert all(torch.equal(a, b) for a, b in zip(forward, reversed(backward), strict=True))
    assert len({tuple(mask.tolist()) for mask in forward}) > 5
    assert forward[-1].nonzero().flatten().tolist() == [byte_level().eos_token_id]
    assert other([*tokens, byte_level().eos_token_id]).all()


def test_an_invalid_grammar_is_refused():
    engine = engine_with()
    with pytest.raises(ValueError, match="llguidance"):
        dp.llguidance.regex("(", engine)
    with pytest.raises(ValueError, match="llguidance"):
        dp.llguidance.json_schema(SCHEMA, engine)(byte_level().encode("no"))
    with pytest.raises(ValueError, match="needs an engine with a tokenizer"):
        dp.llguidance.regex("a", dp.load(model(), None))


def test_a_missing_library_is_named_with_what_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "llguidance", None)
    with pytest.raises(ImportError, match=r"draftproof\[grammar\]"):
        dp.llguidance.regex("a", dp.load(model(), None))
