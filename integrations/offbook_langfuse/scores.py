"""Scores by REST under fixed ids: the reward, every metric, and what the judge explained. The same id overwrites."""

from __future__ import annotations

import math
import weakref
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Final, cast

import httpx

from offbook.base.redaction import error_text
from offbook.base.types import Json
from offbook.base.wire import RolloutTrace
from offbook.contracts import DeliveryError, RejectedError, digest
from offbook.tracing.spans import trace_id

from .connection import LangfuseConnection

BULK: Final = 200
"""Scores of one request."""
EXPLANATION: Final = "RULER explanation: "


@dataclass(frozen=True)
class LangfuseScore:
    """A number on a trace or a session. Langfuse overwrites the score that has the same id and day, so `at` (Unix seconds)
    must be the same when the score is sent again."""

    id: str
    name: str
    value: float
    at: float
    comment: str | None = None
    trace: str | None = None
    session: str | None = None
    environment: str = "default"
    metadata: Mapping[str, Json] = field(default_factory=dict[str, Json])

    @property
    def timestamp(self) -> str:
        """`at` in ISO 8601."""
        return datetime.fromtimestamp(self.at, UTC).isoformat().replace("+00:00", "Z")

    def body(self) -> dict[str, Json]:
        """As the API takes it."""
        target = {"traceId": self.trace} if self.trace is not None else {"sessionId": self.session}
        body: dict[str, Json] = {
            "id": self.id,
            **target,
            "name": self.name,
            "value": self.value,
            "timestamp": self.timestamp,
            "dataType": "NUMERIC",
            "environment": self.environment,
            "metadata": dict(self.metadata),
        }
        return body | ({"comment": self.comment} if self.comment else {})


def rollout_scores(rollout: RolloutTrace, environment: str, mask: Callable[[Json], Json]) -> list[LangfuseScore]:
    """The scores of one rollout. The judge's explanation is the comment of the reward and of its own score."""
    record, trace = rollout.record, f"{trace_id(rollout):032x}"
    told = [line.removeprefix(EXPLANATION) for line in record.logs if line.startswith(EXPLANATION)]
    comment = str(mask(told[-1])) if told else None
    values = ({"reward": record.reward} if record.reward is not None else {}) | record.metrics
    explained = {"reward", "ruler_score"}
    return [
        LangfuseScore(
            digest(record.id, name), name, float(value), record.ended_at, comment if name in explained else None, trace,
            environment=environment,
        )
        for name, value in values.items()
    ]  # fmt: skip


class ScoreSender:
    """Sends scores in bulk; those that the bulk refuses one by one."""

    def __init__(self, connection: LangfuseConnection, timeout: float) -> None:
        self._connection = connection
        self._timeout = timeout
        self._http: httpx.Client | None = None

    def close(self) -> None:
        """Close its connection; the next scores open another."""
        http, self._http = self._http, None
        if http is not None:
            http.close()

    def send(self, scores: Sequence[LangfuseScore]) -> None:
        """Raises RejectedError naming the first that was refused, DeliveryError if the server accepts nothing. Values that
        are no finite number are left out: the API refuses them."""
        finite = [score for score in scores if math.isfinite(score.value)]
        refused: list[str] = []
        if self._http is None:
            self._http = self._connection.client(self._timeout)
            weakref.finalize(self, self._http.close).atexit = False  # a thread may still send at the interpreter's end
        for start in range(0, len(finite), BULK):
            refused += self._bulk(self._http, finite[start : start + BULK])
        if refused:
            raise RejectedError(f"{len(refused)} of {len(finite)} scores were refused, such as {refused[0]}")

    def _bulk(self, http: httpx.Client, scores: Sequence[LangfuseScore]) -> list[str]:
        batch: Json = [
            {"id": each.id, "timestamp": each.timestamp, "type": "score-create", "body": each.body()} for each in scores
        ]
        answer = _posted(http, "/api/public/ingestion", {"batch": batch})
        if answer.status_code == 404:
            return self._listed(http, scores)
        if answer.status_code == 400:  # one bad item
            return [line for each in scores if (line := self._single(http, each)) is not None]
        if not answer.is_success:
            raise DeliveryError(_line(answer))
        errors = cast(Sequence[Mapping[str, Json]], _json(answer).get("errors") or ())
        failed = {str(error.get("id")) for error in errors}
        again = [each for each in scores if each.id in failed]
        return [line for each in again if (line := self._single(http, each)) is not None]

    def _listed(self, http: httpx.Client, scores: Sequence[LangfuseScore]) -> list[str]:
        """Send them to a server without the bulk route: newer ones take a list, and name no ids in what they refuse."""
        answer = _posted(http, "/api/public/scores", [each.body() for each in scores])
        if answer.status_code == 400:
            return [line for each in scores if (line := self._single(http, each)) is not None]
        if not answer.is_success:
            raise DeliveryError(_line(answer))
        errors = _json(answer).get("errors") if answer.status_code == 207 else None
        return [str(error.get("message")) for error in cast(Sequence[Mapping[str, Json]], errors or ())]

    def _single(self, http: httpx.Client, score: LangfuseScore) -> str | None:
        """Send one; None, or why it was not taken."""
        answer = first = _posted(http, "/api/public/scores", score.body())
        if first.status_code == 400:  # newer servers take a list
            answer = _posted(http, "/api/public/scores", [score.body()])
            if answer.status_code == 400:
                return f"{score.name}: {_line(first)}, and as a list: {_line(answer)}"
        if answer.status_code == 207:
            errors: Json = _json(answer).get("errors")
            return f"{score.name}: {errors!r:.300}" if errors else None
        if not answer.is_success:
            raise DeliveryError(_line(answer))
        return None


def _posted(http: httpx.Client, path: str, body: Json) -> httpx.Response:
    try:
        return http.post(path, json=body)
    except httpx.HTTPError as error:
        raise DeliveryError(f"POST {path}: {error_text(error)}") from error


def _json(answer: httpx.Response) -> Mapping[str, Json]:
    """The body of a 2xx response; one that is no JSON object names no errors."""
    try:
        found = answer.json()
    except ValueError:
        return {}
    return cast(Mapping[str, Json], found) if isinstance(found, dict) else {}


def _line(answer: httpx.Response) -> str:
    return f"{answer.request.url.path} answered {answer.status_code}: {answer.text[:300]!r}"
