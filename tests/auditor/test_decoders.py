"""Decoders of other libraries and programs: what they are given, what they return, and what is refused."""

import importlib.util
import re
import sys
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from auditor.mutants.world import World
from draftproof.auditor.api import audit
from draftproof.auditor.decoders import DECODERS, maker
from draftproof.auditor.decoders.transformers import Generate, generate_options
from draftproof.auditor.interface import Decoder
from draftproof.core.sampling import SamplingParams
from draftproof.core.types import Round
from engine.many_texts import unchecked

WORLD = World()
WARM = SamplingParams(temperature=0.8, top_k=20, min_p=0.01)


def assisted() -> Generate:
    return maker("transformers_assisted")(WORLD.hf, WORLD.draft_hf)


def lookup(n: int = 3) -> Generate:
    return maker("transformers_lookup")(WORLD.hf, n)


def plain() -> Generate:
    return maker("transformers_plain")(WORLD.hf)


TRANSFORMERS = {"plain": plain, "assisted": assisted, "lookup": lookup}


def test_every_name_has_a_decoder():
    assert all(callable(maker(name)) for name in DECODERS)
    assert isinstance(plain(), Decoder)
    with pytest.raises(ValueError, match=r"'transformers_plain', .*got 'triton'"):
        maker("triton")


class TestTransformers:
    def test_every_sampling_parameter_is_set(self):
        options = generate_options(
            SamplingParams(temperature=0.5, top_p=0.9, repetition_penalty=1.2, logit_bias={3: 1.0})
        )
        assert options["top_k"] == 0  # the default of `generate` is 50
        assert (options["do_sample"], options["temperature"], options["top_p"], options["min_p"]) == (
            True,
            0.5,
            0.9,
            None,
        )
        assert (options["repetition_penalty"], options["sequence_bias"]) == (1.2, {(3,): 1.0})
        assert generate_options(SamplingParams(temperature=0))["do_sample"] is False

    @pytest.mark.parametrize("name", ["presence_penalty", "frequency_penalty"])
    def test_a_parameter_it_does_not_have_is_refused(self, name):
        with pytest.raises(ValueError, match=f"no {name}"):
            plain().decode([[1]], SamplingParams(**{name: 0.5}), max_tokens=1, seeds=[0])

    @pytest.mark.parametrize("build", TRANSFORMERS.values(), ids=TRANSFORMERS)
    def test_a_text_is_a_function_of_its_seed_and_nothing_else_moves(self, build):
        before = torch.random.get_rng_state()
        own = WORLD.hf.generation_config
        one, other = (build().decode(WORLD.prompts[:2], WARM, max_tokens=12, seeds=s) for s in ([3, 4], [3, 5]))
        assert one[0] == other[0]
        assert one[1] != other[1]
        assert torch.equal(before, torch.random.get_rng_state())
        assert WORLD.hf.generation_config is own
        assert "_get_candidate_generator" not in vars(WORLD.hf)

    @pytest.mark.parametrize("build", TRANSFORMERS.values(), ids=TRANSFORMERS)
    def test_its_rounds_add_up_to_its_tokens(self, build):
        for sample in build().decode(WORLD.prompts[:4], WARM, max_tokens=16, seeds=range(4)):
            assert len(sample.tokens) == sum(1 + round_.accepted for round_ in sample.rounds)
            assert all(0 <= round_.accepted <= round_.drafted for round_ in sample.rounds)
        assert any(round_.drafted for round_ in sample.rounds) is (build is not plain)

    def test_the_models_own_settings_do_not_reach_the_distribution(self, monkeypatch):
        monkeypatch.setattr(WORLD.hf.generation_config, "suppress_tokens", list(range(8, 64)))
        samples = plain().decode(WORLD.prompts[:4], SamplingParams(), max_tokens=16, seeds=range(4))
        assert max(token for sample in samples for token in sample.tokens) >= 8

    def test_the_tokens_that_end_a_text_do(self, monkeypatch):
        monkeypatch.setattr(WORLD.hf.generation_config, "eos_token_id", list(range(32)))
        [sample] = plain().decode(WORLD.prompts[:1], SamplingParams(), max_tokens=64, seeds=[0])
        assert len(sample.tokens) < 64
        assert [token < 32 for token in sample.tokens] == [False] * (len(sample.tokens) - 1) + [True]

    def test_prompt_lookup_copies_something(self):
        with pytest.raises(ValueError, match="n ≥ 1 tokens; got 0"):
            lookup(0)


@pytest.mark.statistical
class TestAudited:
    """1,024 tokens, α = 1e-6, fixed seeds: enough to find a wrong temperature; transformers passes."""

    def verdict(self, decoder, sampling: SamplingParams, drafter) -> str:
        asked = {"sampling": sampling, "drafter": drafter, "max_tokens": 1024, "batch": 64}
        with unchecked():
            found = audit(decoder, WORLD.hf, WORLD.prompts, **asked)
        assert found.coverage.rejected > 100
        return found.verdict

    def test_assisted_generation_is_not_called_biased(self):
        assert self.verdict(assisted(), WARM, WORLD.draft_hf) != "biased"

    def test_prompt_lookup_is_not_called_biased(self):
        assert self.verdict(lookup(), WARM, "prompt-lookup") != "biased"

    def test_assisted_generation_at_another_temperature_is(self):
        class Hot:
            def decode(self, prompts, sampling, *, max_tokens, seeds):
                return assisted().decode(prompts, SamplingParams(), max_tokens=max_tokens, seeds=seeds)

        assert self.verdict(Hot(), SamplingParams(temperature=0.5), WORLD.draft_hf) == "biased"


PROGRAM = """
import json, sys
for count, line in enumerate(sys.stdin):
    asked = json.loads(line)
    tokens = [asked["seed"], len(asked["prompt"]), asked["max_tokens"], count]
    rounds = [[2, 1], [1, 1]] if asked["sampling"]["top_k"] else None
    print(json.dumps({"tokens": tokens, "rounds": rounds}), flush=True)
"""


def program(text: str, timeout: float = 20.0):
    return maker("command")([sys.executable, "-c", text], timeout=timeout)


def asked(decoder, sampling: SamplingParams = WARM, n: int = 2):
    try:
        return decoder.decode([[1, 2, 3]] * n, sampling, max_tokens=4, seeds=range(n))
    finally:
        decoder.close()


class TestCommand:
    def test_it_is_asked_line_by_line_and_kept_running(self):
        decoder = program(PROGRAM)
        first = decoder.decode([[1, 2, 3]], WARM, max_tokens=4, seeds=[7])
        second = decoder.decode([[5]], SamplingParams(), max_tokens=9, seeds=[8])
        decoder.close()
        assert first[0].tokens == (7, 3, 4, 0)
        assert first[0].rounds == (Round(2, 1), Round(1, 1))
        assert second[0].tokens == (8, 1, 9, 1)
        assert second[0].rounds is None

    def test_many_requests_do_not_fill_a_pipe(self):
        assert len(asked(program(PROGRAM), n=5000)) == 5000

    @pytest.mark.parametrize(
        ("text", "message"),
        [
            ("print('hello'); input()", r"not an answer \(JSONDecodeError.*'hello'.*\"tokens\""),
            ("print('{\"tokens\": [1.5]}'); input()", "1.5 is not a whole number"),
            ("print('{\"text\": 1}'); input()", "KeyError: 'tokens'"),
            ("import sys; sys.exit('no such model')", r"exit status 1\); it wrote: no such model"),
            ("input(); print('{\"tokens\": [1]}')", "ended without an answer to every request"),
        ],
    )
    def test_what_it_does_wrong_is_reported(self, text, message):
        with pytest.raises(RuntimeError, match=message):
            asked(program(text))

    def test_waiting_for_an_answer_times_out(self):
        with pytest.raises(RuntimeError, match=r"no line within 0\.2 seconds"):
            asked(program("import time; time.sleep(60)", timeout=0.2))

    def test_a_program_that_does_not_exist_is_reported(self):
        with pytest.raises(ValueError, match="'no-such-program' cannot be started: No such file"):
            asked(maker("command")(["no-such-program"]))
        with pytest.raises(ValueError, match="must be a program"):
            maker("command")([])


@pytest.mark.skipif(importlib.util.find_spec("vllm") is not None, reason="vLLM is installed")
def test_without_vllm_the_error_names_what_is_missing():
    with pytest.raises(ImportError, match="needs vLLM"):
        maker("vllm")("some/folder")


def an_llm(rule: str | None = None, *, reachable: bool = True) -> Any:
    """Return what the audit sees of vLLM's `LLM`; the engine of one that is not reachable is in another process."""
    sampler = SimpleNamespace(draftproof=None if rule is None else SimpleNamespace(rule=rule))
    worker = SimpleNamespace(model_runner=SimpleNamespace(rejection_sampler=sampler))
    core = SimpleNamespace(model_executor=SimpleNamespace(driver_worker=worker))
    client = SimpleNamespace(engine_core=core) if reachable else SimpleNamespace()
    return SimpleNamespace(llm_engine=SimpleNamespace(engine_core=client))


@pytest.mark.parametrize(
    ("llm", "who"),
    [
        (an_llm("block"), "draftproof, rule block"),
        (an_llm(), "vLLM"),
        (an_llm("block", reachable=False), "unknown, in another process"),
    ],
)
def test_who_verifies_in_vllm_is_read_off_the_running_engine(monkeypatch, llm, who):
    monkeypatch.setitem(sys.modules, "vllm", SimpleNamespace(__version__="0.32.0"))
    assert maker("vllm")(llm).description["verification"] == who


@pytest.mark.parametrize(("reachable", "words"), [(True, "vLLM verifies by itself"), (False, "cannot be seen")])
def test_an_audit_of_the_plug_in_needs_an_engine_that_shows_it(monkeypatch, reachable, words):
    fake = SimpleNamespace(__version__="0.32.0", LLM=lambda **_options: an_llm(reachable=reachable))
    monkeypatch.setitem(sys.modules, "vllm", fake)
    maker("vllm")("some/folder")
    with pytest.raises(ValueError, match=words):
        maker("vllm")("some/folder", additional_config={"draftproof": {}})


def fake_vllm(monkeypatch, make) -> None:
    monkeypatch.setitem(sys.modules, "vllm", SimpleNamespace(__version__="0.32.0", LLM=make))


@pytest.mark.parametrize(
    ("drafter", "speculation"),
    [
        ("ngram", {"method": "ngram"}),
        ("suffix", {"method": "custom_class", "model": "draftproof.integrations.vllm.Suffix"}),
        ("eagle3:folder", {"method": "eagle3", "model": "folder"}),
        ("folder", {"method": "draft_model", "model": "folder"}),
    ],
)
def test_vllm_is_told_how_to_draft(monkeypatch, drafter, speculation):
    asked: list[dict] = []
    fake_vllm(monkeypatch, lambda **options: asked.append(options) or an_llm())
    decoder = maker("vllm")("some/folder", drafter, draft_length=5)
    given = asked[0]["speculative_config"]
    assert {**given, **speculation, "num_speculative_tokens": 5} == given
    assert decoder.name == f"vllm, {speculation['method']}, verified by vLLM"


def test_a_method_that_vllm_infers_is_named(monkeypatch):
    llm = an_llm()
    llm.llm_engine.vllm_config = SimpleNamespace(speculative_config=SimpleNamespace(method="draft_model"))
    fake_vllm(monkeypatch, lambda **_options: llm)
    decoder = maker("vllm")("some/folder", speculative_config={"model": "folder", "num_speculative_tokens": 3})
    assert decoder.name == "vllm, draft_model, verified by vLLM"


class ReportedError(ValueError):
    """A stand-in for pydantic's: the first line of its text does not say what is wrong."""

    def errors(self):
        return [{"loc": (), "msg": "Value error, no"}, {"loc": ("draftproof",), "msg": "Unexpected argument"}]


@pytest.mark.parametrize(
    ("error", "words"),
    [
        (
            ReportedError("2 validation errors\n…"),
            "no; draftproof: Unexpected argument; is draftproof installed",
        ),
        (ValueError("no such folder"), "no such folder"),
    ],
)
def test_why_vllm_does_not_start_is_said_in_one_line(monkeypatch, error, words):
    def fail(**_options):
        raise error

    fake_vllm(monkeypatch, fail)
    with pytest.raises(ValueError, match=re.escape(words)) as found:
        maker("vllm")("some/folder")
    assert "\n" not in str(found.value)
