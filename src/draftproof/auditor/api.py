"""Audit a decoder: test whether its tokens have the target's distribution, and issue a certificate."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any, Final, Literal, Protocol, runtime_checkable

from draftproof.auditor import arguments
from draftproof.auditor.bets import Bettor
from draftproof.auditor.betting import Betting
from draftproof.auditor.certificate import Certificate
from draftproof.auditor.drafter import as_drafter, copies_text, resolve_head
from draftproof.auditor.greedy import Greedy
from draftproof.auditor.interface import Decoder
from draftproof.auditor.joint import CELLS, DEPTH, Joint
from draftproof.auditor.reference import SMALL_VOCABULARY, ReferenceModel
from draftproof.auditor.settings import AuditRequest, check_the_same, facts_of, untested
from draftproof.auditor.texts import Text
from draftproof.core.sampling import SamplingParams

Method = Literal["auto", "joint", "bets", "greedy"]
MOST_TOKENS: Final = 200_000
"""Default `max_tokens` of an audit by bets or of greedy decoding."""


@runtime_checkable
class Examination(Protocol):
    """An audit in progress, by one of the three methods."""

    def update(self, texts: Sequence[Text]) -> None: ...
    def settled(self) -> bool: ...
    def findings(self) -> dict[str, Any]: ...
    def progress(self) -> dict[str, Any]: ...
    def restore(self, saved: dict[str, Any]) -> None: ...


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
    """Test whether a decoder draws from the target's distribution; stop as soon as the answer is clear.

        prompts = [tokenizer(text)["input_ids"] for text in ("Once upon a time", "1, 2, 3, 1, 2, 3, 1")]
        certificate = audit(engine, model, prompts, sampling=SamplingParams(temperature=0.8))
        print(certificate)

    decoder     the decoder under audit: anything with a `decode` method (see `Decoder`), such as an engine
    target      the model whose distribution it should have: a transformers model, a `Model` such as a toy, or a
                `ReferenceModel`
    prompts     a list of prompts, each a list of token ids, never text: decoder and target must read the same ids.
                The target's tokenizer makes them, `tokenizer(text)["input_ids"]`, or for a chat
                `tokenizer.apply_chat_template(messages, add_generation_prompt=True)["input_ids"]`. Each is continued
                many times, with seeds `seed`, `seed` + 1, …
    sampling    the parameters that decoder and target are both given
    alpha       the probability that an exact decoder is called biased
    bias        the smallest share ε of a mixture (1 − ε)·p + ε·bet that must be found; with a small vocabulary the
                smallest total variation of three tokens
    max_tokens  tokens to examine at most; default: as many as a small vocabulary needs, otherwise 200,000
    drafter     the decoder's drafter, if known: a draft model, or a function from the preceding tokens to a
                distribution; "head", "head:folder", "suffix+head" or a `FittedHead`, whose distribution is computed
                from the target's hidden states; a `TranslatedReference` for a draft model with another tokenizer;
                "ngram", "suffix" or "prompt-lookup" for drafts copied from the text
    length      tokens per text
    batch       texts per call of `decode`
    tolerance   the relative error of a probability that rounding may cause, ≥ 0; default by the model's dtype. It is
                charged to every bet; on four-bit weights the default charge is the error of a bet's payoff
    ends        the end-of-text tokens, after which nothing may be emitted; default: the target's generation config.
                `()` for a decoder that ignores end-of-text tokens on purpose
    method      "joint" (vocabularies up to 16), "bets", "greedy" (temperature 0), or "auto" to choose
    resume      a certificate of the same audit to continue
    watch       called with the current certificate after every batch and at the end

    A wrong argument is refused with a ValueError that names it. A decoder that emits a token outside the target's
    vocabulary is biased.
    """
    arguments.check_objects(decoder, sampling, method, watch)
    _check_resume(resume)
    alpha, bias = arguments.open_share("alpha", alpha), arguments.open_share("bias", bias)
    counts = {"max_tokens": max_tokens, "length": length, "batch": batch}
    max_tokens, length, batch = (arguments.count_or_none(name, value) for name, value in counts.items())
    seed, ends = arguments.first_seed(seed), arguments.end_tokens(ends)
    reference = _reference(target, arguments.tolerance_or_none(tolerance))
    rows = arguments.token_ids(prompts, reference.vocab_size)
    arguments.check_biased_tokens(sampling, reference.vocab_size)
    copying, drafter = copies_text(drafter), resolve_head(drafter, reference.model)
    ends = reference.ends if ends is None else ends
    method = _method(method, reference, sampling, bool(ends))
    request = AuditRequest(
        prompts=rows,
        sampling=sampling,
        alpha=alpha,
        bias=bias,
        max_tokens=max_tokens or MOST_TOKENS,
        length=length or (DEPTH + 2 if method == "joint" else 16 if reference.vocab_size <= SMALL_VOCABULARY else 64),
        batch=batch or (512 if reference.vocab_size <= SMALL_VOCABULARY else 8),
        seed=seed,
        method=method,
        ends=ends,
    )
    examination, request = _examination(reference, request, drafter, copying, max_tokens is None)
    facts = facts_of(decoder, reference, request, drafter)
    if resume is not None:
        check_the_same(resume, request, facts)
        examination.restore(resume.progress)
    for certificate in _certificates(examination, decoder, request, facts, untested(request, drafter)):
        if watch is not None:
            watch(certificate)
    return certificate


def _certificates(
    examination: Examination, decoder: Decoder, request: AuditRequest, facts: dict[str, str], not_tested: list[str]
) -> Iterator[Certificate]:
    """Yield a certificate after every batch, until the audit is settled or `max_tokens` is reached."""
    while True:
        progress = examination.progress()
        done = examination.settled() or progress["tokens"] >= request.max_tokens
        if progress["texts"] or done:
            yield Certificate(
                **examination.findings(),
                alpha=request.alpha,
                bias=request.bias,
                tested=facts,
                untested=not_tested,
                asked=request.as_dict(),
                progress=progress,
            )
        if done:
            return
        texts = request.texts(decoder, progress["texts"])
        if not any(text.tokens for text in texts):
            raise ValueError(f"the decoder emitted no token for {len(texts)} prompts: there is nothing to audit")
        examination.update(texts)


def _check_resume(resume: object) -> None:
    if resume is not None and not isinstance(resume, Certificate):
        raise ValueError(f"resume must be a Certificate, such as Certificate.load(path), or None; got {resume!r:.80}")


def _reference(target: Any, tolerance: float | None) -> ReferenceModel:
    """Return the target as a `ReferenceModel`, which has its tolerance already if it was passed as one."""
    if not isinstance(target, ReferenceModel):
        return ReferenceModel(target, tolerance=tolerance)
    if tolerance is not None:
        raise ValueError(f"target is a ReferenceModel: set its tolerance in ReferenceModel(…, tolerance={tolerance})")
    return target


def _method(method: Method, reference: ReferenceModel, sampling: SamplingParams, ending: bool) -> Method:
    """Choose the method; `ending` texts may be too short for a joint distribution of three tokens."""
    if method == "greedy" and sampling.temperature != 0:
        raise ValueError(f'method="greedy" needs temperature 0; got {sampling.temperature}')
    if sampling.temperature == 0 and method not in ("auto", "greedy"):
        raise ValueError(f'method="{method}" needs a temperature above 0, where tokens are drawn; got temperature 0')
    if sampling.temperature == 0:
        return "greedy"
    small = reference.vocab_size**DEPTH <= CELLS
    if method == "joint" and not small:
        raise ValueError(f'method="joint" enumerates vocabularies up to 16; this one has {reference.vocab_size}')
    if method == "auto":
        return "joint" if small and not ending else "bets"
    return method


def _examination(
    reference: ReferenceModel, request: AuditRequest, drafter: Any, copying: bool, unlimited: bool
) -> tuple[Examination, AuditRequest]:
    """Start the examination of this request, and return it with the request as it will be carried out."""
    if request.method == "greedy":
        return Greedy(reference, request), request
    bettor = Bettor(request.sampling, reference.payoff_error(request.sampling), as_drafter(drafter), copying)
    if request.method == "joint":
        joint = Joint.start(Betting(reference, bettor, request, request.alpha / 2))
        if joint is not None:
            request = replace(request, max_tokens=joint.needed * request.length) if unlimited else request
            joint.betting.request = request
            return joint, request
        request = replace(request, method="bets")
    return Betting(reference, bettor, request, request.alpha), request
