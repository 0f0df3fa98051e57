"""The slash commands of a chat: a table of names, each with its words and what it does."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final

from draftproof.cli.conversation import Conversation, restored
from draftproof.cli.options import RULES, SAMPLING, Choice, draft_length, drafter_of
from draftproof.explain.recorder import WATCHED, Recorder


class LeaveChat(Exception):  # noqa: N818  (a wish, not a failure)
    """/quit was said."""


@dataclass(frozen=True, slots=True)
class Slash:
    """`run(conversation, argument)` gives the line to show."""

    usage: str
    words: str
    run: Callable[[Conversation, str], str]


def obey(conversation: Conversation, line: str) -> str:
    """Do what a line that begins with a slash says. Raises ValueError, with what to do, for what cannot be done."""
    name, _, argument = line.strip().partition(" ")
    if name not in COMMANDS:
        raise ValueError(f"there is no {name}; /help lists the commands")
    return COMMANDS[name].run(conversation, argument.strip())


def _switch(conversation: Conversation, **changes: Any) -> str:
    """Try the new engine first: what cannot be had leaves everything as it was."""
    wanted = replace(conversation.settings.choice, **changes)
    _check_rounds(conversation.settings.rounds, wanted)
    conversation.engines.of(wanted)
    conversation.settings.choice = wanted
    return str(wanted)


def _check_rounds(shown: bool, choice: Choice) -> None:
    if shown and choice.rule not in WATCHED:
        Recorder(choice.rule)  # says which rules can be watched


def _target(conversation: Conversation, argument: str) -> str:
    return _switch(conversation, target=argument) if argument else conversation.settings.choice.target


def _drafter(conversation: Conversation, argument: str) -> str:
    if not argument:
        return conversation.settings.choice.drafter or "none"
    return _switch(conversation, drafter=drafter_of(argument))


def _rule(conversation: Conversation, argument: str) -> str:
    if not argument:
        return conversation.settings.choice.rule
    if argument not in RULES:
        raise ValueError(f"rules are {', '.join(RULES)}; got {argument!r}")
    return _switch(conversation, rule=argument)


def _draft_length(conversation: Conversation, argument: str) -> str:
    if not argument:
        return str(conversation.settings.choice.num_draft_tokens)
    return _switch(conversation, num_draft_tokens=draft_length(argument))


def _sampling(conversation: Conversation, argument: str) -> str:
    """Pairs such as temperature=0.8 top-p=0.95; "off" takes one back."""
    from draftproof.core.sampling import SamplingParams

    wanted = dict(conversation.settings.sampling)
    for pair in argument.split():
        name, _, value = pair.partition("=")
        field = name.replace("-", "_")
        if field not in SAMPLING or not value:
            raise ValueError(f"{pair!r}: say /sampling temperature=0.8 top-p=0.95 (fields: {', '.join(SAMPLING)})")
        wanted[field] = getattr(SamplingParams(), field) if value == "off" else _number(field, value)
    SamplingParams(**wanted)  # refuses what is out of range
    conversation.settings.sampling = wanted
    return "  ".join(f"{name.replace('_', '-')}={_shown(value)}" for name, value in wanted.items())


def _number(field: str, value: str) -> int | float:
    try:
        return int(value) if field in ("top_k", "seed") else float(value)
    except ValueError:
        raise ValueError(f"{field} takes a number; got {value!r}") from None


def _shown(value: Any) -> str:
    return "off" if value is None else f"{value:g}" if isinstance(value, float) else str(value)


def _seed(conversation: Conversation, argument: str) -> str:
    if argument:
        _sampling(conversation, f"seed={argument}")
    return f"seed {_shown(conversation.settings.sampling['seed'])}"


def _on_off(argument: str, now: bool) -> bool:
    if argument not in ("", "on", "off"):
        raise ValueError(f"say on or off; got {argument!r}")
    return not now if not argument else argument == "on"


def _compare(conversation: Conversation, argument: str) -> str:
    conversation.settings.compare = _on_off(argument, conversation.settings.compare)
    if not conversation.settings.compare:
        return "comparison off"
    return "comparison on: every prompt runs plain, speculative and n-gram"


def _rounds(conversation: Conversation, argument: str) -> str:
    wanted = _on_off(argument, conversation.settings.rounds)
    _check_rounds(wanted, conversation.settings.choice)
    conversation.settings.rounds = wanted
    return "rounds are shown after every answer" if wanted else "rounds are not shown"


def _new(conversation: Conversation, argument: str) -> str:
    conversation.messages.clear()
    return "a new conversation"


def _save(conversation: Conversation, argument: str) -> str:
    if not argument:
        raise ValueError("say where: /save talk.json")
    conversation.save(Path(argument))
    return f"saved {len(conversation.messages)} messages in {argument}"


def _load(conversation: Conversation, argument: str) -> str:
    if not argument:
        raise ValueError("say from where: /load talk.json")
    found = restored(Path(argument))
    conversation.engines.of(found.settings.choice)
    conversation.settings, conversation.messages = found.settings, found.messages
    return f"{len(found.messages)} messages from {argument} · {found.settings.choice}"


def _help(conversation: Conversation, argument: str) -> str:
    width = max(len(slash.usage) for slash in COMMANDS.values())
    return "\n".join(f"{slash.usage:<{width}}   {slash.words}" for slash in COMMANDS.values())


def _quit(conversation: Conversation, argument: str) -> str:
    raise LeaveChat


COMMANDS: Final[Mapping[str, Slash]] = {
    "/target": Slash("/target [MODEL]", "show or switch the target: smollm2, a folder, a hub id", _target),
    "/drafter": Slash(
        "/drafter [NAME]", "none, auto, ngram, suffix, prompt-lookup, early-exit:N, head, or a smaller model", _drafter
    ),
    "/rule": Slash("/rule [NAME]", "block, token, coupled or tree; all are exact", _rule),
    "/draft-length": Slash("/draft-length [auto|N]", "how many tokens are guessed a round", _draft_length),
    "/sampling": Slash(
        "/sampling [NAME=VALUE …]", "temperature, top-k, top-p, min-p; NAME=off takes it back", _sampling
    ),
    "/seed": Slash("/seed [N|off]", "the same seed gives the same answer", _seed),
    "/compare": Slash("/compare [on|off]", "run every prompt plain, speculative and n-gram, side by side", _compare),
    "/rounds": Slash("/rounds [on|off]", "after an answer, show which guesses were kept", _rounds),
    "/new": Slash("/new", "forget what was said", _new),
    "/save": Slash("/save FILE", "keep conversation and settings", _save),
    "/load": Slash("/load FILE", "go on with a kept one", _load),
    "/help": Slash("/help", "this list", _help),
    "/quit": Slash("/quit", "leave; so does Ctrl-D", _quit),
}
