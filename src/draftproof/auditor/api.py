"""The audit: does a decoder have the target's distribution, and how sure are we?"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any, Final, Literal, Protocol, runtime_checkable

from draftproof.auditor.bets import Bettor
from draftproof.auditor.betting import Betting, ByBets
from draftproof.auditor.certificate import Certificate
from draftproof.auditor.drafter import as_drafter, copies_text, with_states
from draftproof.auditor.greedy import Greedy
from draftproof.auditor.interface import Decoder
from draftproof.auditor.joint import CELLS, DEPTH, Joint
from draftproof.auditor.reference import SMALL, ReferenceModel
from draftproof.auditor.settings import AuditRequest, check_the_same, facts_of, untested
from draftproof.auditor.texts import Text
from draftproof.core.sampling import SamplingParams

Method = Literal["auto", "joint", "bets", "greedy"]
MOST_TOKENS: Final = 200_000
"""Where an audit by bets, or of greedy decoding, gives up unless told otherwise."""


@runtime_checkable
class Examination(Protocol):
    """An audit under way, by one of the three methods."""

    def look(self, texts: Sequence[Text]) -> None: ...
    def settled(self) -> bool: ...
    def findings(self) -> dict[str, Any]: ...
    def progress(self) -> dict[str, Any]: ...
    def restore(self, kept: dict[str, Any]) -> None: ...


def audit(
    decoder: Decoder,
    target: Any,
    prompts: Sequence[Sequence[int]],
    *,
    sampling: SamplingParams,
    alpha: float = 1e-6,
    bias: float = 0.02,
    max_tokens: int | None = None,
    drafter: Any = None,
    seed: int = 0,
    length: int | None = None,
    batch: int | None = None,
    tolerance: float | None = None,
    ends: Sequence[int] | None = None,
    method: Method = "auto",
    resume: Certificate | None = None,
    watch: Callable[[Certificate], object] | None = None,
) -> Certificate:
    """Find out whether a decoder draws from the target's distribution, and how sure that is. Stops when the answer is clear.

        certificate = audit(engine, model, prompts, sampling=SamplingParams(temperature=0.8))
        print(certificate)

    decoder     what is examined: anything with a `decode` method (see `Decoder`), such as an engine
    target      whose distribution it should have: a transformers model, a `Model` such as a toy, or a `Teacher` of one
    prompts     token ids; each is continued many times, with seeds from `seed` on
    sampling    the parameters under which both are asked
    alpha       the chance that a decoder which is exact is called biased
    bias        the smallest share ε of a mixture (1 − ε)·p + ε·bet that must be found; with a small vocabulary the
                smallest total variation of three tokens
    max_tokens  how many to look at, at most; default: what a small vocabulary needs, else 200,000
    drafter     who drafts, where that is known: a draft model, or a function from the tokens before to a distribution; "head",
                "head:folder", "suffix+head" or a `FittedHead`, whose distribution is found from the target's states; "ngram",
                "suffix" or "prompt-lookup" say that drafts are copied from the text
    length      tokens a text; and `batch` texts are asked for at a time
    tolerance   the factor by which rounding may change a probability; default by the model's type
    ends        the tokens that end a text, behind which nothing may be said; default: by the target's generation
                settings. `()` for a decoder that goes on behind them on purpose
    method      "joint" (vocabularies up to 16), "bets", "greedy" (temperature 0), or whichever fits
    resume      a certificate of the same audit to go on from
    watch       called with the certificate as it stands, after every batch and at the end
    """
    teacher = target if isinstance(target, ReferenceModel) else ReferenceModel(target, tolerance=tolerance)
    copying, drafter = copies_text(drafter), with_states(drafter, teacher.model)
    ends = teacher.ends if ends is None else tuple(ends)
    method = _method(method, teacher, sampling, bool(ends))
    asked = AuditRequest(
        prompts=tuple(map(_ids, prompts)),
        sampling=sampling,
        alpha=alpha,
        bias=bias,
        max_tokens=MOST_TOKENS if max_tokens is None else max_tokens,
        length=length or (DEPTH + 2 if method == "joint" else 16 if teacher.vocab_size <= SMALL else 64),
        batch=batch or (512 if teacher.vocab_size <= SMALL else 8),
        seed=seed,
        method=method,
        ends=ends,
    )
    examination, asked = _examination(teacher, asked, drafter, copying, max_tokens is None)
    facts = facts_of(decoder, teacher, asked, drafter)
    if resume is not None:
        check_the_same(resume, asked, facts)
        examination.restore(resume.progress)
    for certificate in _go_on(examination, decoder, asked, facts, untested(asked, drafter)):
        if watch is not None:
            watch(certificate)
    return certificate


def _go_on(
    examination: Examination, decoder: Decoder, asked: AuditRequest, facts: dict[str, str], unseen: list[str]
) -> Iterator[Certificate]:
    """A certificate after every batch; the last one when it is settled or enough has been seen."""
    while True:
        kept = examination.progress()
        over = examination.settled() or kept["tokens"] >= asked.max_tokens
        if kept["texts"] or over:
            yield Certificate(
                **examination.findings(),
                alpha=asked.alpha,
                bias=asked.bias,
                tested=facts,
                untested=unseen,
                asked=asked.as_dict(),
                progress=kept,
            )
        if over:
            return
        texts = asked.texts(decoder, kept["texts"])
        if not any(text.tokens for text in texts):
            raise ValueError(f"the decoder said nothing to {len(texts)} prompts: there is nothing to audit")
        examination.look(texts)


def _ids(prompt: Sequence[int]) -> tuple[int, ...]:
    if isinstance(prompt, str):
        raise ValueError(f"prompts must be token ids, as both sides must read the same; encode {prompt[:40]!r} first")
    return tuple(map(int, prompt))


def _method(method: Method, teacher: ReferenceModel, sampling: SamplingParams, ending: bool) -> Method:
    """`ending`: texts may end by themselves, before there are enough tokens for a joint distribution."""
    if method == "greedy" and sampling.temperature != 0:
        raise ValueError(f'method="greedy" needs temperature 0; got {sampling.temperature}')
    if sampling.temperature == 0:
        return "greedy"
    small = teacher.vocab_size**DEPTH <= CELLS
    if method == "joint" and not small:
        raise ValueError(f'method="joint" enumerates vocabularies up to 16; this one has {teacher.vocab_size}')
    if method == "auto":
        return "joint" if small and not ending else "bets"
    return method


def _examination(
    teacher: ReferenceModel, asked: AuditRequest, drafter: Any, copying: bool, unlimited: bool
) -> tuple[Examination, AuditRequest]:
    if asked.method == "greedy":
        return Greedy(teacher, asked), asked
    bettor = Bettor(asked.sampling, teacher.tolerance(asked.sampling), as_drafter(drafter), copying)
    if asked.method == "joint":
        joint = Joint.start(Betting(teacher, bettor, asked, asked.alpha / 2))
        if joint is not None:
            asked = replace(asked, max_tokens=joint.needed * asked.length) if unlimited else asked
            joint.betting.asked = asked
            return joint, asked
        asked = replace(asked, method="bets")
    return ByBets(Betting(teacher, bettor, asked, asked.alpha)), asked
