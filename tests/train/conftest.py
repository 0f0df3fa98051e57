"""The tiny target that the trainings of these tests learn from, as a folder."""

import pytest

from train.tiny_target import save_pupil


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return save_pupil(tmp_path_factory.mktemp("pupil"))
