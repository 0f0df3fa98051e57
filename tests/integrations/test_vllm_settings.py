"""What an engine asks of the vLLM plug-in is read strictly, and functions that are not as expected are refused."""

import re
import sys
from types import ModuleType, SimpleNamespace

import pytest

from draftproof.integrations.vllm.hooks import Hook, Hooks, Inventory, RefusedError, wrong_parameters
from draftproof.integrations.vllm.settings import Settings, settings_of


def asked(additional_config):
    return settings_of(SimpleNamespace(additional_config=additional_config))


def test_an_engine_that_does_not_ask_is_stock():
    assert asked({}) is None
    assert asked({"gdn_prefill_backend": "triton"}) is None
    assert asked({"rule": "of another plug-in"}) is None
    assert asked(None) is None
    assert settings_of(SimpleNamespace()) is None


def test_the_rule_is_block_unless_another_is_named():
    assert asked({"draftproof": {}}) == Settings("block")
    assert asked({"draftproof": {"rule": "token"}, "other": 1}) == Settings("token")


@pytest.mark.parametrize(
    ("config", "words"),
    [
        ({"draftproof": {"rule": "coupled"}}, "'coupled'"),
        ({"draftproof": {"rules": "block"}}, "'rules'"),
        ({"draftproof": "block"}, "must be a dict"),
        ({"draftproof": True}, "must be a dict"),
        ({"draftproof": None}, "leave it out"),
        ({"draftproof": []}, "must be a dict"),
        ({"draftproof": {"rule": None}}, "got None"),
        ({"draftproof": {"rule": ["block"]}}, "got ['block']"),
        ({"draftproof": {"rule": "block", "Rule": "token"}}, "'Rule'"),
        ({"draftproof": {1: 2}}, "got 1"),
        ({"draft_proof": {"rule": "block"}}, "did you mean 'draftproof'"),
        ({"Draftproof": {}}, "did you mean 'draftproof'"),
        ({"draftprof": {}}, "did you mean 'draftproof'"),
        ({"draftproof": {}, "draft-proof": {"rule": "token"}}, "did you mean 'draftproof'"),
        ({"rule": "token"}, "did you mean {'draftproof': {'rule': 'token'}}"),
        ({"draftproof": {}, "rule": "token"}, "did you mean {'draftproof': {'rule': 'token'}}"),
    ],
)
def test_a_wrong_setting_is_refused_in_one_sentence(config, words):
    with pytest.raises(RefusedError, match=re.escape(words)) as error:
        asked(config)
    assert "\n" not in str(error.value)


@pytest.fixture
def host(monkeypatch, tmp_path) -> ModuleType:
    """A module that stands for vLLM, and one that imported a function from it."""
    host, user = ModuleType("host"), ModuleType("host_user")
    exec("def greet(name, loud=False):\n    return 'hello ' + name", host.__dict__)
    user.greet = host.greet
    host.number = 7
    (tmp_path / "broken_host.py").write_text("raise RuntimeError('cannot run here')")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setitem(sys.modules, "host", host)
    monkeypatch.setitem(sys.modules, "host_user", user)
    return host


def louder(original):
    return lambda name, loud=False: original(name).upper()


def test_a_hook_is_installed_once_and_everywhere(host):
    hooks = Hooks((Hook("host:greet", ("name",), louder, copies=("host_user", "not_imported")),))
    hooks.install()
    once = host.greet
    hooks.install()
    assert hooks.installed
    assert host.greet is once
    assert sys.modules["host_user"].greet("you") == "HELLO YOU"


@pytest.mark.parametrize(
    ("place", "parameters", "words"),
    [
        ("host:greet", ("person",), "expected ['person']"),
        ("host:greet", (), "has the parameters ['name', 'loud']"),
        ("host:leave", ("name",), "host:leave is not there"),
        ("no_host:greet", ("name",), "no_host:greet is not there"),
        ("host:number", ("name",), "host:number is not there"),
        ("broken_host:greet", ("name",), "cannot run here"),
    ],
)
def test_if_one_function_is_not_as_expected_none_is_replaced(host, place, parameters, words):
    original = host.greet
    hooks = Hooks((Hook("host:greet", ("name",), louder), Hook(place, parameters)))
    hooks.install()
    assert host.greet is original
    assert not hooks.installed
    assert words in hooks.problems[0]


def test_further_parameters_must_have_defaults():
    assert wrong_parameters(lambda a, b=1, *args, c=2, **more: 0, ("a",)) is None
    assert wrong_parameters(lambda a, b: 0, ("a",)) is not None


@pytest.mark.parametrize(
    ("place", "words"),
    [
        ("host:more", "host:more has ['c'], which is new, and lacks []"),  # verification would leave c out
        ("host:fewer", "host:fewer has [], which is new, and lacks ['b']"),
        ("host:none", "host:none is not there"),
    ],
)
def test_what_verification_must_know_all_of_is_compared(host, place, words):
    host.same, host.more, host.fewer = ["b", "a"], ["a", "b", "c"], ["a"]
    assert Inventory("host:same", ("a", "b"), list).problem() is None
    hooks = Hooks((Hook("host:greet", ("name",), louder), Inventory(place, ("a", "b"), list)))
    hooks.install()
    assert not hooks.installed
    assert hooks.problems[0].startswith(words)
