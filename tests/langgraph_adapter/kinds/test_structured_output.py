"""Apps that want an object: every method of `with_structured_output`, both strategies of agents, and parsers."""

from __future__ import annotations

import json
from typing import Any

import pytest
from langchain.agents import create_agent
from langchain.agents.structured_output import AutoStrategy, ProviderStrategy, ToolStrategy
from langchain_core.messages import AIMessage
from langchain_core.output_parsers import PydanticOutputParser, PydanticToolsParser
from langchain_core.prompts import ChatPromptTemplate
from pydantic import BaseModel
from typing_extensions import TypedDict

from .apps import TEAL, City, add, asked, last, own_model
from .policy import Policy, names_of, one_branch
from .test_providers import claude, groq


class Village(TypedDict):
    """A village."""

    city: str
    size: int


def test_an_object_by_function_calling(policy: Policy) -> None:
    model = own_model().with_structured_output(City, method="function_calling")
    with policy.rollout() as made:
        assert model.invoke("which city?") == TEAL
    assert made.calls(1)[0].constrained == "tool_choice"
    request = made.requests[0]
    assert request["tool_choice"] == {"type": "function", "function": {"name": "City"}}
    assert (names_of(request["tools"]), request["parallel_tool_calls"]) == (["City"], False)


def test_an_object_by_json_schema(policy: Policy) -> None:
    with policy.rollout() as made:
        assert own_model().with_structured_output(City, method="json_schema").invoke("which city?") == TEAL
    assert made.calls(1)[0].constrained == "response_format"
    wanted = made.requests[0]["response_format"]
    assert (wanted["type"], wanted["json_schema"]["name"]) == ("json_schema", "City")
    assert set(wanted["json_schema"]["schema"]["properties"]) == {"city", "size"}


async def test_an_object_by_json_mode(policy: Policy) -> None:
    async with policy.rollout() as made:
        found = await own_model().with_structured_output(City, method="json_mode").ainvoke("which city? answer in JSON")
    assert found == TEAL
    made.calls(1)
    assert made.requests[0]["response_format"] == {"type": "json_object"}


@pytest.mark.parametrize("method", ["function_calling", "json_schema"])
def test_a_strict_object(policy: Policy, method: Any) -> None:
    with policy.rollout() as made:
        assert own_model().with_structured_output(City, method=method, strict=True).invoke("which city?") == TEAL
    made.calls(1)
    request = made.requests[0]
    asked_for = request["tools"][0]["function"] if "tools" in request else request["response_format"]["json_schema"]
    assert asked_for["strict"] is True


@pytest.mark.parametrize("method", ["function_calling", "json_schema", "json_mode"])
def test_an_object_with_the_raw_message_beside_it(policy: Policy, method: Any) -> None:
    model = own_model().with_structured_output(City, method=method, include_raw=True)
    with policy.rollout() as made:
        found: Any = model.invoke("which city? answer in JSON")
    assert (found["parsed"], found["parsing_error"]) == (TEAL, None)
    assert isinstance(found["raw"], AIMessage)
    made.calls(1)


@pytest.mark.parametrize("schema", [Village, City.model_json_schema()])
def test_a_typed_dict_or_a_json_schema(policy: Policy, schema: Any) -> None:
    with policy.rollout() as made:
        assert own_model().with_structured_output(schema).invoke("which city?") == TEAL.model_dump()
    made.calls(1)


def test_an_object_of_a_model_that_also_has_tools(policy: Policy) -> None:
    model = own_model().with_structured_output(City, method="json_schema", tools=[add], strict=True, include_raw=True)
    with policy.rollout() as made:
        raw: Any = model.invoke("add(a=1, b=2)")["raw"]
        assert model.invoke("which city?")["parsed"] == TEAL
    assert [call["args"] for call in raw.tool_calls] == [{"a": 1, "b": 2}]
    made.calls(2)
    assert all(names_of(request["tools"]) == ["add"] for request in made.requests)
    assert all(request["response_format"]["type"] == "json_schema" for request in made.requests)


async def test_a_streamed_object(policy: Policy) -> None:
    async with policy.rollout() as made:
        found = [item async for item in own_model().with_structured_output(City.model_json_schema()).astream("which?")]
    assert found[-1] == TEAL.model_dump()
    made.calls(1)


@pytest.mark.parametrize("include_raw", [False, True])
async def test_a_streamed_object_by_json_schema_comes_without_a_warning(policy: Policy, include_raw: bool) -> None:
    model = own_model().with_structured_output(City, method="json_schema", include_raw=include_raw)
    async with policy.rollout() as made:  # every warning is an error here
        streams = [list(model.stream("which city?")), [item async for item in model.astream("which city?")]]
    parsed = [item.get("parsed") if include_raw else item for items in streams for item in items]
    assert [each for each in parsed if each is not None] == [TEAL, TEAL]
    made.calls(2)


def test_an_agent_that_ends_with_an_object_by_a_tool(policy: Policy) -> None:
    app = create_agent(own_model(), [add], response_format=ToolStrategy(City))
    with policy.rollout() as made:
        state = app.invoke(asked("add(a=1, b=2) then City(city='teal', size=7)"))
    assert state["structured_response"] == TEAL
    assert one_branch(made.calls(2))
    assert [request["tool_choice"] for request in made.requests] == ["required", "required"]
    assert names_of(made.requests[0]["tools"]) == ["add", "City"]


def test_an_agent_that_ends_with_an_object_of_one_of_several_kinds(policy: Policy) -> None:
    class Nowhere(BaseModel):
        """No city."""

        reason: str

    app = create_agent(own_model(), [], response_format=ToolStrategy(City | Nowhere))
    with policy.rollout() as made:
        assert app.invoke(asked("Nowhere(reason='lost')"))["structured_response"] == Nowhere(reason="lost")
    made.calls(1)
    assert names_of(made.requests[0]["tools"]) == ["City", "Nowhere"]


def test_an_agent_that_corrects_an_object_that_does_not_fit(policy: Policy) -> None:
    app = create_agent(own_model(), [], response_format=ToolStrategy(City))
    with policy.rollout() as made:
        state = app.invoke(asked("City(city='teal', size='large') then City(city='teal', size=7)"))
    assert state["structured_response"] == TEAL
    assert one_branch(made.calls(2))


@pytest.mark.parametrize("strategy", [ProviderStrategy(City), AutoStrategy(City), City])
def test_an_agent_that_ends_with_an_object_by_the_provider(policy: Policy, strategy: Any) -> None:
    app = create_agent(own_model(), [add], response_format=strategy)
    with policy.rollout() as made:
        state = app.invoke(asked("add(a=1, b=2)"))
    assert state["structured_response"] == TEAL
    assert json.loads(last(state)) == TEAL.model_dump()
    assert [call.constrained for call in made.calls(2)] == ["response_format", "response_format"]
    for request in made.requests:
        assert request["response_format"]["json_schema"]["name"] == "City"
        assert request["tools"][0]["function"]["strict"] is True


def test_a_parser_behind_the_model(policy: Policy) -> None:
    parser = PydanticOutputParser(pydantic_object=City)
    prompt = ChatPromptTemplate.from_template("{question}\n{format}").partial(format=parser.get_format_instructions())
    chain = prompt | own_model(model_kwargs={"response_format": {"type": "json_object"}}) | parser
    with policy.rollout() as made:
        assert chain.invoke({"question": "which city?"}) == TEAL
    made.calls(1)
    assert made.requests[0]["response_format"] == {"type": "json_object"}


def test_tool_calls_parsed_to_objects(policy: Policy) -> None:
    chain = own_model().bind_tools([City], tool_choice="any", strict=True) | PydanticToolsParser(tools=[City])
    with policy.rollout() as made:
        assert chain.invoke("which city?") == [TEAL]
    made.calls(1)
    assert made.requests[0]["tool_choice"] == "required"
    assert made.requests[0]["tools"][0]["function"]["strict"] is True


@pytest.mark.parametrize("make", [claude, groq])
@pytest.mark.parametrize("streamed", [False, True])
async def test_an_agent_of_another_provider_with_tools_that_ends_with_an_object(
    policy: Policy, make: Any, streamed: bool
) -> None:
    app = create_agent(make(), [add], response_format=ProviderStrategy(City))
    async with policy.rollout() as made:
        if streamed:
            state = [state async for state in app.astream(asked("add(a=1, b=2)"), stream_mode="values")][-1]
        else:
            state = await app.ainvoke(asked("add(a=1, b=2)"))
    assert state["structured_response"] == TEAL
    assert [call.constrained for call in made.calls(2)] == ["response_format", "response_format"]
    for request in made.requests:
        assert set(request["response_format"]["json_schema"]["schema"]["properties"]) == {"city", "size"}
        assert "strict" not in request["tools"][0]["function"]
