"""A call of an app in service: a model of a server answers if it is chosen, and the app's own otherwise, and whenever that fails."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Iterator
from typing import Any, NamedTuple, Protocol

from langchain_core.language_models import BaseChatModel
from langchain_core.messages import BaseMessage
from pydantic import PrivateAttr

from offbook_langgraph.chat_model import ChatOffbook

from .provider_formats import check_text, to_openai

LATE_SECONDS = 1.0
"""How long after the server's own limit an answer of the chosen model may still come."""


class ChosenModel(NamedTuple):
    """The server's model that answers a call, and within how many seconds."""

    model: str
    seconds: float


class Chooser(Protocol):
    """Chooses who answers the calls that one trained model would take. Used from any thread and event loop; raises nothing."""

    def choose(self, thread: str | None) -> ChosenModel | None:
        """Who answers a call of this thread of the app; None: the app's own model."""
        ...

    async def choose_async(self, thread: str | None) -> ChosenModel | None:
        """As `choose`, from an event loop."""
        ...

    def failed(self, error: Exception) -> None:
        """The chosen model failed, and the app's own answers."""
        ...

    def unfit(self, reason: str) -> None:
        """No model of a server can take a call, and the app's own answers."""
        ...


class FallbackChat(ChatOffbook):
    """The models of a server among which `chooser` chooses."""

    _chooser: Chooser = PrivateAttr()

    def chosen_by(self, chooser: Chooser) -> FallbackChat:
        """Itself, with its chooser."""
        self._chooser = chooser
        return self

    @property
    def chooser(self) -> Chooser:
        """Who chooses."""
        return self._chooser


class FallbackCall:
    """One call by an entry point of `original`, whose stand-in is a FallbackChat. `messages`: None for several prompts."""

    def __init__(
        self,
        entry_point: Callable[..., Any],
        name: str,
        original: BaseChatModel,
        stand_in: FallbackChat,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        messages: list[BaseMessage] | None,
    ) -> None:
        self._entry_point = entry_point
        self._name = name
        self._original = original
        self._stand_in = stand_in
        self._args, self._kwargs = args, kwargs
        self._messages = messages

    def answer(self) -> Any:
        """What the entry point returns: a result, a coroutine, or an iterator."""
        arguments = self._arguments()
        if arguments is None:
            return self._by_original()
        if self._name == "stream":
            return self._stream(arguments)
        if self._name == "astream":
            return self._astream(arguments)
        return self._agenerate(arguments) if self._name == "agenerate" else self._generate(arguments)

    def _arguments(self) -> dict[str, Any] | None:
        """The keyword arguments of the chosen model; None if no model of a server can take the call."""
        chooser = self._stand_in.chooser
        if self._messages is None or self._name not in ("generate", "agenerate", "stream", "astream"):
            chooser.unfit(f"{self._name} with several prompts, or by the events of version 3")
            return None
        try:
            check_text(self._messages)
            return to_openai(self._kwargs, type(self._original).__name__)
        except Exception as error:  # noqa: BLE001  # whatever fails here, the app's own model answers
            chooser.unfit(f"{type(error).__name__} {error}")
            return None

    @property
    def _thread(self) -> str | None:
        return self._stand_in.origin.thread if self._stand_in.origin is not None else None

    def _by_choice(self, choice: ChosenModel, arguments: dict[str, Any]) -> Any:
        fields = {"model_name": choice.model, "disable_streaming": True, "streaming": False}
        model = self._stand_in.model_copy(update=fields)
        return getattr(model, self._name)(*self._args, **arguments, timeout=choice.seconds + LATE_SECONDS)

    def _by_original(self) -> Any:
        return self._entry_point(self._original, *self._args, **self._kwargs)

    def _generate(self, arguments: dict[str, Any]) -> Any:
        if (choice := self._stand_in.chooser.choose(self._thread)) is not None:
            try:
                return self._by_choice(choice, arguments)
            except Exception as error:  # noqa: BLE001  # whatever fails here, the app's own model answers
                self._stand_in.chooser.failed(error)
        return self._by_original()

    async def _agenerate(self, arguments: dict[str, Any]) -> Any:
        if (choice := await self._stand_in.chooser.choose_async(self._thread)) is not None:
            try:
                return await self._by_choice(choice, arguments)
            except Exception as error:  # noqa: BLE001  # as in `_generate`
                self._stand_in.chooser.failed(error)
        return await self._by_original()

    def _stream(self, arguments: dict[str, Any]) -> Iterator[Any]:
        pieces: list[Any] = []
        if (choice := self._stand_in.chooser.choose(self._thread)) is not None:
            try:
                pieces = list(self._by_choice(choice, arguments))
            except Exception as error:  # noqa: BLE001  # as in `_generate`
                self._stand_in.chooser.failed(error)
        yield from pieces or self._by_original()

    async def _astream(self, arguments: dict[str, Any]) -> AsyncIterator[Any]:
        pieces: list[Any] = []
        if (choice := await self._stand_in.chooser.choose_async(self._thread)) is not None:
            try:
                pieces = [piece async for piece in self._by_choice(choice, arguments)]
            except Exception as error:  # noqa: BLE001  # as in `_generate`
                self._stand_in.chooser.failed(error)
        for piece in pieces:
            yield piece
        if not pieces:
            async for piece in self._by_original():
                yield piece
