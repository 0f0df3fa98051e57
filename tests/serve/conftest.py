"""Fixtures of the server's tests: a tiny model in a folder, and one server for a whole file."""

import pytest

from cli.tiny import save_model
from engine.many_texts import unchecked
from serve.browser import launched
from serve.running import load, serving


@pytest.fixture(scope="session")
def folder(tmp_path_factory):
    return str(save_model(tmp_path_factory.mktemp("served"), layers=2))


@pytest.fixture(scope="session")
def endless_folder(tmp_path_factory):
    return str(save_model(tmp_path_factory.mktemp("endless"), layers=2, endless=True))


@pytest.fixture(scope="module")
def server(folder):
    with serving(load(folder)) as running:
        yield running


@pytest.fixture(scope="module")
def endless(endless_folder):
    """A server whose texts end by their limit only.

    Drafts have a fixed length: with "auto" a slow moment of the machine can switch drafting off for a whole text.
    """
    with serving(load(endless_folder, num_draft_tokens=4)) as running:
        yield running


@pytest.fixture(scope="module")
def chromium():
    with launched() as browser:
        yield browser


@pytest.fixture(autouse=True)
def _unchecked():
    with unchecked():
        yield
