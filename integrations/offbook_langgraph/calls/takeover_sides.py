"""The sides of a deployed app's calls: the server is asked who answers, and told what the app's own models answered.

Nothing here can fail or hold up a call for long: while the server is down or late, the app's own models answer.
"""

from __future__ import annotations

import atexit
import logging
import os
import queue
import threading
import time
import weakref
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import httpx

from offbook.base import clock
from offbook.base.app_calls import CALLS_AT_ONCE, AppCall, AppCalls, SideAnswer, SideRequest
from offbook.base.redaction import error_text
from offbook.base.takeovers import TakeoverPlan
from offbook.base.types import Json
from offbook.client.connection.http import LoopTransport
from offbook.llms.prices import UsedTokens

logger = logging.getLogger("offbook")

ASK_SECONDS = 1.0
"""How long a call waits to be told its side, before the app's own model answers."""
PAUSE_SECONDS = 5.0
"""How long the server is not asked after it did not answer."""
REPORT_SECONDS = 10.0
WAITING_REPORTS = 2_000
"""Calls that wait to be reported. Beyond that they are counted, and not reported."""
END_SECONDS = 2.0
"""How long the end of the process waits for reports."""
PAID = SideAnswer(small=False, seconds=0.0)


@dataclass(frozen=True)
class AskedCall:
    """A call of a deployed app: its route, its thread, and what the small model would get. `model`, `prices`: of the app's own
    model, see `AppCall`."""

    route: str
    thread: str | None
    request: dict[str, Json]
    model: str
    prices: tuple[float, float] | None
    started_at: float = field(default_factory=clock.now)

    def answered(self, answer: dict[str, Json] | None) -> AppCall:
        """The report on it: now the app's own model has answered, or failed with `answer=None`."""
        return AppCall(
            request=self.request,
            answer=answer,
            model=self.model,
            started_at=self.started_at,
            ended_at=clock.end_of(self.started_at),
            thread_id=self.thread,
            prices=self.prices,
        )


class TakeoverSides:
    """Asks the server at `url` for the side of calls, and reports calls of the app's own models. Usable from any thread and event
    loop. `plans`: of the takeover that begins on a route that has had none, by route."""

    def __init__(self, url: str, api_key: str | None, plans: Mapping[str, TakeoverPlan]) -> None:
        self.url = url
        self._headers = {"authorization": f"Bearer {api_key}"} if api_key else {}
        self._plans = dict(plans)
        self._http = httpx.Client(base_url=url, headers=self._headers, timeout=ASK_SECONDS, trust_env=False)
        weakref.finalize(self, self._http.close).atexit = False
        self._async_http = httpx.AsyncClient(
            base_url=url,
            headers=self._headers,
            timeout=ASK_SECONDS,
            transport=LoopTransport(secure=url.startswith("https")),
        )
        self._asks_again_at = 0.0
        self._told: set[str] = set()
        self.reports = Reports(url, self._headers)

    def side(self, call: AskedCall) -> SideAnswer:
        """Who answers. Never raises."""
        if time.monotonic() < self._asks_again_at:
            return PAID
        try:
            return self._read(call, self._http.post(_path(call, "side"), content=self._question(call), headers=_JSON))
        except Exception as error:  # noqa: BLE001  # whatever fails here, the app's own model answers
            return self._failed(error)

    async def side_async(self, call: AskedCall) -> SideAnswer:
        """As `side`, from an event loop."""
        if time.monotonic() < self._asks_again_at:
            return PAID
        try:
            question = self._question(call)
            answer = await self._async_http.post(_path(call, "side"), content=question, headers=_JSON)
            return self._read(call, answer)
        except Exception as error:  # noqa: BLE001  # as in `side`
            return self._failed(error)

    def _question(self, call: AskedCall) -> bytes:
        request = SideRequest(request=call.request, thread_id=call.thread, plan=self._plans.get(call.route))
        return request.model_dump_json().encode()

    def _read(self, call: AskedCall, answer: httpx.Response) -> SideAnswer:
        if not answer.is_success:
            self.warn(f"the server answered {answer.status_code}: {answer.text[:500]}")
            return PAID
        side = SideAnswer.model_validate_json(answer.content)
        self._plans.pop(call.route, None)  # its takeover has begun
        self._told.clear()
        return side

    def _failed(self, error: Exception) -> SideAnswer:
        if isinstance(error, httpx.HTTPError):
            self._asks_again_at = time.monotonic() + PAUSE_SECONDS
        self.warn(f"the server at {self.url} cannot be asked for a call's side: {type(error).__name__} {error}".strip())
        return PAID

    def warn(self, what: str) -> None:
        """Log why the app's own model answers, the first of equal reasons until the server answers again."""
        if what not in self._told:
            self._told.add(what)
            logger.warning("deployed app: its own model answers: %s", what)


_JSON = {"content-type": "application/json"}


def _path(call: AskedCall, what: str) -> str:
    return f"/api/routes/{call.route}/{what}"


class Reports:
    """Sends reports of calls to a server, in a thread of its own. What cannot be sent is counted and logged, and not sent again."""

    def __init__(self, url: str, headers: Mapping[str, str]) -> None:
        self._url = url
        self._headers = headers
        self._lock = threading.Lock()
        self._process = 0
        self._queue: queue.Queue[tuple[str, AppCall]] = queue.Queue()
        self.lost = 0
        self._warned = False

    def add(self, route: str, call: AppCall) -> None:
        """Queue a report. Returns at once, and never raises."""
        with self._lock:
            if self._process != os.getpid():  # at the first report, also of a forked process
                self._process = os.getpid()
                self._queue = queue.Queue(WAITING_REPORTS)
                threading.Thread(target=self._send_all, name="offbook-reports", daemon=True).start()
                atexit.register(self.flush, END_SECONDS)
        try:
            self._queue.put_nowait((route, call))
        except queue.Full:
            self._lose(1, "too many wait")

    def flush(self, seconds: float) -> bool:
        """Wait until all reports are sent or lost, for so many seconds at most; returns whether they are."""
        ends = time.monotonic() + seconds
        while self._queue.unfinished_tasks and time.monotonic() < ends:
            time.sleep(0.01)
        return not self._queue.unfinished_tasks

    def _send_all(self) -> None:
        waiting = self._queue
        with httpx.Client(base_url=self._url, headers=self._headers, timeout=REPORT_SECONDS, trust_env=False) as http:
            while True:
                batch = [waiting.get()]
                while len(batch) < CALLS_AT_ONCE and not waiting.empty():
                    batch.append(waiting.get())
                for route in dict.fromkeys(route for route, _ in batch):
                    self._send(http, route, [call for each, call in batch if each == route])
                for _ in batch:
                    waiting.task_done()

    def _send(self, http: httpx.Client, route: str, calls: Sequence[AppCall]) -> None:
        one_of_them = False
        try:
            body = AppCalls(calls=tuple(calls)).model_dump_json()
            answer = http.post(f"/api/routes/{route}/calls", content=body, headers=_JSON)
            why = None if answer.is_success else f"the server answered {answer.status_code}: {answer.text[:300]}"
            one_of_them = answer.is_client_error  # or their size
        except httpx.HTTPError as error:
            why = error_text(error)
        except ValueError as error:  # JSON cannot hold it
            why, one_of_them = error_text(error), True
        if why is None:
            self._warned = False
        elif one_of_them and len(calls) > 1:
            for call in calls:
                self._send(http, route, [call])
        else:
            self._lose(len(calls), why)

    def _lose(self, number: int, why: str) -> None:
        self.lost += number
        if not self._warned:
            self._warned = True
            logger.warning("deployed app: calls of its own model are not reported, %d so far: %s", self.lost, why)


def answer_of(message: Mapping[str, Any], finish_reason: str, used: UsedTokens | None) -> dict[str, Json]:
    """A chat completion as the server reads it. `used=None`: the provider did not say."""
    usage = used and {
        "prompt_tokens": used.prompt,
        "completion_tokens": used.completion,
        "prompt_tokens_details": {"cached_tokens": used.cached, "cache_write_tokens": used.written},
        "cache_creation": {"ephemeral_1h_input_tokens": used.written_1h},
    }
    choice = {"index": 0, "message": {"role": "assistant", **message}, "finish_reason": finish_reason}
    return {"choices": [choice], "usage": usage}
