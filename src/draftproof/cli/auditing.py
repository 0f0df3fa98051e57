"""An audit from the command line: the decoder is made, evidence is shown as it grows, the certificate kept."""

import shlex
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import torch

from draftproof.audit import asked as earlier
from draftproof.audit.certificate import Certificate, number
from draftproof.audit.decoder import Decoder
from draftproof.audit.decoders import maker
from draftproof.audit.examine import MOST_TOKENS, audit
from draftproof.cli.main import INTERRUPTED
from draftproof.cli.opening import open_engine
from draftproof.cli.options import Choice
from draftproof.cli.screen import screen
from draftproof.cli.waiting import progress_bar, waiting
from draftproof.core.sampling import Sampling
from draftproof.drafters.table import is_name, meant
from draftproof.engine.engine import Engine
from draftproof.models.text import encode

PRECISION: Final = torch.float32
"""On every device: in bfloat16 rounding moves a probability by a tenth, and a bias below that would not be seen."""


@dataclass(frozen=True, slots=True)
class Asked:
    """The command's options."""

    engine: str
    command: str | None
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


def run(choice: Choice, asked: Asked) -> int:
    """Audit, show, keep; the status to leave with."""
    sampling = _sampling(asked.sampling)
    kept = Certificate.load(asked.resume) if asked.resume is not None else None
    engine = _opened(choice, asked.engine)
    how = _arguments(asked, sampling, engine, kept)
    drafter = _drafter(choice, engine)
    decoder = _decoder(choice, asked, engine, drafter)
    with_drafter = {**how, "drafter": drafter, "resume": kept}
    certificate, interrupted = _watched(decoder, engine, with_drafter)
    if certificate is not None:
        _tell(asked, certificate)
    return INTERRUPTED if interrupted or certificate is None else certificate.exit_code


def _sampling(fields: dict[str, Any]) -> Sampling:
    try:
        return Sampling(**fields)
    except TypeError:
        raise ValueError(f"--sampling does not know one of {', '.join(fields)}") from None


def _arguments(asked: Asked, sampling: Sampling, engine: Engine, kept: Certificate | None) -> dict[str, Any]:
    """What `audit` takes; of a certificate to resume all but how far to go."""
    if kept is not None:
        arguments = earlier.Asked.from_dict(kept.asked).arguments()
        return {**arguments, "max_tokens": asked.max_tokens or arguments["max_tokens"]}
    names = ("alpha", "bias", "max_tokens", "length", "batch", "seed")
    prompts = _prompts(asked.prompts, engine)
    ends = () if asked.ignore_eos else tuple(sorted(engine.eos))
    return {"prompts": prompts, "sampling": sampling, "ends": ends, **{name: getattr(asked, name) for name in names}}


def _prompts(path: Path | None, engine: Engine) -> list[list[int]]:
    from draftproof.bench import prompts
    from draftproof.cli.batch import read_prompts

    if engine.tokenizer is None:
        raise ValueError("the target has no tokenizer, and the prompts are text")
    items = [p.prompt for p in prompts.read()] if path is None else [item["prompt"] for item in read_prompts(path)]
    return [encode(item, engine.tokenizer) for item in items]


def _opened(choice: Choice, engine: str) -> Engine:
    """The target, in this engine or on its own. Hosts get it as they lay it out."""
    if engine == "draftproof":
        return open_engine(choice, dtype=PRECISION)
    from draftproof.cli.opening import prepare, quiet_hosts
    from draftproof.engine.load import load

    prepare(Choice(choice.target, None))
    with waiting(f"Loading {choice.target}"):
        quiet_hosts()
        return load(choice.target, None, device=choice.device, dtype=PRECISION, pack=False)


def _drafter(choice: Choice, engine: Engine) -> Any:
    """What the bets know of the drafter: a model, or by its name a head, or that drafts are copied."""
    name = choice.drafter
    if name is None:
        return None
    if name.startswith("early-exit:"):
        cut: Any = engine.model
        return cut.first_layers(int(name.partition(":")[2]))
    if is_name(name):
        return meant(name, engine.hf)
    return open_engine(Choice(name, None, device=choice.device), dtype=PRECISION).hf


def _decoder(choice: Choice, asked: Asked, engine: Engine, drafter: Any) -> Decoder:
    length = choice.num_draft_tokens if isinstance(choice.num_draft_tokens, int) else None
    if asked.engine == "draftproof":
        return engine
    if asked.engine == "command":
        return maker("command")(shlex.split(asked.command or ""))
    if asked.engine == "vllm":
        return maker("vllm")(choice.target, choice.drafter, draft_length=length or 3)
    if asked.engine == "transformers-assisted":
        return maker("transformers_assisted")(engine.hf, drafter)
    if asked.engine == "transformers-lookup":
        return maker("transformers_lookup")(engine.hf, *([length] if length else []))
    return maker("transformers_plain")(engine.hf)


def _watched(decoder: Decoder, engine: Engine, how: dict[str, Any]) -> tuple[Certificate | None, bool]:
    """The last certificate there is, and whether Ctrl-C made it the last."""
    seen: list[Certificate] = []
    with progress_bar() as progress:
        task = progress.add_task("Listening", total=how["max_tokens"] or MOST_TOKENS)

        def watch(certificate: Certificate) -> None:
            seen[:] = [certificate]
            words = f"evidence {number(certificate.log_evidence)}, {certificate.coverage.rejected:,.0f} rejections"
            progress.update(task, completed=certificate.tokens, description=words)

        try:
            audit(decoder, engine.hf, **how, watch=watch)
        except KeyboardInterrupt:
            return (seen[0] if seen else None), True
    return seen[0], False


def _tell(asked: Asked, certificate: Certificate) -> None:
    if asked.as_json:
        sys.stdout.write(certificate.as_json())
    else:
        screen().print(str(certificate), markup=False, soft_wrap=True)
    if asked.save is not None:
        certificate.save(asked.save)
    if asked.html is not None:
        certificate.to_html(asked.html)
