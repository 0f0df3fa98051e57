"""Read what an engine asks of the plug-in, the setting "draftproof"; refused if anything in it is unknown.

It is written in `speculative_config` or in `additional_config`, and kept in the latter (`startup.move_settings`).
"""

from collections.abc import Mapping
from dataclasses import dataclass, fields
from difflib import get_close_matches
from typing import Any, Final

from draftproof.integrations.vllm.hooks import RefusedError

KEY: Final = "draftproof"
ATTRIBUTE: Final = "draftproof"
"""Attribute of a rejection sampler that holds the settings by which it verifies; None in a stock one."""
RULES: Final = ("token", "block")
"""Rules that are exact inside vLLM. `coupled` needs a drafter that draws with the target's random numbers."""


@dataclass(frozen=True, slots=True)
class Settings:
    """The settings of one engine.

    rule  "block" (accepts most) or "token"; drafts that were chosen and not drawn get the same verdict from both
    """

    rule: str = "block"


def settings_of(vllm_config: Any) -> Settings | None:
    """Return the settings of an engine, or None for an engine that did not ask for the plug-in."""
    config = getattr(vllm_config, "additional_config", None)
    if not isinstance(config, Mapping):
        return None
    _refuse_misspelt(config)
    return parsed(config[KEY]) if KEY in config else None


def uses_v2(vllm_config: Any) -> bool:
    """Return whether the engine will use vLLM's model runner V2."""
    return bool(getattr(vllm_config, "use_v2_model_runner", False))


def parsed(asked: Any) -> Settings:
    """Turn the value of the setting "draftproof" into settings."""
    if not isinstance(asked, Mapping):
        raise RefusedError(
            f"the setting 'draftproof' must be a dict such as {{'rule': 'block'}}; got {asked!r}: leave it out for "
            "vLLM's own verification"
        )
    known = [field.name for field in fields(Settings)]
    unknown = [name for name in asked if name not in known]
    if unknown:
        raise RefusedError(f"draftproof has the settings {known}; got {unknown[0]!r}")
    if (rule := asked.get("rule", Settings().rule)) not in RULES:
        raise RefusedError(f"the rule of draftproof must be one of {RULES}; got {rule!r}")
    return Settings(**asked)


def _refuse_misspelt(config: Mapping[Any, Any]) -> None:
    """Refuse a key that is nearly "draftproof", and a rule without it: the engine would verify as stock vLLM does."""
    others = [key for key in config if isinstance(key, str) and key != KEY]
    near = [key for key in others if get_close_matches(key.lower(), [KEY], cutoff=0.75)]
    if near:
        raise RefusedError(f"additional_config[{near[0]!r}] is not a setting of draftproof: did you mean {KEY!r}?")
    if config.get("rule") in RULES:
        asked = {"rule": config["rule"]}
        raise RefusedError(f"additional_config has {asked}: did you mean {{{KEY!r}: {asked}}}?")
