"""langchain's standard tests of a chat model, with langchain-openai as the client (`make test-serve`).

Those that need a model which understands (tools with the right arguments, images) are left out: the model is random.
"""

import pytest

pytest.importorskip("langchain_tests")
pytest.importorskip("langchain_openai")

from langchain_openai import ChatOpenAI
from langchain_tests.integration_tests import ChatModelIntegrationTests

pytestmark = pytest.mark.serve


class TestChatOpenAI(ChatModelIntegrationTests):
    @pytest.fixture(autouse=True)
    def _served(self, server):
        type(self).url = f"{server.url}/v1"

    @property
    def chat_model_class(self):
        return ChatOpenAI

    @property
    def chat_model_params(self):
        return {
            "model": "tiny", "base_url": getattr(self, "url", ""), "api_key": "none", "max_tokens": 20, "seed": 1,
            "stream_usage": True, "extra_body": {"min_tokens": 5},
        }  # fmt: skip

    @property
    def has_tool_calling(self):
        return False

    @property
    def has_structured_output(self):
        return False
