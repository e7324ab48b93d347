"""How a sampler is spoken to: one HTTP client for calls, one for questions, and the questions that every start asks."""

from __future__ import annotations

import asyncio
import io
import json
from dataclasses import dataclass
from pathlib import Path

import aiohttp
import httpx

from ...errors import EngineError
from ...types import Json
from .answer_limits import too_large

SERVED_NAME = "base"
"""The model name under which the gateway speaks of the base without an adapter."""
CALLS, QUESTIONS = 2048, 16
"""Connections; questions have their own, so that they never wait behind calls."""
BROKEN = (aiohttp.ClientError, httpx.TransportError)
"""What a connection that broke raises: of calls, of questions."""

_CHAT = "v1/chat/completions"
_IDLE_SECONDS = 3.0
"""An idle connection is dropped here before the other side does so: uvicorn and vLLM wait five seconds."""
_CONNECT_SECONDS = 10.0
_QUESTION_SECONDS = 600.0
"""Loading a large adapter from a slow disk takes minutes, and so does a first call."""
_WATCH_SECONDS = 1.0


@dataclass(frozen=True)
class Reply:
    """A whole answer of the sampler, whatever its status."""

    status: int
    content: bytes


class CallClient:
    """The client of calls, without time limit for answers, through a Unix socket where one is given.

    It is aiohttp, which parses in C and computes much less for a call than httpx does. But it leaves whoever
    reads a body waiting for ever when the connection is closed on this side, be it for an answer that is not HTTP: such
    bodies are failed here.
    """

    def __init__(self, url: str, *, socket: Path | None = None, key: str | None = None) -> None:
        connector = (
            aiohttp.TCPConnector(limit=CALLS, keepalive_timeout=_IDLE_SECONDS)
            if socket is None
            else aiohttp.UnixConnector(str(socket), limit=CALLS, keepalive_timeout=_IDLE_SECONDS)
        )
        self._session = aiohttp.ClientSession(
            url + "/",
            connector=connector,
            timeout=aiohttp.ClientTimeout(total=None, sock_connect=_CONNECT_SECONDS),
            headers={"content-type": "application/json", "accept-encoding": "identity"} | _authorization(key),
            auto_decompress=False,  # a small answer could become a huge one
            cookie_jar=aiohttp.DummyCookieJar(),
        )
        self._open: set[aiohttp.ClientResponse] = set()
        self._watch = asyncio.create_task(self._fail_cut_off(), name="sampler-connections")

    @property
    def closed(self) -> bool:
        return self._session.closed

    async def open(self, body: bytes) -> aiohttp.ClientResponse:
        """A chat completion, whole or streamed, at its first bytes; to be given back to `done`. Raises
        aiohttp.ClientError, and EngineError for a redirect."""
        # Plain bytes would be written in one piece, of which aiohttp warns where they are many.
        response = await self._session.post(_CHAT, data=io.BytesIO(body), allow_redirects=False)
        if 300 <= response.status < 400:
            place = response.headers.get("location")
            response.close()
            raise EngineError(f"the sampler answered with status {response.status}, a redirect to {place!r}")
        if (encoding := response.headers.get("content-encoding", "identity")) != "identity":
            response.close()
            raise EngineError(f"the sampler answered in the encoding {encoding!r}, which it was not asked for")
        self._open.add(response)
        return response

    def done(self, response: aiohttp.ClientResponse) -> None:
        """Its connection is used again if it was read to its end, else closed, which cancels the call in the engine."""
        self._open.discard(response)
        response.close()

    async def close(self) -> None:
        """Fails what is being read."""
        self._watch.cancel()
        await self._session.close()
        self._fail()

    async def _fail_cut_off(self) -> None:
        while True:
            await asyncio.sleep(_WATCH_SECONDS)
            self._fail()

    def _fail(self) -> None:
        for response in self._open:
            transport = response.connection.transport if response.connection is not None else None
            unfinished = not response.content.is_eof() and response.content.exception() is None
            if unfinished and (transport is None or transport.is_closing()):
                response.content.set_exception(aiohttp.ClientPayloadError("it ended within an answer"))


async def read(response: aiohttp.ClientResponse, limit: int) -> bytes:
    """A whole body. Raises WrongAnswer for one of more than `limit` bytes, aiohttp.ClientError."""
    if (response.content_length or 0) > limit:
        raise too_large(limit)
    pieces: list[bytes] = []
    size = 0
    async for piece in response.content.iter_any():
        size += len(piece)
        if size > limit:
            raise too_large(limit)
        pieces.append(piece)
    return b"".join(pieces)


class SamplerConnection:
    """Both clients of one sampler: calls, and `control` for everything else."""

    def __init__(self, url: str, *, socket: Path | None = None, key: str | None = None) -> None:
        self.calls = CallClient(url, socket=socket, key=key)
        self.control = _control_client(url, socket=socket, key=key)

    @property
    def closed(self) -> bool:
        return self.calls.closed

    async def close(self) -> None:
        """Fails what is being read."""
        await self.calls.close()
        await self.control.aclose()


def _control_client(url: str, *, socket: Path | None, key: str | None) -> httpx.AsyncClient:
    """The client of health, adapters and sleep."""
    limits = httpx.Limits(max_connections=QUESTIONS, keepalive_expiry=_IDLE_SECONDS)
    uds = None if socket is None else str(socket)
    return httpx.AsyncClient(
        base_url=url,
        transport=httpx.AsyncHTTPTransport(uds=uds, limits=limits, trust_env=False),
        timeout=httpx.Timeout(connect=_CONNECT_SECONDS, read=_QUESTION_SECONDS, write=60.0, pool=None),
        headers=_authorization(key),
        trust_env=False,
    )


async def checked(client: httpx.AsyncClient, model: str) -> None:
    """Sample one token, the likeliest. Raises EngineError when ids are missing, or logprobs are not those of the
    distribution that was sampled from (where only one token is left, its logprob is 0)."""
    asked = {"model": model, "messages": [{"role": "user", "content": "Hello"}], "max_tokens": 1, "top_k": 1}
    asked |= {"temperature": 1.0, "logprobs": True, "return_token_ids": True}
    response = await client.post("/" + _CHAT, json=asked)
    if response.is_error:
        raise EngineError(f"it refused a plain call: {reason_of(response)}")
    try:
        answer: dict[str, Json] = response.json()
        choice = answer["choices"][0]
        with_ids = answer.get("prompt_token_ids") and choice.get("token_ids")
        logprob = float(choice["logprobs"]["content"][0]["logprob"])
    except (ValueError, LookupError, TypeError, AttributeError) as error:
        shape = f"{type(error).__name__}: {error}"
        raise EngineError(f"its answer is not of vLLM's dialect ({shape}): {response.text[:500]}") from error
    if not with_ids:
        raise EngineError("its answers have no token ids: it must be vLLM 0.10.2 or newer")
    if abs(logprob) > 1e-3:
        raise EngineError(
            f"its logprobs are those of raw logits ({logprob:.3f} for the only token that top_k=1 allows): start vLLM with "
            "--logprobs-mode processed_logprobs"
        )


async def healthy(client: httpx.AsyncClient) -> bool:
    """Whether it answers its health check within ten seconds."""
    try:
        return (await client.get("/health", timeout=10.0)).status_code == 200
    except httpx.HTTPError:
        return False


def broken(error: Exception) -> str:
    """What broke a connection, in words."""
    if isinstance(error, aiohttp.ClientPayloadError):
        return "it ended within an answer"
    return f"{type(error).__name__}: {error}" if str(error) else type(error).__name__


def reason_of(response: httpx.Response) -> str:
    """What an error answer says, in OpenAI's shape or not."""
    try:
        return str(json.loads(response.text)["error"]["message"])
    except (ValueError, KeyError, TypeError):
        return f"status {response.status_code}: {response.text[:500]}"


def _authorization(key: str | None) -> dict[str, str]:
    return {} if key is None else {"authorization": f"Bearer {key}"}
