"""How the answer to a call is written: as a chat completion, or in the API that the client speaks."""

from __future__ import annotations

from typing import Protocol

import orjson

from offbook.base.server_sent_events import EVENT_STREAM, event
from offbook.openai_dialect.chat_answer import DONE, Answer

from ..errors import ApiError


class Rendering(Protocol):
    """The answer to one request in the client's API, whole or as a stream. `call_id`: of the recorded call, else a new id."""

    @property
    def media_type(self) -> str:
        """The content type of a stream."""
        ...

    def whole(self, completion: Answer, call_id: str) -> Answer:
        """The complete answer."""
        ...

    def start(self, call_id: str) -> bytes:
        """The beginning of a stream. It may be empty."""
        ...

    def feed(self, chunk: Answer) -> bytes:
        """What a chunk of the chat completion adds to the stream. It may be empty."""
        ...

    def end(self) -> bytes:
        """The end of a stream, after the call is recorded."""
        ...

    def error(self, error: ApiError) -> bytes:
        """The end of a stream that failed."""
        ...

    def refusal(self, error: ApiError) -> Answer:
        """The body of a response that is an error."""
        ...


class ChatRendering:
    """Chat completions as they are."""

    media_type = f"{EVENT_STREAM}; charset=utf-8"

    def whole(self, completion: Answer, call_id: str) -> Answer:
        """The completion."""
        return completion

    def start(self, call_id: str) -> bytes:
        """Nothing."""
        return b""

    def feed(self, chunk: Answer) -> bytes:
        """The chunk as an event."""
        return event(orjson.dumps(chunk))

    def end(self) -> bytes:
        """The event [DONE]."""
        return DONE

    def error(self, error: ApiError) -> bytes:
        """The error as an event, then [DONE]."""
        return event(orjson.dumps(error.body())) + DONE

    def refusal(self, error: ApiError) -> Answer:
        """The error in OpenAI's format."""
        return error.body()
