"""LangChain's standard suite for chat models, the part that makes calls: against the bundled policy, and against a scripted
model behind the same server for what a policy of four million parameters has not learned."""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import Iterator
from typing import Any

import pytest
from langchain_core.language_models import BaseChatModel
from langchain_tests.integration_tests import ChatModelIntegrationTests

from offbook import LocalBackend, TrainableModel
from offbook.base.types import new_id
from offbook.testing import Action, scripted_server
from offbook.testing.asgi import Body
from offbook.testing.policy_sampler import content_text
from offbook_langgraph import ChatOffbook

pytestmark = [
    # langchain-openai's own, which comes with a plain ChatOpenAI too: it changes the method for a schema of pydantic 1.
    pytest.mark.filterwarnings("ignore:Received a Pydantic BaseModel V1 schema:UserWarning"),
]

NEEDS_SKILL = {
    "test_tool_calling": "the bundled policy has not learned to read an argument out of `magic_function(3)`",
    "test_tool_calling_async": "the bundled policy has not learned to read an argument out of `magic_function(3)`",
    "test_unicode_tool_call_integration": "the bundled policy has seen no Chinese and no Japanese",
}
"""What the bundled policy is not asked; TestOnAScriptedModel is."""


# pyright: reportAssignmentType=false
# The suite declares properties; class attributes are how LangChain's own adapters override them.


class Declared(ChatModelIntegrationTests):
    """What ChatOffbook is, on any model. The suite declares by properties; what it skips has its reason here."""

    endpoint: dict[str, Any]

    supports_anthropic_inputs = True
    # The embedded engine takes text alone; a part of another kind is refused by name. (vLLM takes images for models that
    # see; nothing that runs here has one.)
    supports_image_inputs = False
    supports_image_urls = False
    supports_image_tool_message = False
    supports_pdf_inputs = False
    supports_pdf_tool_message = False
    supports_audio_inputs = False
    # The server says how many tokens went in and out, no further: no audio, no cache of a provider's.
    supported_usage_metadata_details = {"invoke": [], "stream": []}  # noqa: RUF012
    # Cassettes replay a provider that costs money; here the server itself answers.
    enable_vcr_tests = False

    @property
    def chat_model_class(self) -> type[ChatOffbook]:
        return ChatOffbook

    @property
    def chat_model_params(self) -> dict[str, Any]:
        return {**self.endpoint, "temperature": 0.0, "max_tokens": 200}

    @property
    def model_override_value(self) -> str:
        """A model's steps are names of their own."""
        return f"{self.endpoint['model']}@0"


class TestOnTheBundledPolicy(Declared):
    """A LocalBackend: the gateway, the embedded engine, grammars, and a policy that was taught to call tools."""

    # It was taught no JSON but that of tool calls, and finds no end in free text; so answers in a form are tool calls.
    structured_output_kwargs = {"method": "function_calling"}  # noqa: RUF012
    supports_json_mode = False

    @pytest.fixture(scope="class", autouse=True)
    def connect(self, request: pytest.FixtureRequest, local_backend: LocalBackend) -> None:
        model = TrainableModel(name=new_id("agent"), base_model="tiny", backend=local_backend)
        api = asyncio.run(model.api())
        cls: Any = request.cls
        cls.endpoint = {"model": model.name, "base_url": api.url, "api_key": api.key}

    @pytest.fixture
    def model(self, request: pytest.FixtureRequest) -> BaseChatModel:
        """The suite's model, where the policy has what a test needs."""
        name = request.node.originalname
        if name in NEEDS_SKILL:
            pytest.skip(f"{NEEDS_SKILL[name]}; see TestOnAScriptedModel")
        return self.chat_model_class(**(self.chat_model_params | (getattr(request, "param", None) or {})))


class TestOnAScriptedModel(Declared):
    """The same server, and behind it a script that answers the suite's prompts as a large model would."""

    supports_json_mode = True

    @pytest.fixture(scope="class", autouse=True)
    def connect(self, request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
        with scripted_server(answer, tmp_path_factory.mktemp("standard_suite")) as server:
            cls: Any = request.cls
            cls.endpoint = {"model": "default", "base_url": server.url}
            yield


JOKE = {"setup": "Why was the cat on the keyboard?", "punchline": "To watch the mouse."}
ARGUMENTS = {
    "magic_function": {"input": 3},
    "greeting_generator": {"answer_style": "pirate"},
    "get_weather": {"location": "San Francisco, CA"},
    "my_adder_tool": {"a": 3, "b": 4},
    "Joke": JOKE,
    "JokeDict": JOKE,
}


def answer(body: Body) -> Action:
    """The tool that must be called, or the first when the user speaks; JSON where that is asked for; else a greeting."""
    last, choice, tools = body["messages"][-1], body.get("tool_choice"), body.get("tools") or ()
    name = choice["function"]["name"] if isinstance(choice, dict) else None
    offered = [tool["function"]["name"] for tool in tools if name in (None, tool["function"]["name"])]
    if offered and last["role"] == "user":
        arguments = ARGUMENTS.get(offered[0], {})
        if offered[0] == "unicode_customer":
            found = re.search("'(.+)'", content_text(last))
            assert found is not None
            arguments = {"customer_name": found[1], "description": "a company"}
        return Action(calls=((offered[0], json.dumps(arguments, ensure_ascii=False)),))
    wants_json = (body.get("response_format") or {}).get("type", "text") != "text"
    return Action(text=json.dumps(JOKE) if wants_json else "Hello, how are you?")
