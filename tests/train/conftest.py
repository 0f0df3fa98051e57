"""Fixture for the training tests: the tiny target, saved as a folder."""

import pytest

from train.tiny_target import save_tiny_llama


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return save_tiny_llama(tmp_path_factory.mktemp("tiny-llama"))
