"""Relays the chunks in the middle of a stream, which differ only in their delta, token ids and logprobs.

vLLM sends a chunk per token. Parsing each chunk whole, and encoding it again without the fields that the client did not
request, is most of what a streamed call costs. `ChunkRelay` learns the constant bytes around the variable ones from a chunk
that was read in full. From then on it parses the variable bytes only, and passes the delta on byte for byte:

    {"id":"x",...,"choices":[{"index":0,"delta":|{"content":" t"}|,"logprobs":...,"finish_reason":null,"token_ids":[5]}]}
    head                                        |delta           |tail

Every chunk that is not exactly of this form, and every value that would be an error, is left to the full reader.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import cast

import orjson

from offbook.base.server_sent_events import event
from offbook.base.types import Json
from offbook.openai_dialect.chat_answer import Answer

from ...engine.protocol import UNKNOWN_LOGPROB
from ..sampler.transport import LOGPROB_ABOVE
from .chat_answer import shown
from .chat_request import ChatRequest
from .sampled_answer import TOKEN_IDS, WRONG_SHAPE, Sampled, SampledChoice, json_object, not_understood

_AFTER_DELTA = b',"logprobs":'
_TAIL = re.compile(
    rb',"logprobs":(?:null|\{"content":\[\],"token_logprobs":(\[[-+.0-9eE,]+\])\}),"finish_reason":null'
    rb'(?:,"token_ids":(?:null|(\[[0-9,]+\])))?\}\]\}'
)
"""From the end of the delta to the end of the chunk; groups: logprobs, token ids."""
_MARK = "offbook-delta"
_MAX_FORMS = 4
"""Choices of one stream whose chunks are relayed; the chunks of others are read in full."""
_MAX_ATTEMPTS = 16
_MAX_NESTED = 32
"""Braces and brackets of a delta; a deeper one is left to the full reader."""


@dataclass(frozen=True)
class _Form:
    """The bytes around the deltas of one choice: of the sampler's chunks (`head`), and of the client's events."""

    head: bytes
    choice: SampledChoice
    shown_head: bytes
    shown_tail: bytes


class ChunkRelay:
    """The chunks of one stream, recorded in `sampled`."""

    def __init__(self, request: ChatRequest, sampled: Sampled) -> None:
        self._request = request
        self._sampled = sampled
        self._forms: list[_Form] = []
        # Token ids and logprobs that the client requested are in each of its chunks: nothing is constant then.
        self._attempts = 0 if request.wants_token_ids or request.wants_logprobs else _MAX_ATTEMPTS

    def event(self, raw: bytes) -> bytes | None:
        """Record a chunk of a known form, and return the client's event; None for any other chunk, which is not recorded.

        Raises WrongAnswer for a delta of another shape than vLLM's.
        """
        for form in self._forms:
            if raw.startswith(form.head):
                break
        else:
            return None
        start = len(form.head)
        end = raw.find(_AFTER_DELTA, start)
        if end < 0 or (tail := _TAIL.fullmatch(raw, end)) is None:
            return None
        text = raw[start:end]
        delta = _delta(text)
        if delta is None or not self._add_tokens(form.choice, tail[2], tail[1]):
            return None
        try:
            form.choice.add_delta(delta)
        except WRONG_SHAPE as error:
            raise not_understood(error, json_object(raw)) from error
        return form.shown_head + text + form.shown_tail

    def learn(self, raw: bytes, chunk: Answer) -> None:
        """Learn the form of a chunk that was read in full and recorded."""
        if not self._attempts:
            return
        self._attempts -= 1
        choices = cast(list[Answer], chunk.get("choices") or [])
        head, name, rest = raw.partition(b'"delta":')
        if len(choices) != 1 or not name or b"\r" in head:
            return
        head += name
        tail = rest[max(rest.find(_AFTER_DELTA), 0) :]
        if not _TAIL.fullmatch(tail):
            return
        marked = chunk | {"choices": [choices[0] | {"delta": _MARK}]}
        if _loads(head + orjson.dumps(_MARK) + tail) != marked:
            return  # the first "delta" is another one
        choice = self._sampled.choices[choices[0]["index"]]
        parts = event(orjson.dumps(shown(marked, self._request, None))).split(orjson.dumps(_MARK))
        if len(parts) != 2 or choice.finish_reason is not None:
            return
        self._forms.append(_Form(head, choice, *parts))
        if len(self._forms) == _MAX_FORMS:
            self._attempts = 0

    def _add_tokens(self, choice: SampledChoice, ids: bytes | None, logprobs: bytes | None) -> bool:
        if choice.finish_reason is not None or (ids is None) != (logprobs is None):
            return False
        if ids is None or logprobs is None:
            return True
        known_ids: list[int] | None = _loads(ids)
        known: list[float] | None = _loads(logprobs)
        tokens = self._sampled.limits.tokens
        if (
            not known_ids
            or not known
            or len(known) != len(known_ids)
            or max(known_ids) >= TOKEN_IDS
            or max(known) > LOGPROB_ABOVE
            or min(known) <= UNKNOWN_LOGPROB
            or (tokens is not None and len(choice.token_ids) + len(known_ids) > tokens)
        ):
            return False
        choice.ids_seen = True
        choice.token_ids += known_ids
        choice.logprobs += map(float, known)
        return True


def _delta(text: bytes) -> dict[str, Json] | None:
    """The object of a delta; None for what the full reader must judge. Line breaks would end the client's event."""
    if text.count(b"{") + text.count(b"[") > _MAX_NESTED or b"\r" in text:
        return None
    delta = _loads(text)
    return cast(dict[str, Json], delta) if type(delta) is dict else None


def _loads(text: bytes) -> Json:
    try:
        return orjson.loads(text)
    except orjson.JSONDecodeError:
        return None
