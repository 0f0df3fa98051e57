"""What every test runs under: no model hub, and one bundled model for the whole session."""

import os

os.environ["HF_HUB_OFFLINE"] = "1"  # before transformers is imported: a test that asks a hub should fail at once

import pytest


@pytest.fixture(scope="session")
def smollm2():
    """(model, tokenizer) of the bundled model, out of the user's own cache: fetched once for each machine."""
    from draftproof.models import bundled

    try:
        return bundled.load()
    except bundled.UnavailableError as error:
        pytest.skip(str(error))
