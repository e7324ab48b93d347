"""A call of a deployed app: on the small model's side that model answers; on the other, and whenever that fails, the app's own."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Iterator, Mapping
from typing import Any, cast
from uuid import UUID, uuid4

from langchain_core.language_models import BaseChatModel
from langchain_core.messages import BaseMessage
from langchain_core.outputs import LLMResult
from openai.lib._parsing import type_to_response_format_param  # pyright: ignore[reportPrivateImportUsage]
from pydantic import Field, PrivateAttr

from offbook.base.app_calls import SideAnswer
from offbook.base.redaction import error_text
from offbook.base.types import Json
from offbook_langgraph.chat_model import ChatOffbook

from .origins import model_name
from .provider_formats import check_text, to_openai
from .recorded_calls import answers, output_of, tokens_of
from .run_tree import RunTree
from .takeover_sides import AskedCall, TakeoverSides, answer_of

PROVIDERS = {"google_genai": "gemini", "google_vertexai": "vertex_ai", "azure": "azure", "ollama": "ollama"}
"""LangChain's names of providers that the table of prices calls otherwise."""
LATE_SECONDS = 1.0
"""How long after the server's own limit an answer of the small model may still come."""
Prices = Mapping[str, tuple[float, float]]


class DeployedChat(ChatOffbook):
    """The small model of a route, behind the server's takeover. `prices`: of the app's own models, by their names."""

    route: str = Field(description="name of the takeover's route")
    _sides: TakeoverSides = PrivateAttr()
    _prices: Prices = PrivateAttr()

    def deployed(self, sides: TakeoverSides, prices: Prices) -> DeployedChat:
        """Itself, with the server that is asked for sides."""
        self._sides, self._prices = sides, prices
        return self

    @property
    def sides(self) -> TakeoverSides:
        """Where the side of a call is asked for."""
        return self._sides

    def asked(self, original: BaseChatModel, messages: list[BaseMessage], arguments: Mapping[str, Any]) -> AskedCall:
        """A call of `original` as the server sees it. `arguments` as `to_openai` gives them."""
        payload = self._get_request_payload(messages, **{name: arguments[name] for name in arguments if name in _BODY})
        moved = cast(dict[str, Json], payload.pop("extra_body", {}))
        request: dict[str, Json] = {**payload, **moved}
        wanted = request.get("response_format")
        if isinstance(wanted, type):
            request["response_format"] = type_to_response_format_param(wanted)
        kept = {name: value for name, value in request.items() if name not in ("extra_headers", "stream", "metadata")}
        return AskedCall(
            self.route, self._thread(), kept, provider_model(original), self._prices.get(model_name(original) or "")
        )

    def _thread(self) -> str | None:
        return self.origin.thread if self.origin is not None else None

    def _get_request_payload(self, input_: Any, *, stop: list[str] | None = None, **kwargs: Any) -> dict[str, Any]:
        payload = super()._get_request_payload(input_, stop=stop, **kwargs)
        if (thread := self._thread()) is not None:
            payload["extra_body"] = {**(payload.get("extra_body") or {}), "metadata": {"thread_id": thread}}
        return payload


_BODY = frozenset(
    {"stop", "tools", "tool_choice", "response_format", "parallel_tool_calls", "max_tokens", "max_completion_tokens"}
)
"""Keyword arguments of a call that the server is asked with; others are LangChain's."""


def provider_model(original: BaseChatModel) -> str:
    """The app's own model as `provider/model`."""
    facts = original._get_ls_params()  # pyright: ignore[reportPrivateUsage]  # what LangChain traces of it
    provider = str(facts.get("ls_provider") or original._llm_type)  # pyright: ignore[reportPrivateUsage]
    return f"{PROVIDERS.get(provider, provider)}/{model_name(original) or facts.get('ls_model_name') or 'unknown'}"[
        :200
    ]


class PaidRuns(RunTree):
    """Callback handler that reports the answers of the app's own models."""

    def __init__(self, sides: TakeoverSides) -> None:
        super().__init__()
        self._sides = sides
        self._asked: dict[UUID, AskedCall] = {}

    def expect(self, run: UUID, call: AskedCall) -> None:
        """Report the answer of the run with this id."""
        self._asked[run] = call

    def on_llm_end(self, response: LLMResult, *, run_id: UUID, **kwargs: Any) -> None:
        call = self._asked.pop(run_id, None)
        if call is None:
            return
        messages = answers(response)
        try:
            output = output_of(0, messages[0])
            answer = answer_of(output.message, output.finish_reason or "stop", tokens_of(messages))
            report = call.answered(answer)
        except Exception as error:  # noqa: BLE001  # an unusual answer must not fail the app's call
            return self._sides.warn(f"an answer cannot be reported: {error_text(error)}")
        self._sides.reports.add(call.route, report)

    def on_llm_error(self, error: BaseException, *, run_id: UUID, **kwargs: Any) -> None:
        call = self._asked.pop(run_id, None)
        if call is not None and isinstance(error, Exception):  # else it was cancelled
            self._sides.reports.add(call.route, call.answered(None))


class DeployedCall:
    """One call by an entry point of `original`, whose stand-in is a DeployedChat. `messages`: None for several prompts."""

    def __init__(
        self,
        entry_point: Callable[..., Any],
        name: str,
        original: BaseChatModel,
        stand_in: DeployedChat,
        runs: RunTree,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        messages: list[BaseMessage] | None,
    ) -> None:
        self._entry_point = entry_point
        self._name = name
        self._original = original
        self._small = stand_in
        self._runs = runs
        self._args, self._kwargs = args, kwargs
        self._messages = messages

    def answer(self) -> Any:
        """What the entry point returns: a result, a coroutine, or an iterator."""
        methods = {
            "generate": self._generate,
            "agenerate": self._agenerate,
            "stream": self._stream,
            "astream": self._astream,
        }
        method = methods.get(self._name)
        if method is None or self._messages is None:
            self._small.sides.warn(f"{self._name} with several prompts, or by the events of version 3, has no side")
            return self._entry_point(self._original, *self._args, **self._kwargs)
        return method()

    def _call(self) -> tuple[AskedCall, dict[str, Any]] | None:
        """The call as the server sees it, and the arguments of the small model; None if that cannot take it."""
        assert self._messages is not None
        try:
            check_text(self._messages)
            arguments = to_openai(self._kwargs, type(self._original).__name__)
            return self._small.asked(self._original, self._messages, arguments), arguments
        except Exception as error:  # noqa: BLE001  # whatever fails here, the app's own model answers
            self._small.sides.warn(f"the small model cannot take a call: {type(error).__name__} {error}")
            return None

    def _by_small(self, side: SideAnswer, arguments: Mapping[str, Any]) -> Any:
        small = self._small.model_copy(update={"disable_streaming": True, "streaming": False})
        limit = {"timeout": side.seconds + LATE_SECONDS}
        return getattr(small, self._name)(*self._args, **{**arguments, **limit})

    def _failed(self, error: Exception) -> None:
        self._small.sides.warn(f"the small model failed: {type(error).__name__} {error}"[:500])

    def _by_original(self, call: AskedCall | None) -> Any:
        """The entry point of the app's own model; its answer is reported."""
        args, kwargs = self._args, self._kwargs
        if call is not None and isinstance(self._runs, PaidRuns):
            args, kwargs, run = _with_run(self._name, args, kwargs)
            self._runs.expect(run, call)
        return self._entry_point(self._original, *args, **kwargs)

    def _generate(self) -> Any:
        found = self._call()
        if found is not None and (side := self._small.sides.side(found[0])).small:
            try:
                return self._by_small(side, found[1])
            except Exception as error:  # noqa: BLE001  # whatever fails here, the app's own model answers
                self._failed(error)
        return self._by_original(found and found[0])

    async def _agenerate(self) -> Any:
        found = self._call()
        if found is not None and (side := await self._small.sides.side_async(found[0])).small:
            try:
                return await self._by_small(side, found[1])
            except Exception as error:  # noqa: BLE001  # as in `_generate`
                self._failed(error)
        return await self._by_original(found and found[0])

    def _stream(self) -> Iterator[Any]:
        found = self._call()
        if found is not None and (side := self._small.sides.side(found[0])).small:
            try:
                pieces = list(self._by_small(side, found[1]))
            except Exception as error:  # noqa: BLE001  # as in `_generate`
                self._failed(error)
            else:
                yield from pieces
                return
        yield from self._by_original(found and found[0])

    async def _astream(self) -> AsyncIterator[Any]:
        found = self._call()
        if found is not None and (side := await self._small.sides.side_async(found[0])).small:
            try:
                pieces = [piece async for piece in self._by_small(side, found[1])]
            except Exception as error:  # noqa: BLE001  # as in `_generate`
                self._failed(error)
            else:
                for piece in pieces:
                    yield piece
                return
        async for piece in self._by_original(found and found[0]):
            yield piece


def _with_run(name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any], UUID]:
    """The arguments of an entry point with the id of the run that it will be, the app's own if it has given one."""
    if name in ("generate", "agenerate"):
        run = kwargs.get("run_id") or uuid4()
        return args, {**kwargs, "run_id": run}, run
    config: dict[str, Any] = dict(kwargs.get("config", args[1] if len(args) > 1 else None) or {})
    run = config.get("run_id") or uuid4()
    return args[:1], {**kwargs, "config": {**config, "run_id": run}}, run
