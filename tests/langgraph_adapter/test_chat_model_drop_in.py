"""ChatOffbook where a ChatOpenAI would stand: its address and key, its name, copies of it, and what it cannot know."""

from __future__ import annotations

import asyncio
import warnings
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
from langchain.chat_models import init_chat_model
from langchain_core._api import LangChainBetaWarning
from langchain_core.load import dumps, loads
from langchain_core.messages import HumanMessage, SystemMessage
from langchain_core.runnables import ConfigurableField
from pydantic import SecretStr, ValidationError

from offbook import TrainableModel
from offbook.base.errors import ConfigError
from offbook.testing import says, scripted_llm
from offbook_langgraph import ChatOffbook

KEY = "a-secret-key"


@pytest.fixture(autouse=True)
def openai_in_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    """The app's own provider, which is no business of the policy's server."""
    monkeypatch.setenv("OPENAI_API_KEY", "openai's")
    monkeypatch.setenv("OPENAI_BASE_URL", "https://api.openai.com/v1")
    for name in ("OFFBOOK_URL", "OFFBOOK_API_KEY"):
        monkeypatch.delenv(name, raising=False)


def test_openais_key_goes_to_nobody_else(monkeypatch: pytest.MonkeyPatch) -> None:
    with scripted_llm([says("hello")]) as server:
        ChatOffbook(model="agent", base_url=server.url).invoke("hi")
        monkeypatch.setenv("OFFBOOK_API_KEY", "ours")
        monkeypatch.setenv("OFFBOOK_URL", server.url.removesuffix("/v1"))
        asyncio.run(ChatOffbook(model="agent").ainvoke("hi"))
    assert [request.headers["authorization"] for request in server.requests] == ["Bearer none", "Bearer ours"]


@pytest.mark.parametrize(
    ("given", "message"),
    [({"model": "agent"}, "base_url: missing.*OFFBOOK_URL"), ({"base_url": "http://127.0.0.1:9"}, "model")],
)
def test_without_address_or_model_nothing_is_guessed_and_no_error_shows_the_key(
    given: dict[str, Any], message: str
) -> None:
    with pytest.raises(ValidationError, match=message) as caught:
        ChatOffbook(**given, api_key=SecretStr(KEY))
    assert KEY not in str(caught.value)


def test_what_is_dumped_has_no_key_and_can_be_loaded() -> None:
    model = ChatOffbook(model="agent", base_url="http://127.0.0.1:9/v1", api_key=SecretStr(KEY), temperature=0.5)
    text = dumps(model)
    assert KEY not in text + repr(model) + str(model.model_dump_json())
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", LangChainBetaWarning)
        again = loads(
            text,
            allowed_objects=[ChatOffbook],
            valid_namespaces=["offbook_langgraph"],
            secrets_map={"OFFBOOK_API_KEY": "another", "OPENAI_API_KEY": "openai's"},
        )
    assert again.asdict() == model.asdict()
    assert again.openai_api_key.get_secret_value() == "another"
    assert again.openai_api_base == model.openai_api_base


@pytest.mark.parametrize("name", ["gpt-5-mail", "o1", "o3-mini"])
def test_a_model_that_is_called_like_one_of_openais_is_treated_like_any_other(name: str) -> None:
    with scripted_llm([says("hello")]) as server:
        model = ChatOffbook(model=name, base_url=server.url, temperature=0.25)
        model.invoke([SystemMessage("be brief"), HumanMessage("hi")])
        ChatOffbook(model=name, base_url=server.url).invoke("hi")
    first, second = (request.body for request in server.requests)
    assert first["temperature"] == 0.25
    assert first["messages"][0]["role"] == "system"
    assert "temperature" not in second
    assert model.profile is None


def test_tokens_are_counted_with_the_given_tokenizer_or_not_at_all() -> None:
    model = ChatOffbook(model="gpt-4", base_url="http://127.0.0.1:9/v1")
    for count in (lambda: model.get_num_tokens("hi"), lambda: model.get_num_tokens_from_messages([HumanMessage("hi")])):
        with pytest.raises(NotImplementedError, match="custom_get_token_ids"):
            count()
    bytes_of = ChatOffbook(
        model="gpt-4", base_url="http://127.0.0.1:9/v1", custom_get_token_ids=lambda text: list(text.encode())
    )
    assert bytes_of.get_num_tokens("four") == 4
    assert bytes_of.get_num_tokens_from_messages([HumanMessage("four")]) == len("Human: four")


def test_several_answers_come_whole_and_are_refused_as_a_stream(model: TrainableModel) -> None:
    api = asyncio.run(model.api())
    chat = ChatOffbook(model=model.name, base_url=api.url, api_key=api.key, n=3, max_tokens=8)  # type: ignore[call-arg]  # an alias that pydantic accepts
    assert len(chat.generate([[HumanMessage("hi")]]).generations[0]) == 3
    with pytest.raises(ConfigError, match="n=3"):
        next(chat.stream("hi"))


def test_one_model_works_in_loops_that_run_at_the_same_time() -> None:
    with scripted_llm(lambda request: says(request.messages[0]["content"])) as server:
        model = ChatOffbook(model="agent", base_url=server.url)

        async def ask(name: str) -> list[str]:
            return [message.text for message in await asyncio.gather(*(model.ainvoke(name) for _ in range(4)))]

        names = [f"loop {number}" for number in range(6)]
        with ThreadPoolExecutor(3) as pool:
            answers = list(pool.map(lambda name: asyncio.run(ask(name)), names))
    assert answers == [[name] * 4 for name in names]


def test_settings_can_be_chosen_at_the_call() -> None:
    with scripted_llm([says("hello")]) as server:
        model = ChatOffbook(model="agent", base_url=server.url, temperature=1.0, stop=["END"])  # type: ignore[call-arg]  # an alias that pydantic accepts
        chosen = model.configurable_fields(
            temperature=ConfigurableField(id="heat"), model_name=ConfigurableField(id="m")
        )
        chosen.with_config(configurable={"heat": 0.5, "m": "agent@3"}).invoke("hi")
        model.bind(stop=["STOP"]).invoke("hi")
    first, second = (request.body for request in server.requests)
    assert (first["model"], first["temperature"], first["stop"]) == ("agent@3", 0.5, ["END"])
    assert second["stop"] == ["STOP"]


def test_a_model_made_by_init_chat_model_speaks_to_the_server_too(model: TrainableModel) -> None:
    api = asyncio.run(model.api())
    ours = ChatOffbook(model=model.name, base_url=api.url, api_key=api.key, temperature=0, max_tokens=8)  # type: ignore[call-arg]  # an alias that pydantic accepts
    plain = init_chat_model(
        f"openai:{model.name}", base_url=f"{api.url}/v1", api_key=api.key, temperature=0, max_tokens=8
    )
    assert plain.invoke("say the word teal").text == ours.invoke("say the word teal").text != ""
