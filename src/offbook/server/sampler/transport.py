"""HTTP connections to a sampler: one client for calls, one for control requests, the check of every start, how large an answer
may be, and how an engine deviates from OpenAI's API."""

from __future__ import annotations

import asyncio
import io
import json
from dataclasses import dataclass
from pathlib import Path

import aiohttp
import httpx

from offbook.base import redaction
from offbook.base.errors import EngineError
from offbook.base.types import Json

from ...engine.protocol import FLAT_LOGPROBS

MAX_ANSWER = 256 * 2**20
"""Bytes of an answer at most, whatever the request."""
MAX_TOOL_CALLS = 1024
"""Tool calls of one choice at most."""
MAX_FINISH_REASON = 64
"""Characters: the width of the database column."""
LOGPROB_ABOVE = 1e-3
"""Tolerance: rounding can raise a logprob of 0 by this much."""
_MAX_TOKENS = 2**17
"""Assumed length of a choice if the request has no max_tokens."""
_HEAD_BYTES = 4 * 2**20
"""Allowance for everything but the prompt and the tokens."""
_TOKEN_BYTES = 1024
"""A streamed token is an event of some 300 bytes."""
_PROMPT_BYTES = 16
"""The sampler repeats the prompt as token ids: up to one per byte of the request, and 8 bytes of JSON per id."""


@dataclass(frozen=True)
class Quirks:
    """Deviations that the gateway compensates for. The defaults describe an engine without any."""

    grammar_for_strict_tools: bool = False
    """vLLM decodes under a grammar even with tool_choice "auto" if a tool is strict or parallel_tool_calls is false."""
    no_seed: bool = False
    """vLLM on a CPU crashes if many calls have a seed, so seeds are not sent to it."""
    stream_blocks: bool = False
    """vLLM streams several tokens in a chunk if asked (`stream_interval`), and the base's answers need no reasoning parser."""
    flat_logprobs: bool = False
    """vLLM returns logprobs as a flat list with our plugin; without it, it ignores the request field."""
    thinking_budgets: bool = False
    """vLLM ends a thought after `thinking_token_budget` tokens."""
    template: frozenset[str] | None = None
    """The words of the base's chat templates, among them their variables; None: they are not known."""


class WrongAnswer(EngineError):
    """The sampler's answer contradicts its request. The message names the field."""


@dataclass(frozen=True)
class AnswerLimits:
    """The largest answer to one request. It protects the server from a faulty sampler.

    `tokens` limits each choice (None: no limit but the context), `bytes` the whole answer. `recorded`: the call is
    stored, so its answer must have token ids.
    """

    choices: int = 1
    tokens: int | None = None
    bytes: int = MAX_ANSWER
    recorded: bool = True

    @classmethod
    def of(
        cls, *, choices: int, tokens: int | None, top_logprobs: int, request_bytes: int, recorded: bool
    ) -> AnswerLimits:
        """The limits of a request, whose JSON body has `request_bytes` bytes.

        A request of 1,000 bytes for two choices of 10 tokens, with one alternative per token:

        >>> AnswerLimits.of(choices=2, tokens=10, top_logprobs=1, request_bytes=1_000, recorded=True).bytes
        4251264

        These are 4 MiB, 16 bytes for each byte of the request, and 1,024 bytes for each of 2 x 10 x (1 + 1) logprobs.
        """
        choice_bytes = min(tokens or _MAX_TOKENS, MAX_ANSWER) * _TOKEN_BYTES * (1 + top_logprobs)
        size = _HEAD_BYTES + request_bytes * _PROMPT_BYTES + choices * choice_bytes
        return cls(choices, tokens, min(size, MAX_ANSWER), recorded)

    def check_index(self, index: object) -> int:
        """Return the index of a choice. Raises WrongAnswer if the request has no such choice."""
        if type(index) is not int or not 0 <= index < self.choices:
            raise WrongAnswer(
                f"the sampler sent a choice with the index {str(index)[:40]} although n is {self.choices}"
            )
        return index

    def check_length(self, index: int, count: int) -> None:
        """Raise WrongAnswer if choice `index` has more tokens (`count` so far) than requested."""
        if self.tokens is not None and count > self.tokens:
            raise WrongAnswer(
                f"the sampler sent choice {index} with {count} tokens although max_tokens is {self.tokens}"
            )


def too_large(limit: int) -> WrongAnswer:
    """The error for an answer of more than `limit` bytes."""
    return WrongAnswer(f"the sampler's answer is larger than the {limit} bytes that its request allows")


SERVED_NAME = "base"
"""The model name of the base without an adapter."""
CALLS, CONTROLS = 2048, 16
"""Connections at most. Control requests have their own, so that they never wait for calls."""
BROKEN = (aiohttp.ClientError, httpx.TransportError)
"""Exceptions of a broken connection: of the client for calls, of the client for control requests."""

CHAT, COMPLETION = "v1/chat/completions", "v1/completions"
"""Where calls are sent: messages, and a prompt."""
_IDLE_SECONDS = 3.0
"""Idle connections are closed on this side first: uvicorn and vLLM close them after five seconds."""
_CONNECT_SECONDS = 10.0
_CONTROL_SECONDS = 600.0
"""Limit for a control request. Loading a large adapter from a slow disk takes minutes, and so can the first call."""
_WATCH_SECONDS = 1.0
"""Interval of the search for responses whose connection was closed."""
_CUT_OFF = "it closed in the middle of an answer"


@dataclass(frozen=True)
class Reply:
    """A complete response of the sampler, whatever its HTTP status."""

    status: int
    content: bytes


class CallClient:
    """The client for calls. Answers have no time limit.

    It uses aiohttp, which parses in C and takes much less processor time per call than httpx. If aiohttp closes a
    connection itself, for instance because the response is not HTTP, a reader of the body would wait for ever. A task
    here finds such responses and makes their readers fail.
    """

    def __init__(self, url: str, *, socket: Path | None = None, key: str | None = None) -> None:
        """`socket`: the Unix socket to connect to, instead of the host in `url`. `key`: sent as a bearer token."""
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
            auto_decompress=False,  # a small compressed answer could become a huge one
            cookie_jar=aiohttp.DummyCookieJar(),
        )
        self._open: set[aiohttp.ClientResponse] = set()
        self._watch = asyncio.create_task(self._fail_repeatedly(), name="sampler-connections")

    @property
    def closed(self) -> bool:
        """Whether `close` was called."""
        return self._session.closed

    async def open(self, body: bytes, path: str = CHAT) -> aiohttp.ClientResponse:
        """Send a call to `path`: CHAT or COMPLETION. Returns the response at its first bytes; pass it to `done` afterwards.

        Raises aiohttp.ClientError, and EngineError for a redirect or a compressed answer.
        """
        # BytesIO is written in pieces. aiohttp warns of large bodies of plain bytes.
        response = await self._session.post(path, data=io.BytesIO(body), allow_redirects=False)
        if 300 <= response.status < 400:
            location = response.headers.get("location")
            response.close()
            raise EngineError(f"the sampler answered with status {response.status}, a redirect to {location!r}")
        if (encoding := response.headers.get("content-encoding", "identity")) != "identity":
            response.close()
            raise EngineError(
                f"the sampler answered with the content encoding {encoding!r} although the request allows identity only"
            )
        self._open.add(response)
        return response

    def done(self, response: aiohttp.ClientResponse) -> None:
        """Release a response. Its connection is reused if the body was read to its end.

        Otherwise it is closed, which cancels the call in the engine.
        """
        self._open.discard(response)
        response.close()

    async def close(self) -> None:
        """Close all connections. Readers of open responses get aiohttp.ClientPayloadError."""
        self._watch.cancel()
        await self._session.close()
        self._fail()

    async def _fail_repeatedly(self) -> None:
        while True:
            await asyncio.sleep(_WATCH_SECONDS)
            self._fail()

    def _fail(self) -> None:
        """Make the readers of responses fail whose connection is closed."""
        for response in self._open:
            transport = response.connection.transport if response.connection is not None else None
            unfinished = not response.content.is_eof() and response.content.exception() is None
            if unfinished and (transport is None or transport.is_closing()):
                response.content.set_exception(aiohttp.ClientPayloadError(_CUT_OFF))


async def read(response: aiohttp.ClientResponse, limit: int) -> bytes:
    """Read a whole body. Raises WrongAnswer for more than `limit` bytes, and aiohttp.ClientError."""
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
    """Both clients of one sampler: `calls` for chat completions, `control` for health, adapters, sleep and metrics."""

    def __init__(self, url: str, *, socket: Path | None = None, key: str | None = None) -> None:
        """See `CallClient`. Needs a running event loop."""
        self.calls = CallClient(url, socket=socket, key=key)
        self.control = _control_client(url, socket=socket, key=key)

    @property
    def closed(self) -> bool:
        """Whether `close` was called."""
        return self.calls.closed

    async def close(self) -> None:
        """Close both clients. Readers of open responses get an error."""
        await self.calls.close()
        await self.control.aclose()


def _control_client(url: str, *, socket: Path | None, key: str | None) -> httpx.AsyncClient:
    limits = httpx.Limits(max_connections=CONTROLS, keepalive_expiry=_IDLE_SECONDS)
    uds = None if socket is None else str(socket)
    return httpx.AsyncClient(
        base_url=url,
        transport=httpx.AsyncHTTPTransport(uds=uds, limits=limits, trust_env=False),
        timeout=httpx.Timeout(connect=_CONNECT_SECONDS, read=_CONTROL_SECONDS, write=60.0, pool=None),
        headers=_authorization(key),
        trust_env=False,
    )


async def check_sampling(client: httpx.AsyncClient, model: str, *, vllm: bool = False) -> bool:
    """Sample one token with top_k=1 to check what the engine returns. With `vllm`, returns whether it runs our plugin, which
    writes logprobs as a flat list.

    Raises EngineError if token ids are missing, or if logprobs are not those of the distribution after top-k: its only
    token has logprob 0 there.
    """
    request = {"model": model, "messages": [{"role": "user", "content": "Hello"}], "max_tokens": 1, "top_k": 1}
    request |= {"temperature": 1.0, "logprobs": True, "return_token_ids": True}
    request |= {"vllm_xargs": {FLAT_LOGPROBS: 1}} if vllm else {}
    response = await client.post("/" + CHAT, json=request)
    if response.is_error:
        raise EngineError(f"it rejected a plain chat completion: {reason_of(response)}")
    try:
        answer: dict[str, Json] = response.json()
        choice = answer["choices"][0]
        with_ids = answer.get("prompt_token_ids") and choice.get("token_ids")
        flat = "token_logprobs" in choice["logprobs"]
        logprob = float(
            choice["logprobs"]["token_logprobs"][0] if flat else choice["logprobs"]["content"][0]["logprob"]
        )
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
    return flat


async def healthy(client: httpx.AsyncClient) -> bool:
    """Whether the sampler answers its health check with status 200 within ten seconds."""
    try:
        return (await client.get("/health", timeout=10.0)).status_code == 200
    except httpx.HTTPError:
        return False


def error_text(error: Exception) -> str:
    """Why a connection broke, for a message."""
    if isinstance(error, aiohttp.ClientPayloadError):
        return _CUT_OFF
    return redaction.error_text(error)


def reason_of(response: httpx.Response) -> str:
    """The message of an error response: `error.message` as in OpenAI's API, else the status and the body.

    >>> reason_of(httpx.Response(400, text='{"error": {"message": "no such adapter"}}'))
    'no such adapter'
    >>> reason_of(httpx.Response(502, text="Bad Gateway"))
    'status 502: Bad Gateway'
    """
    try:
        return str(json.loads(response.text)["error"]["message"])
    except (ValueError, KeyError, TypeError):
        return f"status {response.status_code}: {response.text[:500]}"


def _authorization(key: str | None) -> dict[str, str]:
    return {} if key is None else {"authorization": f"Bearer {key}"}
