"""Schemathesis over our own openapi.json: whatever is sent, there is no 500 (`make test-serve`)."""

from contextlib import suppress

import pytest

schemathesis = pytest.importorskip("schemathesis")

from hypothesis import HealthCheck, given, seed, settings  # noqa: E402
from hypothesis.errors import Unsatisfiable  # noqa: E402

from serve.running import load, serving  # noqa: E402

pytestmark = pytest.mark.serve

EXAMPLES = 100
"""Requests to each route, valid and again as many invalid ones."""


@pytest.fixture(scope="module")
def small(folder):
    """A server whose texts are short, because a valid request may ask for a hundred of them without a limit."""
    with serving(load(folder, max_length=48)) as running:
        yield running


@pytest.mark.parametrize("mode", ["positive", "negative"])
def test_there_is_no_500(small, mode):
    schema = schemathesis.openapi.from_url(f"{small.url}/openapi.json").exclude(path_regex="/events")  # never ends
    statuses = set()
    for found in schema.get_all_operations():
        operation = found.ok()

        @seed(0)
        @settings(max_examples=EXAMPLES, deadline=None, database=None, suppress_health_check=list(HealthCheck))
        @given(operation.as_strategy(schemathesis.GenerationMode(mode)))
        def send(case):
            answer = case.call()
            statuses.add(answer.status_code)
            case.validate_response(answer, checks=[schemathesis.checks.not_a_server_error])

        with suppress(Unsatisfiable):  # a route that takes nothing cannot be given anything wrong
            send()
    assert small.client.get("/health").status_code == 200
    assert statuses & ({200} if mode == "positive" else {400}), "otherwise the requests never got to the point"
