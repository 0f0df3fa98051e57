"""The slash commands of a chat: `COMMANDS` is their table, `run_command` runs a line such as "/rule token"."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final

import click

from draftproof.cli.conversation import Conversation, load_conversation
from draftproof.cli.options import (
    DRAFTERS,
    RULES,
    SAMPLING,
    Choice,
    drafter_or_none,
    parse_draft_length,
    switch_off_zero,
)
from draftproof.cli.suggest import did_you_mean


class LeaveChat(Exception):  # noqa: N818  (a request, not an error)
    """Raised by /quit."""


@dataclass(frozen=True, slots=True)
class SlashCommand:
    """A slash command: its usage and description for /help, and `run(conversation, argument)`, the line to show."""

    usage: str
    description: str
    run: Callable[[Conversation, str], str]


def run_command(conversation: Conversation, line: str) -> str:
    """Run a line that begins with a slash and return the line to show. Raises ValueError if that is impossible."""
    name, _, argument = line.strip().partition(" ")
    if name not in COMMANDS:
        raise ValueError(f"there is no command {name}{did_you_mean(name, COMMANDS)}; /help lists the commands")
    return COMMANDS[name].run(conversation, argument.strip())


def _switch(conversation: Conversation, **changes: Any) -> str:
    """Change the engine's options. The engine is made first, so that an error leaves the settings unchanged."""
    wanted = replace(conversation.settings.choice, **changes)
    _check_rounds(conversation.settings.rounds, wanted)
    conversation.engines.get(wanted)
    conversation.settings.choice = wanted
    return str(wanted)


def _check_rounds(shown: bool, choice: Choice) -> None:
    """Refuse to show the rounds of a rule that `Recorder` cannot record."""
    from draftproof.explain.recorder import WATCHED, Recorder

    if shown and choice.rule not in WATCHED:
        Recorder(choice.rule)  # raises an error that names the rules it can record


def _target(conversation: Conversation, argument: str) -> str:
    return _switch(conversation, target=argument) if argument else conversation.settings.choice.target


def _drafter(conversation: Conversation, argument: str) -> str:
    if not argument:
        return conversation.settings.choice.drafter or "none"
    _check_drafter(argument)
    return _switch(conversation, drafter=drafter_or_none(argument))


def _check_drafter(name: str) -> None:
    """Refuse a name that is nearly a drafter's; any other may be a model, a folder or a Hugging Face model id."""
    known = ["none", *(drafter.partition(":")[0] for drafter in DRAFTERS)]
    hint = did_you_mean(name, known)
    if hint and name.partition(":")[0] not in known and not Path(name).exists():
        raise ValueError(f"there is no drafter {name!r}{hint}")


def _rule(conversation: Conversation, argument: str) -> str:
    if not argument:
        return conversation.settings.choice.rule
    if argument not in RULES:
        raise ValueError(f"the rules are {', '.join(RULES)}; got {argument!r}")
    return _switch(conversation, rule=argument)


def _draft_length(conversation: Conversation, argument: str) -> str:
    if not argument:
        return str(conversation.settings.choice.num_draft_tokens)
    return _switch(conversation, num_draft_tokens=parse_draft_length(argument))


def _sampling(conversation: Conversation, argument: str) -> str:
    """Set sampling parameters from pairs such as temperature=0.8 top-p=0.95, and show those in use.

    The value "off" switches a filter off; "default" restores the model's own value.
    """
    from draftproof.core.sampling import SamplingParams

    wanted = dict(conversation.settings.sampling)
    for pair in argument.split():
        name, _, value = pair.partition("=")
        field = name.replace("-", "_")
        if field not in SAMPLING or not value:
            raise ValueError(
                f"{pair!r} is not NAME=VALUE, as in /sampling temperature=0.8 top-p=0.95 (names: {', '.join(SAMPLING)})"
            )
        wanted.pop(field, None)
        if value != "default":
            wanted[field] = getattr(SamplingParams(), field) if value == "off" else _number(field, value)
    conversation.settings.sampling = switch_off_zero(wanted)
    used = conversation.sampling
    return "  ".join(f"{field.replace('_', '-')}={_format(getattr(used, field))}" for field in SAMPLING)


def _number(field: str, value: str) -> int | float:
    """Parse a value as the option of this name does."""
    try:
        number: int | float = SAMPLING[field].convert(value, None, None)
    except click.BadParameter as error:
        raise ValueError(f"{field.replace('_', '-')}: {error.message}") from None
    return number


def _format(value: Any) -> str:
    return "off" if value is None else f"{value:g}" if isinstance(value, float) else str(value)


def _seed(conversation: Conversation, argument: str) -> str:
    if argument:
        _sampling(conversation, f"seed={argument}")
    return f"seed {_format(conversation.sampling.seed)}"


def _on_off(argument: str, now: bool) -> bool:
    """Return the wanted state; without an argument, the opposite of the present one."""
    if argument not in ("", "on", "off"):
        raise ValueError(f"the argument must be on or off; got {argument!r}")
    return not now if not argument else argument == "on"


def _compare(conversation: Conversation, argument: str) -> str:
    conversation.settings.compare = _on_off(argument, conversation.settings.compare)
    if not conversation.settings.compare:
        return "comparison off"
    return (
        "comparison on: every prompt is answered by plain decoding, by a drafter that samples and by n-grams. Sampled "
        "texts differ, as different random draws do; /rule coupled makes them equal"
    )


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
        raise ValueError("the file is missing, as in /save chat.json")
    conversation.save(Path(argument))
    return f"saved {len(conversation.messages)} messages to {argument}"


def _load(conversation: Conversation, argument: str) -> str:
    if not argument:
        raise ValueError("the file is missing, as in /load chat.json")
    loaded = load_conversation(Path(argument))
    conversation.engines.get(loaded.settings.choice)
    conversation.settings, conversation.messages = loaded.settings, loaded.messages
    return f"loaded {len(loaded.messages)} messages from {argument} · {loaded.settings.choice}"


def _help(conversation: Conversation, argument: str) -> str:
    width = max(len(command.usage) for command in COMMANDS.values())
    return "\n".join(f"{command.usage:<{width}}   {command.description}" for command in COMMANDS.values())


def _quit(conversation: Conversation, argument: str) -> str:
    raise LeaveChat


COMMANDS: Final[Mapping[str, SlashCommand]] = {
    "/target": SlashCommand(
        "/target [MODEL]", "show or change the target: smollm2, a folder or a Hugging Face model id", _target
    ),
    "/drafter": SlashCommand(
        "/drafter [NAME]",
        "show or change the drafter: none, auto, ngram, suffix, prompt-lookup, early-exit:N, head, or a smaller model",
        _drafter,
    ),
    "/rule": SlashCommand(
        "/rule [NAME]", "show or change the rule: block, token, coupled or tree; all are exact", _rule
    ),
    "/draft-length": SlashCommand(
        "/draft-length [auto|N]", "show or change the number of draft tokens per round", _draft_length
    ),
    "/sampling": SlashCommand(
        "/sampling [NAME=VALUE …]",
        "show or change temperature, top-k, top-p, min-p; NAME=off switches one off, NAME=default restores the model's",
        _sampling,
    ),
    "/seed": SlashCommand(
        "/seed [N|off]", "show or change the random seed; the same seed gives the same answer", _seed
    ),
    "/compare": SlashCommand(
        "/compare [on|off]", "answer every prompt with and without drafters, side by side", _compare
    ),
    "/rounds": SlashCommand("/rounds [on|off]", "after each answer, show which draft tokens were accepted", _rounds),
    "/new": SlashCommand("/new", "start a new conversation", _new),
    "/save": SlashCommand("/save FILE", "save the conversation and its settings", _save),
    "/load": SlashCommand("/load FILE", "continue a saved conversation", _load),
    "/help": SlashCommand("/help", "list these commands", _help),
    "/quit": SlashCommand("/quit", "leave the chat, like Ctrl-D", _quit),
}
