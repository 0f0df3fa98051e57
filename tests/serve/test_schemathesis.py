"""Schemathesis over our own openapi.json: whatever is sent, there is no 500 (`make test-serve`)."""

import pytest

schemathesis = pytest.importorskip("schemathesis")

from hypothesis import HealthCheck, settings  # noqa: E402

pytestmark = pytest.mark.serve

EXAMPLES = 60


@pytest.fixture(scope="module")
def api_schema(server):
    return schemathesis.openapi.from_url(f"{server.url}/openapi.json").exclude(path_regex="/events")  # never ends


schema = schemathesis.pytest.from_fixture("api_schema")


@schema.parametrize()
@settings(max_examples=EXAMPLES, deadline=None, suppress_health_check=list(HealthCheck))
def test_there_is_no_500(case):
    case.call_and_validate(checks=[schemathesis.checks.not_a_server_error])
