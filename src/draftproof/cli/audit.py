"""`draftproof audit`: test statistically whether a decoder samples from the target's distribution."""

import json
import shlex
import sys
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Final

import click
from click.core import ParameterSource

from draftproof.cli.console import progress_bar, screen, spinner
from draftproof.cli.engines import open_engine, prepare, quiet_hosts
from draftproof.cli.generate import read_prompts
from draftproof.cli.main import INTERRUPTED, error_line, exit_status
from draftproof.cli.options import DRAFTERS, Choice, Finite, engine_options

if TYPE_CHECKING:
    import torch

    from draftproof.auditor.certificate import Certificate
    from draftproof.auditor.interface import Decoder
    from draftproof.core.sampling import SamplingParams
    from draftproof.engine.engine import Engine

ENGINES: Final = (
    "draftproof",
    "transformers",
    "transformers-assisted",
    "transformers-universal",
    "transformers-lookup",
    "vllm",
    "command",
    "openai",
)

ASSISTED: Final = ("transformers-assisted", "transformers-universal")
"""Engines that need a draft model."""

AUTO: Final[Mapping[str, str | None]] = MappingProxyType(
    {"transformers": None, "transformers-lookup": "prompt-lookup", "vllm": "ngram", "command": None, "openai": None}
)
"""The meaning of --drafter auto for other engines; None if nothing is drafted or the drafter is unknown."""

SERVED_AT_A_TIME: Final = 8
"""Default of --concurrency: enough for a server to batch."""

VLLM_DRAFTERS: Final = ("auto", "ngram", "suffix")
"""Names of --drafter that vLLM has a drafter for; eagle3:FOLDER is another."""

OPEN_SHARE: Final = Finite(min=0, max=1, min_open=True, max_open=True)

HELP = """Test whether a decoder samples from the target's distribution, and report how certain the answer is.

The decoder continues prompts. The target then computes the probability of every token, with transformers' own sampling
code, and the audit places bets that win on average only if the decoder deviates. The probability that an exact decoder
is called biased is at most --alpha, whenever the audit stops.

\b
Examples:
  draftproof audit                                             this engine, the bundled model and its head
  draftproof audit --drafter ngram                             n-gram drafts
  draftproof audit --drafter early-exit:20 --rule token --sampling temperature=0.8,top_p=0.95
  draftproof audit --engine transformers-assisted --target DIR --draft-model DIR --html audit.html
  draftproof audit --engine transformers-universal --target DIR --draft-model DIR
  draftproof audit --engine vllm                               vLLM's own verification of n-gram drafts
  draftproof audit --engine vllm --additional-config '{"draftproof": {"rule": "block"}}'      our plug-in's
  draftproof audit --engine command --command "python my_decoder.py" --drafter ngram
  draftproof audit --engine openai --url http://127.0.0.1:8000 --drafter head --concurrency 16
  draftproof audit --save audit.json --max-tokens 20000        begin an audit
  draftproof audit --resume audit.json --max-tokens 100000     continue it

The exit status is 0 if no bias was found, 1 if the decoder is biased, and 3 if there is not enough evidence; 2 is a
usage error, and 4 an audit that failed. Ctrl-C stops early and shows the result so far. Models are loaded in float32.

transformers-assisted drafts with a model of the same tokenizer, transformers-universal with one of another tokenizer. A
program for --engine command must decode in float32 too. For each line {"prompt": [ids], "sampling": {…}, "max_tokens":
n, "seed": s} on its stdin, it must write a line {"tokens": [ids]} to its stdout. Name its drafter with --drafter: no
decoder is cleared whose drafter is unknown.

--engine vllm audits vLLM in this process; it must be installed. Without --speculative-config it drafts by --drafter
(ngram, suffix, eagle3:FOLDER or none) or --draft-model. Its plug-in verifies only if the setting "draftproof" asks for
it; the certificate says who verified.

--engine openai audits a running server of the same model in float32: draftproof serve, vLLM (0.10.2 or later),
llama.cpp, or another that takes prompts as token ids and returns token ids for "return_token_ids". Name its drafter,
too.
"""


class FailedAuditError(RuntimeError):
    """The decoder or the reference failed, so that there is no verdict. An exit status of 1 would be one: biased."""

    exit_status = 4


def json_object(ctx: click.Context, param: click.Parameter, value: str | None) -> dict[str, Any] | None:
    """Parse a JSON object."""
    if value is None:
        return None
    try:
        parsed = json.loads(value)
    except json.JSONDecodeError as error:
        raise click.BadParameter(f"{value!r} is not JSON ({error})") from None
    if not isinstance(parsed, dict):
        raise click.BadParameter(f'must be a JSON object such as \'{{"method": "ngram"}}\'; got {value!r}')
    return parsed


def sampling_fields(ctx: click.Context, param: click.Parameter, value: str) -> dict[str, Any]:
    """Parse "temperature=0.8,top_k=50" to fields of `SamplingParams`, which checks their values later."""
    fields: dict[str, Any] = {}
    for part in filter(None, value.split(",")):
        name, _, number = part.partition("=")
        try:
            fields[name.strip()] = int(number) if name.strip() == "top_k" else float(number)
        except ValueError:
            raise click.BadParameter(f"{part!r} is not NAME=NUMBER, as in temperature=0.8,top_p=0.95") from None
    return fields


@click.command(help=HELP, short_help="Test whether a decoder samples from the target's distribution.")
@click.option(
    "--engine", "--decoder", "engine", type=click.Choice(ENGINES), default="draftproof", show_default=True,
    help="The decoder to audit.",
)  # fmt: skip
@click.option("--command", metavar="TEXT", help="The command line of the program that --engine command audits.")
@click.option("--url", metavar="URL", help="The server that --engine openai audits, such as http://127.0.0.1:8000.")
@click.option("--api-key", metavar="KEY", envvar="DRAFTPROOF_API_KEY", show_envvar=True, help="The server's API key.")
@click.option("--served-model-name", metavar="NAME", help="The server's name for the model, if it serves several.")
@click.option("--concurrency", type=click.IntRange(1), help="Requests that the server gets at a time. [default: 8]")
@click.option(
    "--speculative-config", metavar="JSON", callback=json_object,
    help="vLLM's speculative config, for --engine vllm; the default is made from --drafter.",
)  # fmt: skip
@click.option(
    "--additional-config", metavar="JSON", callback=json_object,
    help="vLLM's additional config, for --engine vllm; '{\"draftproof\": {\"rule\": \"block\"}}' asks for the plug-in.",
)  # fmt: skip
@engine_options()
@click.option(
    "--sampling", metavar="A=X,B=Y", default="temperature=1", show_default=True, callback=sampling_fields,
    help="Sampling parameters: temperature, top_k, top_p, min_p, repetition_penalty, presence_penalty, "
    "frequency_penalty.",
)  # fmt: skip
@click.option(
    "--prompts", type=click.Path(exists=True, dir_okay=False, path_type=Path),
    help="Your own prompts, in the format of `draftproof generate --prompts`.",
)  # fmt: skip
@click.option(
    "--alpha", type=OPEN_SHARE, default=1e-6, show_default=True,
    help="Largest probability of calling an exact decoder biased.",
)  # fmt: skip
@click.option(
    "--bias", type=OPEN_SHARE, default=0.02, show_default=True,
    help="Smallest bias the audit must be able to find: the fraction of tokens that come from another distribution.",
)  # fmt: skip
@click.option("--max-tokens", "-n", type=click.IntRange(1), help="Stop after this many tokens. [default: 200000]")
@click.option("--length", type=click.IntRange(1), help="Maximum tokens per text. [default: 64]")
@click.option("--batch", type=click.IntRange(1), help="Texts the decoder generates at a time. [default: 8]")
@click.option(
    "--seed",
    type=click.IntRange(-(2**63), 2**62 - 1),
    default=0,
    show_default=True,
    help="Seed of the first text; the next texts use seed+1, seed+2, …",
)
@click.option("--ignore-eos", is_flag=True, help="Accept a decoder that continues after an end-of-text token.")
@click.option("--json", "as_json", is_flag=True, help="Print the certificate as JSON.")
@click.option("--save", type=click.Path(dir_okay=False, path_type=Path), help="Save the certificate as JSON.")
@click.option("--html", type=click.Path(dir_okay=False, path_type=Path), help="Save the certificate as an HTML page.")
@click.option(
    "--resume", type=click.Path(exists=True, dir_okay=False, path_type=Path),
    help="Continue the audit of a saved certificate, with its prompts and settings. Give the same engine options.",
)  # fmt: skip
def audit(choice: Choice, **options: Any) -> int:
    engine = options["engine"]
    if engine in ASSISTED and (choice.drafter is None or _is_drafter_name(choice.drafter)):
        raise click.UsageError(f"--engine {engine} needs --draft-model")
    if (engine == "command") != (options["command"] is not None):
        raise click.UsageError("--engine command and --command must be given together")
    if (engine == "openai") != (options["url"] is not None):
        raise click.UsageError("--engine openai and --url must be given together")
    for name in ("served_model_name", "concurrency"):
        if options[name] is not None and engine != "openai":
            raise click.UsageError(f"--{name.replace('_', '-')} is for --engine openai")
    for name in ("speculative_config", "additional_config"):
        if options[name] is not None and engine != "vllm":
            raise click.UsageError(f"--{name.replace('_', '-')} is for --engine vllm")
    if engine == "vllm":
        _refuse_for_vllm(choice.drafter, options["speculative_config"])
    if choice.drafter == "auto" and options["speculative_config"] is not None:
        choice = replace(choice, drafter=_drafter_of_vllm(options["speculative_config"]))
    elif choice.drafter == "auto":
        choice = replace(choice, drafter=AUTO.get(engine, "auto"))
    try:
        return run_audit(choice, AuditSettings(**options))
    except (click.ClickException, click.Abort, BrokenPipeError):
        raise
    except Exception as error:
        if exit_status(error) != 1:
            raise
        raise FailedAuditError(f"the audit failed without a verdict: {error_line(error)}") from error


def _refuse_for_vllm(drafter: str | None, speculation: dict[str, Any] | None) -> None:
    """Refuse what vLLM does not take from draftproof's options, and would otherwise be ignored or read as a model."""
    if click.get_current_context().get_parameter_source("rule") is ParameterSource.COMMANDLINE:
        raise click.UsageError(
            "--rule is not for --engine vllm, where the plug-in takes the rule from --additional-config, as in "
            '\'{"draftproof": {"rule": "token"}}\''
        )
    served = drafter is None or drafter in VLLM_DRAFTERS or drafter.startswith("eagle3:")
    if speculation is None and not served and _is_drafter_name(str(drafter)):
        raise click.UsageError(
            f"vLLM has no drafter {drafter!r}: name ngram, suffix, eagle3:FOLDER or none, or give --draft-model or "
            "--speculative-config"
        )


def _drafter_of_vllm(speculation: dict[str, Any]) -> str | None:
    """Return what is known of the drafter of vLLM's speculative config; None if nothing is."""
    method, model = speculation.get("method"), str(speculation.get("model", ""))
    if method == "draft_model":
        return model
    if method == "eagle3":
        return f"eagle3:{model}"
    copying = {"ngram": "ngram", "suffix": "suffix", "NGram": "ngram", "Suffix": "suffix"}
    return copying.get(model.rpartition(".")[2] if method == "custom_class" else str(method))


def _is_drafter_name(word: str) -> bool:
    return word.partition(":")[0] in {name.partition(":")[0] for name in DRAFTERS}


@dataclass(frozen=True, slots=True)
class AuditSettings:
    """The options of `draftproof audit` apart from the engine's."""

    engine: str
    command: str | None
    url: str | None
    api_key: str | None
    served_model_name: str | None
    concurrency: int | None
    speculative_config: dict[str, Any] | None
    additional_config: dict[str, Any] | None
    sampling: dict[str, Any]
    prompts: Path | None
    alpha: float
    bias: float
    max_tokens: int | None
    length: int | None
    batch: int | None
    seed: int
    ignore_eos: bool
    as_json: bool
    save: Path | None
    html: Path | None
    resume: Path | None


def run_audit(choice: Choice, settings: AuditSettings) -> int:
    """Audit a decoder, show and save the certificate, and return the exit status."""
    from draftproof.auditor.certificate import Certificate

    sampling = _sampling_params(settings.sampling)
    earlier = Certificate.load(settings.resume) if settings.resume is not None else None
    engine = _open_target(choice, settings.engine)
    arguments = _audit_arguments(settings, sampling, engine, earlier)
    decoder, drafter = _decoder_and_drafter(choice, settings, engine)
    certificate, interrupted = _run(decoder, engine, {**arguments, "drafter": drafter, "resume": earlier})
    if certificate is not None:
        _report(settings, certificate)
    return INTERRUPTED if interrupted or certificate is None else certificate.exit_code


def _sampling_params(fields: dict[str, Any]) -> "SamplingParams":
    from draftproof.core.sampling import SamplingParams

    try:
        return SamplingParams(**fields)
    except TypeError:
        raise ValueError(f"--sampling: at least one of these names is unknown: {', '.join(fields)}") from None


def _audit_arguments(
    settings: AuditSettings, sampling: "SamplingParams", engine: "Engine", earlier: "Certificate | None"
) -> dict[str, Any]:
    """Return the keyword arguments of `api.audit`; when resuming, all but `max_tokens` come from the certificate."""
    from draftproof.auditor.settings import AuditRequest

    if earlier is not None:
        arguments = AuditRequest.from_dict(earlier.asked).arguments()
        return {**arguments, "max_tokens": settings.max_tokens or arguments["max_tokens"]}
    names = ("alpha", "bias", "max_tokens", "length", "batch", "seed")
    prompts = _prompts(settings.prompts, engine)
    ends = () if settings.ignore_eos else tuple(sorted(engine.eos))
    given = {name: getattr(settings, name) for name in names}
    if settings.concurrency is not None:  # fewer texts in a batch would leave some of the requests unused
        given["batch"] = settings.batch or settings.concurrency
    return {"prompts": prompts, "sampling": sampling, "ends": ends, **given}


def _prompts(path: Path | None, engine: "Engine") -> list[list[int]]:
    from draftproof.bench import prompts
    from draftproof.models.tokenizer import encode

    if engine.tokenizer is None:
        raise ValueError("the target has no tokenizer, which the prompts need: they are text")
    items = [p.prompt for p in prompts.read()] if path is None else [item["prompt"] for item in read_prompts(path)]
    return [encode(item, engine.tokenizer) for item in items]


def _precision() -> "torch.dtype":
    """Return float32, on every device: rounding in bfloat16 changes probabilities by 10 % and hides a smaller bias."""
    import torch

    return torch.float32


def _open_target(choice: Choice, engine: str) -> "Engine":
    """Load the target: with its drafter to audit draftproof, otherwise alone and with its weights not repacked."""
    if engine == "draftproof":
        return open_engine(choice, dtype=_precision())
    weights = prepare(Choice(choice.target, None, weights=choice.weights), _precision(), pack=False).weights
    with spinner(f"Loading {choice.target}"):
        quiet_hosts()
        from draftproof.engine.load import load

        return load(choice.target, None, device=choice.device, dtype=_precision(), pack=False, weights=weights)


def _drafter(choice: Choice, engine: "Engine") -> Any:
    """Return what the audit can know of the drafter: a model, or the name of a head or of a drafter that copies.

    SLEM chooses its tokens, and has no distribution to bet on: None.
    """
    from draftproof.auditor.drafter import TranslatedReference
    from draftproof.drafters.registry import is_name, meant, split_way, with_kind
    from draftproof.drafters.slem import SLEM
    from draftproof.drafters.tli import TLI

    name = choice.drafter
    if name is None:
        return None
    if name.startswith("early-exit:"):
        target: Any = engine.model
        return target.first_layers(int(name.partition(":")[2]))
    if is_name(name):
        return meant(with_kind(name), engine.loaded)
    assistant = open_engine(
        Choice(split_way(name)[1], None, device=choice.device, weights=choice.weights), dtype=_precision()
    )
    if isinstance(engine.drafter, TLI):
        return TranslatedReference(assistant.hf, engine.tokenizer, assistant.tokenizer, engine.model.vocab_size)
    return None if isinstance(engine.drafter, SLEM) else assistant.hf


def _decoder_and_drafter(choice: Choice, settings: AuditSettings, engine: "Engine") -> "tuple[Decoder, Any]":
    """Return the decoder to audit, and what the audit can know of its drafter."""
    if settings.engine == "transformers-universal":
        return _universal(choice, engine)
    drafter = _drafter(choice, engine)
    return _decoder(choice, settings, engine, drafter), drafter


def _universal(choice: Choice, engine: "Engine") -> "tuple[Decoder, Any]":
    """Return transformers' universal assisted generation, and its draft model as the audit reads it."""
    from draftproof.auditor.decoders import maker
    from draftproof.auditor.drafter import TranslatedReference

    assistant = _open_target(replace(choice, target=choice.drafter or ""), "transformers")
    if engine.tokenizer is None or assistant.tokenizer is None:
        raise ValueError("universal assisted generation needs the tokenizers of both models, and one of them has none")
    tokenizers = engine.tokenizer, assistant.tokenizer
    decoder = maker("transformers_universal")(engine.hf, assistant.hf, *tokenizers)
    return decoder, TranslatedReference(assistant.hf, *tokenizers, engine.model.vocab_size)


def _decoder(choice: Choice, settings: AuditSettings, engine: "Engine", drafter: Any) -> "Decoder":
    from draftproof.auditor.decoders import maker

    length = choice.num_draft_tokens if isinstance(choice.num_draft_tokens, int) else None
    if settings.engine == "draftproof":
        return engine
    if settings.engine == "command":
        return maker("command")(shlex.split(settings.command or ""))
    if settings.engine == "openai":
        return _server(settings, engine)
    if settings.engine == "vllm":
        return maker("vllm")(
            _model_folder(choice.target),
            choice.drafter,
            draft_length=length or 3,
            speculative_config=settings.speculative_config,
            additional_config=settings.additional_config or {},
        )
    if settings.engine == "transformers-assisted":
        return maker("transformers_assisted")(engine.hf, drafter)
    if settings.engine == "transformers-lookup":
        return maker("transformers_lookup")(engine.hf, *([length] if length else []))
    return maker("transformers_plain")(engine.hf)


def _model_folder(target: str) -> str:
    """Return what another engine can load: a folder for the bundled model's name, any other name as it is."""
    from draftproof.models import bundled

    return str(bundled.fetch()) if target == bundled.NAME else target


def _server(settings: AuditSettings, engine: "Engine") -> "Decoder":
    """Return the server at --url as a decoder."""
    from draftproof.auditor.decoders import maker

    ends = () if settings.ignore_eos else tuple(sorted(engine.eos))
    named = {"model": settings.served_model_name, "api_key": settings.api_key, "ends": ends}
    return maker("openai")(settings.url, concurrency=settings.concurrency or SERVED_AT_A_TIME, **named)


def _run(decoder: "Decoder", engine: "Engine", arguments: dict[str, Any]) -> "tuple[Certificate | None, bool]":
    """Run the audit with a progress bar; return the last certificate, and whether Ctrl-C ended the audit."""
    from draftproof.auditor import api
    from draftproof.auditor.certificate import number

    latest: list[Certificate] = []
    with progress_bar() as progress:
        task = progress.add_task("Auditing", total=arguments["max_tokens"] or api.MOST_TOKENS)

        def watch(certificate: "Certificate") -> None:
            latest[:] = [certificate]
            status = f"evidence {number(certificate.log_evidence)}, {certificate.coverage.rejected:,.0f} rejections"
            progress.update(task, completed=certificate.tokens, description=status)

        try:
            api.audit(decoder, engine.hf, **arguments, watch=watch)
        except KeyboardInterrupt:
            return (latest[0] if latest else None), True
    return latest[0], False


def _report(settings: AuditSettings, certificate: "Certificate") -> None:
    if settings.as_json:
        sys.stdout.write(certificate.as_json())
    else:
        screen().print(str(certificate), markup=False, soft_wrap=True)
    if settings.save is not None:
        certificate.save(settings.save)
    if settings.html is not None:
        certificate.to_html(settings.html)
