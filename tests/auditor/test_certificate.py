"""Certificates: saved and loaded, printed, rendered as HTML, and complete enough to repeat the audit."""

import json

import pytest

import draftproof as dp
from auditor.toy_decoder import Speaker, pair
from draftproof.auditor.api import audit
from draftproof.auditor.certificate import Certificate, number
from draftproof.auditor.settings import AuditRequest
from draftproof.core.sampling import SamplingParams

TARGET, DRAFT = pair(24, noise=2.0)
HOW = {"sampling": SamplingParams(temperature=0.9, logit_bias={3: 0.5}), "drafter": DRAFT, "length": 16, "batch": 100}


@pytest.fixture(scope="module")
def open_case():
    return audit(Speaker(TARGET, DRAFT), TARGET, [[3, 1]], **HOW, max_tokens=2_000)


@pytest.fixture(scope="module")
def found():
    return audit(Speaker(TARGET, DRAFT, mixed=0.5), TARGET, [[3, 1]], **HOW)


def test_it_is_saved_and_loaded_unchanged(open_case, found, tmp_path):
    for i, certificate in enumerate((open_case, found)):
        path = certificate.save(tmp_path / f"{i}.json")
        assert Certificate.load(path) == certificate
        assert json.loads(path.read_text())["verdict"] == certificate.verdict


def test_the_audit_is_done_again_from_its_json(open_case, tmp_path):
    saved = dp.Certificate.load(open_case.save(tmp_path / "saved.json"))
    again = audit(Speaker(TARGET, DRAFT), TARGET, **AuditRequest.from_dict(saved.asked).arguments(), drafter=DRAFT)
    assert again == saved


def test_something_else_is_no_certificate():
    with pytest.raises(ValueError, match="not a certificate: unknown runs"):
        Certificate.from_dict({"runs": []})
    with pytest.raises(ValueError, match="not a certificate: no verdict"):
        Certificate.from_dict({})


def test_it_reads_as_text(open_case, found):
    text = str(found)
    assert text.startswith("verdict: biased")
    assert f"the bet “{found.found_by}” won after" in text
    assert "rejections in" in text
    assert "kept by depth" in text
    assert "logit_bias={'3': 0.5}" in text
    assert "not tested" in text
    assert "more tokens     about" in str(open_case)


def test_the_page_stands_alone_and_escapes(found, tmp_path):
    page = found.to_html(tmp_path / "page.html").read_text()
    assert "<polyline" in page
    assert "src=" not in page
    assert "http" not in page
    assert '<tr class="won">' in page
    assert "<!--" not in page
    changed = Certificate.from_dict({**found.as_dict(), "reason": "<script>"})
    assert "<script>" not in changed.to_html(tmp_path / "other.html").read_text()


def test_numbers_beyond_any_float_are_written():
    assert number(0.0) == "1"
    assert number(2000.0) == "1e+869"
    assert number(-2000.0) == "1e-869"
