"""Headless Chromium for the tests of the page."""

import shutil
from contextlib import contextmanager

import pytest

CHROMIUM = shutil.which("chromium")
FLAGS = (
    "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-background-networking",
    "--disable-component-update", "--disable-sync",
)  # fmt: skip
in_a_browser = [pytest.mark.browser, pytest.mark.skipif(CHROMIUM is None, reason="no chromium on this machine")]


@contextmanager
def launched():
    """Start the browser."""
    playwright = pytest.importorskip("playwright.sync_api")
    with playwright.sync_playwright() as host:
        browser = host.chromium.launch(executable_path=CHROMIUM, args=list(FLAGS))
        yield browser
        browser.close()


@contextmanager
def opened(chromium, url, *, width=1280, scheme="light"):
    """Open the page, and collect its errors and whatever it asks of another server."""
    tab = chromium.new_page(viewport={"width": width, "height": 900}, color_scheme=scheme)
    complaints = []
    tab.on("pageerror", lambda error: complaints.append(str(error)))
    tab.on("console", lambda message: complaints.append(message.text) if message.type == "error" else None)
    tab.on(
        "request", lambda request: None if request.url.startswith((url, "data:")) else complaints.append(request.url)
    )
    tab.goto(url)
    try:
        yield tab, complaints
    finally:
        tab.close()


def ask(tab, question="Why?"):
    """Send a question by keyboard, and wait for the end of its answer."""
    tab.fill("#question", question)
    tab.press("#question", "Enter")
    tab.wait_for_selector(".answer[aria-busy=false]:last-child")
