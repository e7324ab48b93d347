"""Chat model classes that an app wrote: their code runs, and the call that it makes is captured; where it cannot run, it is named."""

from __future__ import annotations

import logging
from collections.abc import AsyncIterator, Iterator
from typing import Any

import httpx
import pytest
from langchain.agents import create_agent
from langchain_anthropic import ChatAnthropic
from langchain_core.caches import InMemoryCache
from langchain_core.globals import set_llm_cache
from langchain_core.language_models import BaseChatModel, SimpleChatModel
from langchain_core.messages import AIMessage, AIMessageChunk, BaseMessage, SystemMessage
from langchain_core.outputs import ChatGeneration, ChatGenerationChunk, ChatResult
from langchain_openai import ChatOpenAI

from offbook.base.errors import LeakError
from offbook.testing import says, scripted_llm
from offbook_langgraph.calls.own_code import _warn  # pyright: ignore[reportPrivateUsage]  # said once a process

from .apps import DEAD, add, asked, last, own_model
from .policy import Policy, one_branch, origins

BRIEF = SystemMessage("Be brief.")


@pytest.fixture(autouse=True)
def _nothing_said_before() -> None:
    _warn.cache_clear()


def loud(message: BaseMessage) -> AIMessage:
    """An answer as the app's own code changes it."""
    return AIMessage(message.text.upper(), response_metadata=message.response_metadata)


class Model(BaseChatModel):
    """What the app's classes have in common."""

    @property
    def _llm_type(self) -> str:
        return "own"

    def _generate(self, messages: list[BaseMessage], stop: Any = None, run_manager: Any = None, **kwargs: Any) -> Any:
        raise NotImplementedError


class Router(Model):
    """Picks the model by the length of the question."""

    models: dict[str, BaseChatModel]

    def _pick(self, messages: list[BaseMessage]) -> BaseChatModel:
        return self.models["large" if len(messages[-1].text) > 5 else "small"]

    def _generate(self, messages: list[BaseMessage], stop: Any = None, run_manager: Any = None, **kwargs: Any) -> Any:
        message = self._pick(messages).invoke(messages, stop=stop, **kwargs)
        return ChatResult(generations=[ChatGeneration(message=message)])


class StreamingRouter(Router):
    """The same for streams."""

    def _stream(
        self, messages: list[BaseMessage], stop: Any = None, run_manager: Any = None, **kwargs: Any
    ) -> Iterator[ChatGenerationChunk]:
        for chunk in self._pick(messages).stream(messages, stop=stop, **kwargs):
            assert isinstance(chunk, AIMessageChunk)
            yield ChatGenerationChunk(message=chunk)


def router(kind: type[Router] = Router) -> Router:
    return kind(models={"small": own_model(model="small"), "large": own_model(model="large")})


class Loud(Model):
    """Adds a system message to the calls of another model, and changes its answers."""

    inner: BaseChatModel
    direct: bool = False

    def _generate(self, messages: list[BaseMessage], stop: Any = None, run_manager: Any = None, **kwargs: Any) -> Any:
        prompt = [BRIEF, *messages]
        if self.direct:
            result = self.inner._generate(prompt, stop, run_manager, **kwargs)
            return ChatResult(generations=[ChatGeneration(message=loud(result.generations[0].message))])
        return ChatResult(generations=[ChatGeneration(message=loud(self.inner.invoke(prompt, stop=stop, **kwargs)))])

    async def _agenerate(
        self, messages: list[BaseMessage], stop: Any = None, run_manager: Any = None, **kwargs: Any
    ) -> Any:
        prompt = [BRIEF, *messages]
        if self.direct:
            result = await self.inner._agenerate(prompt, stop, run_manager, **kwargs)
            return ChatResult(generations=[ChatGeneration(message=loud(result.generations[0].message))])
        answer = await self.inner.ainvoke(prompt, stop=stop, **kwargs)
        return ChatResult(generations=[ChatGeneration(message=loud(answer))])

    def _stream(
        self, messages: list[BaseMessage], stop: Any = None, run_manager: Any = None, **kwargs: Any
    ) -> Iterator[ChatGenerationChunk]:
        prompt = [BRIEF, *messages]
        chunks: Iterator[Any] = (
            (chunk.message for chunk in self.inner._stream(prompt, stop, run_manager, **kwargs))
            if self.direct
            else self.inner.stream(prompt, stop=stop, **kwargs)
        )
        for chunk in chunks:
            yield ChatGenerationChunk(message=chunk.model_copy(update={"content": chunk.text.upper()}))

    async def _astream(
        self, messages: list[BaseMessage], stop: Any = None, run_manager: Any = None, **kwargs: Any
    ) -> AsyncIterator[ChatGenerationChunk]:
        prompt = [BRIEF, *messages]
        if self.direct:
            async for generation in self.inner._astream(prompt, stop, run_manager, **kwargs):
                yield ChatGenerationChunk(message=AIMessageChunk(content=str(generation.message.text).upper()))
            return
        async for chunk in self.inner.astream(prompt, stop=stop, **kwargs):
            yield ChatGenerationChunk(message=AIMessageChunk(content=str(chunk.text).upper()))

    def bind_tools(self, tools: Any, **kwargs: Any) -> Any:
        return self.bind(tools=[*tools], **kwargs)


class LoudCode:
    """The same as a mixin of a provider's class."""

    def _generate(self, messages: list[BaseMessage], stop: Any = None, run_manager: Any = None, **kwargs: Any) -> Any:
        provider: Any = super()
        result = provider._generate([BRIEF, *messages], stop, run_manager, **kwargs)
        return ChatResult(generations=[ChatGeneration(message=loud(result.generations[0].message))])

    async def _agenerate(
        self, messages: list[BaseMessage], stop: Any = None, run_manager: Any = None, **kwargs: Any
    ) -> Any:
        provider: Any = super()
        result = await provider._agenerate([BRIEF, *messages], stop, run_manager, **kwargs)
        return ChatResult(generations=[ChatGeneration(message=loud(result.generations[0].message))])

    def _stream(self, messages: list[BaseMessage], *args: Any, **kwargs: Any) -> Iterator[ChatGenerationChunk]:
        provider: Any = super()
        for chunk in provider._stream([BRIEF, *messages], *args, **kwargs):
            yield ChatGenerationChunk(message=AIMessageChunk(content=str(chunk.message.text).upper()))

    async def _astream(self, messages: list[BaseMessage], *args: Any, **kwargs: Any) -> AsyncIterator[Any]:
        provider: Any = super()
        async for chunk in provider._astream([BRIEF, *messages], *args, **kwargs):
            yield ChatGenerationChunk(message=AIMessageChunk(content=str(chunk.message.text).upper()))


class LoudOpenAI(LoudCode, ChatOpenAI):
    """A subclass of OpenAI's class."""


class LoudClaude(LoudCode, ChatAnthropic):
    """A subclass of another provider's class."""

    def _generate(self, messages: list[BaseMessage], stop: Any = None, run_manager: Any = None, **kwargs: Any) -> Any:
        return super()._generate(messages, stop, run_manager, **kwargs)


def loud_openai() -> LoudOpenAI:
    return LoudOpenAI(model="own", base_url=DEAD, max_retries=0)  # type: ignore[call-arg]


LOUD: dict[str, Any] = {
    "another model": lambda: Loud(inner=own_model(model="inner")),
    "another model's methods": lambda: Loud(inner=own_model(model="inner"), direct=True),
    "a wrapper of a wrapper": lambda: Loud(inner=router(StreamingRouter)),
    "a subclass": loud_openai,
    "a subclass of another provider's": lambda: LoudClaude(model="claude-sonnet-4-5", max_retries=0),  # type: ignore[call-arg]
}
WAYS = ("invoke", "ainvoke", "stream", "astream", "stream_events")
PLAIN_WAYS = WAYS[:-1]
"""Of a class without `_stream`, which LangChain cannot call by the events of version 3."""


async def text_of(model: BaseChatModel, way: str, question: str) -> str:
    """The answer of a model that is called in some way."""
    if way == "invoke":
        return str(model.invoke(question).text)
    if way == "ainvoke":
        return str((await model.ainvoke(question)).text)
    if way == "stream":
        return "".join(chunk.text for chunk in model.stream(question))
    if way == "astream":
        return "".join([chunk.text async for chunk in model.astream(question)])
    return str(model.stream_events(question, version="v3").output.text)  # type: ignore[call-overload]


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("kind", LOUD)
async def test_a_model_that_adds_a_prompt_and_changes_answers_still_does(
    policy: Policy, kind: str, way: str, caplog: pytest.LogCaptureFixture
) -> None:
    async with policy.rollout() as made:
        assert await text_of(LOUD[kind](), way, "hi") == "HEARD: HI"
    [call] = made.calls(1)
    assert [message["content"] for message in call.messages] == ["Be brief.", "hi"]
    assert [dict(message)["role"] for message in made.trajectory.messages()] == ["system", "user", "assistant"]
    assert str(made.trajectory.messages()[-1].get("content")).lower() == "heard: hi"
    assert not caplog.records


@pytest.mark.parametrize(
    ("kind", "way"), [*((Router, way) for way in PLAIN_WAYS), *((StreamingRouter, way) for way in WAYS)]
)
async def test_a_router_picks_the_model_whose_call_is_captured(policy: Policy, kind: type[Router], way: str) -> None:
    async with policy.rollout() as made:
        assert await text_of(router(kind), way, "hi") == "heard: hi"
        assert await text_of(router(kind), way, "a longer question") == "heard: a longer question"
    assert [(origin.kind, origin.model) for origin in origins(made.calls(2))] == [
        ("ChatOpenAI", "small"),
        ("ChatOpenAI", "large"),
    ]


def test_an_agent_on_a_model_of_the_apps_own_uses_its_tools(policy: Policy) -> None:
    class Calls(Loud):
        def _generate(self, messages: Any, stop: Any = None, run_manager: Any = None, **kwargs: Any) -> Any:
            return ChatResult(generations=[ChatGeneration(message=self.inner.invoke([BRIEF, *messages], **kwargs))])

    app = create_agent(Calls(inner=own_model()), [add])
    with policy.rollout() as made:
        assert last(app.invoke(asked("add(a=1, b=2)"))) == "the tools said 3"
    calls = made.calls(2)
    assert one_branch(calls)
    assert {origin.node for origin in origins(calls)} == {"model"}
    assert calls[0].tools is not None


@pytest.mark.parametrize("option", ["select", "exclude"])
def test_a_selection_of_the_class_holds_for_the_calls_of_its_code(policy: Policy, option: str) -> None:
    with scripted_llm([says("mine")]) as own:
        inner = {name: own_model(model=name, base_url=own.url) for name in ("small", "large")}
        with policy.rollout(**{option: {"kind": "Router"}}) as made:
            answer = Router(models={**inner}).invoke("hi").text
    assert answer == ("heard: hi" if option == "select" else "mine")
    made.calls(1 if option == "select" else 0)


def test_a_selection_of_one_of_its_models_holds_for_that_one(policy: Policy) -> None:
    with scripted_llm([says("mine")]) as own:
        inner = {name: own_model(model=name, base_url=own.url) for name in ("small", "large")}
        with policy.rollout(select={"model": "small"}) as made:
            assert Router(models={**inner}).invoke("hi").text == "heard: hi"
            assert Router(models={**inner}).invoke("a longer question").text == "mine"
    made.calls(1)


class Payload(ChatOpenAI):
    """Changes its requests."""

    def _get_request_payload(self, input_: Any, *, stop: Any = None, **kwargs: Any) -> dict[str, Any]:
        payload: dict[str, Any] = super()._get_request_payload(input_, stop=stop, **kwargs)
        payload["messages"] = [{"role": "developer", "content": "Be brief."}, *payload["messages"]]
        return payload | {"model": "gpt-other", "temperature": 0.0, "max_completion_tokens": 44, "user": "me"}


class Reader(ChatOpenAI):
    """Changes its answers where they are read."""

    def _create_chat_result(self, response: Any, generation_info: Any = None) -> ChatResult:
        result = super()._create_chat_result(response, generation_info)
        for generation in result.generations:
            generation.message.content = str(generation.message.text).upper()
        return result

    def _convert_chunk_to_generation_chunk(self, chunk: Any, *args: Any) -> ChatGenerationChunk | None:
        generation = super()._convert_chunk_to_generation_chunk(chunk, *args)
        if generation is not None:
            generation.message.content = str(generation.message.text).upper()
        return generation


@pytest.mark.parametrize("way", WAYS)
async def test_a_request_that_the_app_rewrites_is_rewritten(policy: Policy, way: str) -> None:
    async with policy.rollout() as made:
        model = Payload(model="own", base_url=DEAD, max_retries=0)  # type: ignore[call-arg]
        assert await text_of(model, way, "hi") == "heard: hi"
    [call] = made.calls(1)
    assert call.messages == ({"role": "system", "content": "Be brief."}, {"role": "user", "content": "hi"})
    assert (made.requests[0]["temperature"], made.requests[0]["max_completion_tokens"]) == (1.0, 44)


def test_in_a_rewritten_request_the_policys_own_turns_stay_as_they_were_sampled(policy: Policy) -> None:
    app = create_agent(Payload(model="own", base_url=DEAD, max_retries=0), [add])  # type: ignore[call-arg]
    with policy.rollout() as made:
        assert last(app.invoke(asked("add(a=1, b=2) then add(a=3, b=4)"))) == "the tools said 3, 7"
    assert one_branch(made.calls(3))


@pytest.mark.parametrize("way", WAYS)
async def test_an_answer_that_the_app_reads_in_its_own_way_is_read_so(policy: Policy, way: str) -> None:
    async with policy.rollout() as made:
        assert await text_of(Reader(model="own", base_url=DEAD, max_retries=0), way, "hi") == "HEARD: HI"  # type: ignore[call-arg]
    made.calls(1)


class House(Model):
    """Speaks to its provider by itself."""

    url: str

    def _generate(self, messages: list[BaseMessage], stop: Any = None, run_manager: Any = None, **kwargs: Any) -> Any:
        body = {"model": "house", "messages": [{"role": "user", "content": messages[-1].text}]}
        text = httpx.post(f"{self.url}/chat/completions", json=body).json()["choices"][0]["message"]["content"]
        return ChatResult(generations=[ChatGeneration(message=AIMessage(text))])


class Claude(ChatAnthropic):
    """Rewrites requests in a format that is not OpenAI's."""

    def _get_request_payload(self, *args: Any, **kwargs: Any) -> dict[str, Any]:
        return {**super()._get_request_payload(*args, **kwargs), "system": "Be brief."}


@pytest.mark.parametrize("way", ["invoke", "astream"])
@pytest.mark.parametrize(
    ("make", "named"),
    [
        (lambda: House(url=DEAD), "House: a capture does not run _generate of this class"),
        (
            lambda: Claude(model="claude-sonnet-4-5", max_retries=0),  # type: ignore[call-arg]
            "Claude: a capture does not run _get_request_payload of this class",
        ),
    ],
)
async def test_code_that_cannot_run_is_named_once(
    policy: Policy, make: Any, named: str, way: str, caplog: pytest.LogCaptureFixture
) -> None:
    async with policy.rollout() as made:
        for _ in range(2):
            assert await text_of(make(), way, "hi") == "heard: hi"
    made.calls(2)
    assert caplog.text.count(named) == len(caplog.records) == 1


@pytest.mark.parametrize("way", ["invoke", "ainvoke"])
async def test_code_that_runs_and_speaks_to_a_provider_by_itself_is_a_leak_with_its_line(
    policy: Policy, way: str
) -> None:
    class Both(House):
        inner: BaseChatModel

    with pytest.raises(LeakError, match=r"made at .*test_own_code\.py:\d+ in _generate"):
        async with policy.rollout() as made:
            await text_of(Both(url=DEAD, inner=own_model()), way, "hi")
    made.recorded(0)


SHARED = own_model(model="shared")


class Calls(SimpleChatModel):
    """Calls a model of its module."""

    def _call(self, messages: list[BaseMessage], stop: Any = None, run_manager: Any = None, **kwargs: Any) -> str:
        return SHARED._generate([BRIEF, *messages]).generations[0].text.upper()

    @property
    def _llm_type(self) -> str:
        return "calls"


class Builds(Model):
    """Builds its model at each call, in a function of its own."""

    def _generate(self, messages: list[BaseMessage], stop: Any = None, run_manager: Any = None, **kwargs: Any) -> Any:
        return ask([BRIEF, *messages])


def ask(messages: list[BaseMessage]) -> ChatResult:
    return ChatResult(generations=[ChatGeneration(message=loud(own_model(model="built").invoke(messages)))])


@pytest.mark.parametrize(("make", "model"), [(Calls, "shared"), (Builds, "built")])
async def test_a_model_that_the_class_does_not_hold_is_captured_too(policy: Policy, make: Any, model: str) -> None:
    async with policy.rollout() as made:
        for way in PLAIN_WAYS:
            assert await text_of(make(), way, "hi") == "HEARD: HI"
    calls = made.calls(len(PLAIN_WAYS))
    assert {origin.model for origin in origins(calls)} == {model}
    assert {len(call.messages) for call in calls} == {2}


class Invokes(ChatOpenAI):
    """Overrides the method that the app calls."""

    def invoke(self, input: Any, config: Any = None, **kwargs: Any) -> AIMessage:
        return loud(super().invoke([BRIEF, ("user", str(input))], config, **kwargs))


def test_an_overridden_invoke_runs_and_its_call_is_captured(policy: Policy) -> None:
    with policy.rollout() as made:
        assert Invokes(model="own", base_url=DEAD, max_retries=0).invoke("hi").text == "HEARD: HI"  # type: ignore[call-arg]
    assert len(made.calls(1)[0].messages) == 2


def test_an_answer_without_a_call_is_the_classes_own(policy: Policy) -> None:
    class Guarded(Loud):
        def _generate(self, messages: Any, stop: Any = None, run_manager: Any = None, **kwargs: Any) -> Any:
            return ChatResult(generations=[ChatGeneration(message=AIMessage("No."))])

    with policy.rollout() as made:
        assert [Guarded(inner=own_model()).invoke("hi").text for _ in range(2)] == ["No.", "No."]
    made.calls(0)


def test_a_cache_of_langchains_answers_for_no_class_of_the_apps(policy: Policy) -> None:
    set_llm_cache(InMemoryCache())
    try:
        for _ in range(2):
            with policy.rollout() as made:
                for make in LOUD.values():
                    assert make().invoke("hi").text == "HEARD: HI"
            made.calls(len(LOUD))
    finally:
        set_llm_cache(None)


def test_a_model_class_of_a_provider_is_named_by_nothing(policy: Policy, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING), policy.rollout() as made:
        own_model().invoke("hi")
        ChatAnthropic(model="claude-sonnet-4-5", max_retries=0).invoke("hi")  # type: ignore[call-arg]
    made.calls(2)
    assert [record.message for record in caplog.records if "does not run" in record.message] == []
