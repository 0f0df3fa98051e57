"""`draftproof serve`: an OpenAI-compatible HTTP server."""

import re
from dataclasses import replace
from pathlib import Path
from typing import Any, Final

import click

from draftproof.cli.engines import open_engine
from draftproof.cli.options import Choice, engine_options

HELP = """Serve a model over HTTP with OpenAI's interface, with speculative decoding.

MODEL is a folder or a Hugging Face model id; without it, the bundled model is served. Needs
pip install "draftproof[serve]".

\b
Examples:
  draftproof serve
  draftproof serve Qwen/Qwen3-8B --draft-model Qwen/Qwen3-0.6B --port 8000
  draftproof serve --drafter ngram --max-batch 16 --kv-memory 4GiB --api-key "$KEY"
\b
Then, from another terminal:
  curl http://127.0.0.1:8000/v1/chat/completions -H 'Content-Type: application/json' \\
    -d '{"messages": [{"role": "user", "content": "Why is the sky blue?"}], "max_tokens": 60}'

Any client of OpenAI's API works with the base URL http://127.0.0.1:8000/v1. A request may set "seed" (its text then
does not depend on the load), "drafter": false, "num_draft_tokens" and "rule". A browser shows a chat at the server's
address. SIGTERM or Ctrl-C lets running requests end, then stops; a second one stops at once.
"""

UNITS: Final = {"": 1, "k": 10**3, "m": 10**6, "g": 10**9, "ki": 2**10, "mi": 2**20, "gi": 2**30}
PACKAGES: Final = ("fastapi", "uvicorn", "prometheus_client", "llguidance")


class Size(click.ParamType):  # type: ignore[type-arg]
    """A click type for memory: bytes such as 2GiB or 500M, or a share of what is free, such as 0.5."""

    name = "size"

    def __init__(self, *, share: bool) -> None:
        self._share = share

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> int | float:
        if not isinstance(value, str):
            return value  # type: ignore[no-any-return]
        match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([kmg]?i?)b?", value.strip().lower())
        if match is None or match[2] not in UNITS:
            hint = ", or a share of the free memory such as 0.5" if self._share else ""
            self.fail(f"{value!r} is not a size such as 500M or 2GiB{hint}.", param, ctx)
        number, unit = float(match[1]), UNITS[match[2]]
        if self._share and unit == 1 and 0 < number <= 1 and "." in match[1]:
            return number
        if number * unit < 1:
            self.fail(f"{value!r} is less than a byte.", param, ctx)
        return int(number * unit)


@click.command(help=HELP, short_help="Serve a model with OpenAI's interface.")
@click.argument("model", required=False)
@engine_options()
@click.option("--host", default="127.0.0.1", show_default=True, help="Address to listen on; 0.0.0.0 is all of them.")
@click.option(
    "--port", type=click.IntRange(0, 65535), default=8000, show_default=True, help="Port; 0 picks a free one."
)
@click.option("--served-model-name", metavar="NAME", help="Name of the model in requests. [default: MODEL]")
@click.option(
    "--api-key",
    "api_keys",
    multiple=True,
    envvar="DRAFTPROOF_API_KEY",
    metavar="KEY",
    help="Ask for this key, as Authorization: Bearer KEY. Can be given several times, or in DRAFTPROOF_API_KEY. "
    "/health and the page stay open.",
)
@click.option(
    "--cors-origin",
    "cors_origins",
    multiple=True,
    metavar="URL",
    help="Let web pages of this origin call the server; * for all. Can be given several times.",
)
@click.option("--max-batch", type=click.IntRange(1), default=16, show_default=True, help="Texts that advance together.")
@click.option(
    "--max-queue",
    type=click.IntRange(1),
    default=256,
    show_default=True,
    help="Texts that may wait for a place; more are refused with 429.",
)
@click.option(
    "--max-length", type=click.IntRange(2), help="Most tokens of a text, prompt included. [default: the model's]"
)
@click.option("--max-prompt", type=click.IntRange(1), help="Most tokens of a prompt. [default: what the model takes]")
@click.option(
    "--kv-memory",
    type=Size(share=True),
    default="0.25",
    show_default=True,
    metavar="SIZE",
    help="Memory for keys and values: bytes such as 2GiB, or a share of what is free.",
)
@click.option(
    "--request-timeout",
    type=click.FloatRange(min=0, min_open=True),
    metavar="SECONDS",
    help="End requests that take longer. [default: never]",
)
@click.option(
    "--max-round",
    type=click.FloatRange(min=0, min_open=True),
    default=120,
    show_default=True,
    metavar="SECONDS",
    help="Time after which a round counts as hanging: /health then says 503, until the round ends.",
)
@click.option(
    "--max-body",
    type=Size(share=False),
    default="4MiB",
    show_default=True,
    metavar="SIZE",
    help="Largest body of a request; a larger one is refused with 413.",
)
@click.option(
    "--chat-template",
    type=click.Path(exists=True, dir_okay=False, path_type=Path),
    help="A Jinja file in place of the tokenizer's chat template.",
)
@click.option(
    "--metrics-prefix",
    default="draftproof",
    show_default=True,
    metavar="NAME",
    help="Word before the colon in the names of metrics; vllm suits dashboards that look for vLLM's.",
)
@click.option("--log-format", type=click.Choice(("text", "json")), default="text", show_default=True, help="Log lines.")
def serve(model: str | None, choice: Choice, host: str, port: int, log_format: str, **options: Any) -> None:
    check_installed()
    check_prefix(options["metrics_prefix"])
    from draftproof.serve.memory import limit_kernel_cache
    from draftproof.serve.server import bind, run, set_up_logs
    from draftproof.serve.settings import Settings
    from draftproof.serve.state import State

    choice = choice if model is None else replace(choice, target=model)
    template: Path | None = options.pop("chat_template")
    limits = {name: options.pop(name) for name in ("max_batch", "max_length", "kv_memory")}
    name = options.pop("served_model_name") or choice.target
    bound = bind(host, port)
    set_up_logs(log_format)
    limit_kernel_cache()
    engine = open_engine(choice, **limits)
    settings = Settings(name, chat_template=None if template is None else template.read_text("utf-8"), **options)
    state = State.open(engine, settings)
    run(state, bound, lambda: click.echo(banner(str(choice), name, host, bound.getsockname()[1], settings.api_keys)))


def check_installed() -> None:
    """Say what to install if the server's packages are missing."""
    from importlib.util import find_spec

    if any(find_spec(package) is None for package in PACKAGES):
        raise ImportError('the server needs a few more packages: pip install "draftproof[serve]"')


def check_prefix(prefix: str) -> None:
    if not re.fullmatch(r"[a-zA-Z_][a-zA-Z0-9_]*", prefix):
        raise click.BadParameter(
            f"{prefix!r} is not a name of letters, digits and underscores.", param_hint="--metrics-prefix"
        )


def banner(choice: str, name: str, host: str, port: int, keys: tuple[str, ...]) -> str:
    """Return what is printed when the server is ready."""
    place = "127.0.0.1" if host in ("0.0.0.0", "::") else f"[{host}]" if ":" in host else host
    url = f"http://{place}:{port}"
    key = ' -H "Authorization: Bearer $KEY"' if keys else ""
    body = '{"messages": [{"role": "user", "content": "Why is the sky blue?"}], "max_tokens": 60}'
    lines = [
        f"Serving {name} ({choice})",
        f"  API   {url}/v1",
        f"  page  {url}/",
        f"  try   curl {url}/v1/chat/completions{key} -H 'Content-Type: application/json' -d '{body}'",
    ]
    return "\n".join(lines)
