"""An engine that asks for the plug-in and cannot have it does not start, and is told why in one sentence."""

import re
import subprocess
import sys
import tomllib
from contextlib import nullcontext
from importlib import import_module
from pathlib import Path
from types import SimpleNamespace

import pytest

from draftproof.integrations.vllm import log, requests, runner_v1, runner_v2, startup
from draftproof.integrations.vllm.hooks import Hook, Hooks
from draftproof.integrations.vllm.settings import Settings
from draftproof.integrations.vllm.startup import RefusedError, check, confirm, move_settings, rule_of_worker


def config(asked=None, *, v2=False, method="standard", speculates=True, drafting=None, **more):
    speculation = SimpleNamespace(rejection_sample_method=method, **(drafting or {})) if speculates else None
    additional = {} if asked is None else {"draftproof": asked}
    return SimpleNamespace(additional_config=additional, speculative_config=speculation, use_v2_model_runner=v2, **more)


def test_vllm_finds_the_plug_in_by_its_entry_point():
    project = tomllib.loads((Path(__file__).parents[2] / "pyproject.toml").read_text())["project"]
    [place] = project["entry-points"]["vllm.general_plugins"].values()
    module, _, name = place.partition(":")
    assert callable(getattr(import_module(module), name))


def test_a_configuration_that_asks_for_what_is_there_is_accepted():
    check(config({"rule": "block"}))
    check(config({"rule": "token"}, v2=True))


@pytest.mark.parametrize(("v2", "hooks"), [(False, runner_v1.HOOKS), (True, runner_v2.HOOKS), (False, startup.ENGINE)])
def test_an_unknown_vllm_is_refused_if_the_plug_in_was_asked_for(monkeypatch, v2, hooks):
    monkeypatch.setattr(hooks, "problems", ["forward has the parameters ['x'], expected ['y']"])
    check(config(None, v2=v2))
    with pytest.raises(RefusedError, match=re.escape("['x'], expected ['y']")):
        check(config({}, v2=v2))


@pytest.mark.parametrize(
    ("wrong", "words"),
    [
        ({"asked": {"rule": "blok"}}, "'blok'"),
        ({"asked": {}, "method": "synthetic"}, "'synthetic'"),
        ({"asked": {}, "method": "block"}, "'block'"),
        ({"asked": {}, "watermark_config": object()}, "watermark"),
    ],
)
def test_a_wrong_configuration_is_refused(wrong, words):
    with pytest.raises(RefusedError, match=words):
        check(config(**wrong))


def test_a_refusal_is_no_value_error():
    """pydantic, by which vLLM makes its configuration, would wrap a ValueError in a report of several lines."""
    assert not issubclass(RefusedError, (ValueError, AssertionError))


def test_the_log_says_so_where_there_is_nothing_to_verify(monkeypatch):
    lines: list[str] = []
    monkeypatch.setattr(startup, "logger", lambda: SimpleNamespace(warning=lines.append))
    check(config(None, speculates=False))
    assert lines == []
    check(config({}, speculates=False))
    [line] = lines
    assert "nothing to verify" in line


def test_drawn_drafts_are_not_verified_where_confidences_cut_them():
    def cut(method: str, adaptive: bool) -> dict:
        return {"draft_sample_method": method, "enable_adaptive_verification": adaptive}

    check(config({}, v2=True, drafting=cut("greedy", True)))
    check(config({}, v2=True, drafting=cut("probabilistic", False)))
    check(config(None, v2=True, drafting=cut("probabilistic", True)))
    with pytest.raises(RefusedError, match="enable_adaptive_verification"):
        check(config({}, v2=True, drafting=cut("probabilistic", True)))


@pytest.mark.parametrize("installed", [[], ["shouting"]])
def test_logits_processors_of_other_packages_are_refused_under_v1(monkeypatch, installed):
    found = {"vllm.logits_processors": [SimpleNamespace(name=name) for name in installed]}
    monkeypatch.setattr(runner_v1, "entry_points", lambda group: found[group])
    with pytest.raises(RefusedError, match="'shouting'") if installed else nullcontext():
        runner_v1.refuse_installed_processors()


def worker(settings=None, *, samples=True):
    sampler = SimpleNamespace(draftproof=settings) if samples else None
    return SimpleNamespace(model_runner=SimpleNamespace(rejection_sampler=sampler))


def test_all_workers_that_sample_must_verify_by_the_rule():
    ours, stock, silent = worker(Settings("block")), worker(), worker(samples=False)
    confirm([rule_of_worker(w) for w in (silent, ours, ours)], Settings("block"))
    for workers in ([ours, stock], [stock], [silent], [worker(Settings("token"))]):
        with pytest.raises(RefusedError, match="VLLM_PLUGINS"):
            confirm([rule_of_worker(w) for w in workers], Settings("block"))


def arguments(speculation, additional=None):
    return SimpleNamespace(speculative_config=speculation, additional_config={} if additional is None else additional)


def test_the_setting_is_moved_from_the_speculative_config():
    typed = {"method": "ngram", "draftproof": {"rule": "token"}}
    asked = arguments(typed, {"other": 1})
    for _ in range(2):  # vLLM may make an engine's configuration twice of the same arguments
        move_settings(asked)
        assert asked.speculative_config == {"method": "ngram"}
        assert asked.additional_config == {"other": 1, "draftproof": {"rule": "token"}}
    assert "draftproof" in typed


@pytest.mark.parametrize("speculation", [None, {"method": "ngram"}, '{"draftproof": {}}'])
def test_arguments_without_the_setting_stay_as_they_are(speculation):
    stock = arguments(speculation, {"other": 1})
    move_settings(stock)
    assert stock == arguments(speculation, {"other": 1})


@pytest.mark.parametrize(
    ("additional", "words"),
    [
        ({"draftproof": {"rule": "block"}}, "given twice"),
        ({"draftproof": None}, "given twice"),
        (["draftproof"], "must be a dict"),
        (object(), "must be a dict"),
    ],
)
def test_the_setting_is_refused_beside_another_one(additional, words):
    with pytest.raises(RefusedError, match=words):
        move_settings(arguments({"draftproof": {"rule": "block"}}, additional))


def broken() -> Hooks:
    return Hooks((Hook("no_vllm.config:Config", ("self",)),))


def install_with(monkeypatch, **hooks: Hooks) -> None:
    """Register in a vLLM whose hooks are these."""
    for name in ("ARGUMENTS", "CONFIG", "ENGINE"):
        monkeypatch.setattr(startup, name, hooks.get(name, Hooks(())))
    monkeypatch.setattr(startup, "hooks_of", lambda runner: hooks.get(runner, Hooks(())))
    startup.register()


def test_an_engine_that_does_not_ask_starts_in_an_unknown_vllm(monkeypatch):
    """As long as one of two places is left at which an engine that asks can be refused."""
    create = startup._moves_settings(lambda self, usage=None: "config")
    for unknown in ("ARGUMENTS", "ENGINE", "V1", "V2"):
        install_with(monkeypatch, **{unknown: broken()})
        assert create(arguments(None)) == "config"
    install_with(monkeypatch, CONFIG=broken())
    assert create(arguments({"method": "ngram"})) == "config"
    with pytest.raises(RefusedError, match=re.escape("no_vllm.config:Config")):
        create(arguments({"method": "ngram", "draftproof": {}}))
    with pytest.raises(RefusedError, match="Uninstall draftproof"):
        install_with(monkeypatch, CONFIG=broken(), ARGUMENTS=broken())


def test_a_model_runner_that_our_own_code_cannot_be_imported_for_is_refused(monkeypatch):
    monkeypatch.setitem(sys.modules, "draftproof.integrations.vllm.runner_v2", None)  # importing it raises ImportError
    missing = startup.hooks_of.__wrapped__("V2")
    missing.install()
    monkeypatch.setattr(startup, "hooks_of", lambda runner: missing if runner == "V2" else Hooks(()))
    check(config({}))
    check(config(None, v2=True))
    with pytest.raises(RefusedError, match="runner_v2:HOOKS is not there"):
        check(config({}, v2=True))


WITHOUT_OUR_DEPENDENCIES = """
import sys
for name in ("jaxtyping", "torch", "draftproof.core", "draftproof.kernels"):
    sys.modules[name] = None  # importing it raises ImportError
from draftproof.integrations.vllm import register, startup
print(startup.hooks_of("V1").problems)
"""


def test_vllm_can_import_the_plug_in_where_its_dependencies_are_missing():
    """vLLM would go on without a plug-in whose import fails; what is called later can refuse."""
    command = [sys.executable, "-c", WITHOUT_OUR_DEPENDENCIES]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert "ModuleNotFoundError" in done.stdout, done.stderr


def step(new: dict[str, tuple[int, int]], running: dict[str, tuple[int, int]]):
    """Return a scheduler's output: for each request the tokens computed before, and those of this step."""
    scheduled = {name: count for name, (_, count) in {**new, **running}.items()}
    cached = SimpleNamespace(req_ids=list(running), num_computed_tokens=[before for before, _ in running.values()])
    started = [SimpleNamespace(req_id=name, num_computed_tokens=before) for name, (before, _) in new.items()]
    return SimpleNamespace(num_scheduled_tokens=scheduled, scheduled_cached_reqs=cached, scheduled_new_reqs=started)


def test_requests_that_should_have_emitted_a_token_and_did_not_are_found():
    done = {"done"}
    known = {
        name: SimpleNamespace(request_id=name, num_tokens=9, is_finished=lambda name=name: name in done)
        for name in ("spoke", "silent", "whole prompt", "part of a prompt", "done")
    }
    scheduled = step(
        {"whole prompt": (0, 9), "part of a prompt": (0, 5)},
        {"spoke": (8, 3), "silent": (8, 3), "done": (8, 1), "gone": (8, 1)},
    )
    rows = {name: i for i, name in enumerate(scheduled.num_scheduled_tokens)}
    tokens = [[4] if name == "spoke" else [] for name in rows]
    output = SimpleNamespace(sampled_token_ids=tokens, req_id_to_index=rows)
    found = requests.without_tokens(known, scheduled, output)
    assert {request.request_id for request in found} == {"silent", "whole prompt"}


def test_padding_that_was_taken_for_a_token_is_dropped():
    output = SimpleNamespace(sampled_token_ids=[[4], [-1], [], [5, 6]])
    requests.drop_padding(output)
    assert output.sampled_token_ids == [[4], [], [], [5, 6]]


class Params:
    thinking_token_budget = None
    logprob_token_ids = None
    structured_outputs = None

    def refuses(self, speculative_config):
        raise ValueError("stock refuses")


def test_min_p_and_bias_are_let_through_where_the_plug_in_verifies():
    validate = requests._accepts_min_p_and_bias(Params.refuses)
    served = SimpleNamespace(**{requests.SERVED: "V1"})
    validate(Params(), served)
    with pytest.raises(ValueError, match="stock refuses"):
        validate(Params(), SimpleNamespace())


def test_a_thinking_budget_is_refused_by_name():
    budgeted = Params()
    budgeted.thinking_token_budget = 64
    with pytest.raises(ValueError, match="thinking_token_budget=64"):
        requests._accepts_min_p_and_bias(Params.refuses)(budgeted, SimpleNamespace(**{requests.SERVED: "V1"}))


def test_scores_of_listed_tokens_are_refused_under_v1():
    validate, listed = requests._accepts_min_p_and_bias(Params.refuses), Params()
    listed.logprob_token_ids = [3, 4]
    validate(listed, SimpleNamespace(**{requests.SERVED: "V2"}))
    with pytest.raises(ValueError, match="logprob_token_ids"):
        validate(listed, SimpleNamespace(**{requests.SERVED: "V1"}))


def test_structured_output_is_refused_under_v2_where_drafts_are_drawn():
    validate, asked = requests._accepts_min_p_and_bias(Params.refuses), Params()
    asked.structured_outputs = object()
    for runner, method in (("V1", "probabilistic"), ("V2", "greedy")):
        validate(asked, SimpleNamespace(**{requests.SERVED: runner}, draft_sample_method=method))
    drawn = SimpleNamespace(**{requests.SERVED: "V2"}, draft_sample_method="probabilistic")
    validate(Params(), drawn)
    with pytest.raises(ValueError, match="structured output"):
        validate(asked, drawn)


@pytest.fixture
def logged(monkeypatch) -> list[str]:
    """Lines of vLLM's log."""
    lines: list[str] = []
    monkeypatch.setattr(log, "logger", lambda: SimpleNamespace(info=lambda text, *args: lines.append(text % args)))
    return lines


def make_sampler(monkeypatch, runner, rule: str, device: str) -> None:
    """Make a sampler as vLLM's model runner does, in an engine that asks for the rule."""
    asked = config({"rule": rule}, device_config=SimpleNamespace(device_type=device))
    current = SimpleNamespace(get_current_vllm_config_or_none=lambda: asked)
    monkeypatch.setitem(sys.modules, "vllm.config", current)
    monkeypatch.setitem(sys.modules, "vllm", SimpleNamespace(config=current, __version__="0.32.0"))
    monkeypatch.setattr(runner_v2, "_active", None)
    runner._marks_sampler(lambda self: None)(SimpleNamespace())


@pytest.mark.parametrize(
    ("runner", "device", "rule", "says"),
    [
        (runner_v1, "cpu", "block", "model runner V1 verifies drafts by the rule 'block'"),
        (runner_v1, "cuda", "token", "model runner V1 verifies drafts by the rule 'token'" + log.UNTRIED),
        (runner_v2, "cuda", "token", "model runner V2 verifies drafts by the rule 'token'" + log.UNTRIED),
        (
            *(runner_v2, "cuda", "block"),
            "model runner V2 verifies drafts by the rule 'block', drawn drafts by 'token'" + log.UNTRIED,
        ),
    ],
)
def test_one_line_of_the_log_says_what_verifies_and_what_was_not_tried(monkeypatch, logged, runner, device, rule, says):
    monkeypatch.setattr(runner_v1, "RUNNER", Hooks(()))
    make_sampler(monkeypatch, runner, rule, device)
    [line] = logged
    assert line.endswith(says)
    assert line.startswith("draftproof ")


def test_a_worker_whose_runner_is_unknown_does_not_start(monkeypatch, logged):
    monkeypatch.setattr(runner_v1, "RUNNER", Hooks((Hook("no_vllm.runner:Runner.probs", ("self",)),)))
    with pytest.raises(RefusedError, match=re.escape("no_vllm.runner:Runner.probs")):
        make_sampler(monkeypatch, runner_v1, "block", "cpu")


@pytest.mark.parametrize("version", ["0.28.0", "0.30.1.dev3+g12", "0.32.0"])
def test_nothing_is_said_of_a_tested_version(version):
    assert log.untested(version) == ""


@pytest.mark.parametrize("version", ["0.27.1", "0.33.0rc1", "1.0.0", "dev", ""])
def test_the_log_says_that_a_version_was_not_tested(version):
    assert log.untested(version) == f"; vLLM {version} was not tested, 0.28 to 0.32 were"
