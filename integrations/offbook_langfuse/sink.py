"""The sink for Langfuse: rollouts as traces, and scores by REST under fixed ids, of which the same one overwrites."""

from __future__ import annotations

import math
import os
import weakref
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Final, cast

import httpx

from offbook import TraceSink
from offbook.base.redaction import error_text
from offbook.base.types import Json
from offbook.base.wire import RolloutTrace
from offbook.contracts import (
    Alert,
    DeliveryError,
    EvaluationFinished,
    GroupsFinished,
    RejectedError,
    RunStarted,
    StepFinished,
    digest,
)
from offbook_sinks.otlp_sink import OtlpSender, OtlpSpan
from offbook_sinks.spans import (
    Attribute,
    Mask,
    checked_rate,
    is_sampled,
    rollout_spans,
    span_id,
    trace_id,
    unmasked,
)

from .attributes import (
    Experiment,
    environment_name,
    run_attributes,
    session_id,
    span_attributes,
    trace_attributes,
)
from .connection import REQUEST_SECONDS, LangfuseConnection
from .stored import dataset_items

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
            {"id": score.id, "timestamp": score.timestamp, "type": "score-create", "body": score.body()}
            for score in scores
        ]
        answer = _posted(http, "/api/public/ingestion", {"batch": batch})
        if answer.status_code == 404:
            return self._listed(http, scores)
        if answer.status_code == 400:  # one bad item
            return [line for score in scores if (line := self._single(http, score)) is not None]
        if not answer.is_success:
            raise DeliveryError(_line(answer))
        errors = cast(Sequence[Mapping[str, Json]], _json(answer).get("errors") or ())
        failed = {str(error.get("id")) for error in errors}
        again = [score for score in scores if score.id in failed]
        return [line for score in again if (line := self._single(http, score)) is not None]

    def _listed(self, http: httpx.Client, scores: Sequence[LangfuseScore]) -> list[str]:
        """Send them to a server without the bulk route: newer ones take a list, and name no ids in what they refuse."""
        answer = _posted(http, "/api/public/scores", [score.body() for score in scores])
        if answer.status_code == 400:
            return [line for score in scores if (line := self._single(http, score)) is not None]
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
        body = answer.json()
    except ValueError:
        return {}
    return cast(Mapping[str, Json], body) if isinstance(body, dict) else {}


def _line(answer: httpx.Response) -> str:
    return f"{answer.request.url.path} answered {answer.status_code}: {answer.text[:300]!r}"


OTLP_PATH: Final = "/api/public/otel/v1/traces"
SCOPE: Final = "langfuse-sdk.offbook"
"""Instrumentation scope. Langfuse shows all attributes a second time as metadata, unless the scope begins with `langfuse-sdk`
and, for some of its versions, names the public key."""
ENVIRONMENT: Final = "LANGFUSE_TRACING_ENVIRONMENT"
RELEASE: Final = "LANGFUSE_RELEASE"
SAMPLE_RATE: Final = "LANGFUSE_SAMPLE_RATE"
STEP_SCORES: Final = ("reward", "success", "entropy", "kl/base")
"""Metrics of a step that are scores of its session. Each name of a score is a column of Langfuse's table of sessions."""

EVALUATION_DETAILS: Final = ("reward_spread", "reward_error", "scenarios")
"""Metrics of an evaluation that are no scores."""
EVALUATED: Final = ("val", "compare")
"""How the splits of evaluations and comparisons begin."""


class LangfuseSink(TraceSink):
    """Rollouts as traces with sessions per step, scores, tags and versions.

    Without `connection` it reads LANGFUSE_BASE_URL (or LANGFUSE_HOST), LANGFUSE_PUBLIC_KEY and LANGFUSE_SECRET_KEY. `mask`
    changes every input and output before it leaves the process. `sample_rate`: the share of rollouts that is shown, by
    default LANGFUSE_SAMPLE_RATE or 1. `environment`: by default LANGFUSE_TRACING_ENVIRONMENT or the split. `dataset`: the
    name of a Langfuse dataset whose item ids are the scenarios' ids: evaluations become experiments on it. `release`: of the
    app, by default LANGFUSE_RELEASE.
    """

    name = "langfuse"

    def __init__(
        self,
        connection: LangfuseConnection | None = None,
        *,
        mask: Mask | None = None,
        sample_rate: float | None = None,
        environment: str | None = None,
        dataset: str | None = None,
        release: str | None = None,
        timeout: float = REQUEST_SECONDS,
    ) -> None:
        self._connection = connection or LangfuseConnection.from_environment()
        self._mask = mask or unmasked
        self._rate = _sample_rate(sample_rate)
        self._environment = environment or os.environ.get(ENVIRONMENT)
        self._dataset = dataset
        release = release or os.environ.get(RELEASE)
        self._release: dict[str, Attribute] = {"langfuse.release": release} if release else {}
        self._experiments: dict[str, Experiment] | None = None
        headers = {"authorization": self._connection.authorization, "x-langfuse-ingestion-version": "4"}
        self._sender = OtlpSender(
            f"{self._connection.base_url}{OTLP_PATH}",
            headers,
            timeout=timeout,
            scope_name=SCOPE,
            scope={"public_key": self._connection.public_key},
        )
        self._scores = ScoreSender(self._connection, timeout)

    def check(self) -> None:
        self._connection.check()

    def run_started(self, event: RunStarted) -> None:
        """The run as a trace of its own, with the settings as its input."""
        trace, start = int(digest(event.id) * 2, 16), int(event.at * 1e9)
        attributes = run_attributes(event, self._environment_of("train")) | self._release
        self._sender.send([[self._sender.span(trace, trace % 2**64 or 1, None, "run", (start, start), attributes)]])

    def groups_finished(self, event: GroupsFinished) -> None:
        shown = [rollout for rollout in event.rollouts if is_sampled(rollout, self._rate)]
        experiments = self._items() if event.split.startswith(EVALUATED) else {}
        environment = self._environment_of(event.split)
        scores = [score for rollout in shown for score in rollout_scores(rollout, environment, self._mask)]
        try:
            self._sender.send([self._spans(rollout, event, experiments) for rollout in shown])
        except RejectedError:  # the other rollouts were accepted
            self._scores.send(scores)
            raise
        self._scores.send(scores)

    def evaluation_finished(self, event: EvaluationFinished) -> None:
        names = [name for name in event.metrics if name not in EVALUATION_DETAILS]
        self._session_scores(event, event.step, event.split, {name: f"{event.split}/{name}" for name in names})

    def step_finished(self, event: StepFinished) -> None:
        """Session scores of the rollouts that the step was trained on."""
        self._session_scores(event, event.began, "train", {name: name for name in STEP_SCORES})

    def alert(self, event: Alert) -> None:
        session = session_id(event.run, event.step)
        score = LangfuseScore(digest(event.id), f"alert/{event.kind}", event.value, event.at, event.message, session=session,
                      environment=self._environment_of("train"))  # fmt: skip
        self._scores.send([score])

    def closed(self) -> None:
        self._scores.close()

    def _session_scores(
        self, event: StepFinished | EvaluationFinished, step: int, split: str, scored: Mapping[str, str]
    ) -> None:
        """Send metrics as scores of the session. `scored`: the score's name by metric. The first score has all metrics of the
        event as its metadata."""
        numbers: Json = {name: float(value) for name, value in event.metrics.items() if math.isfinite(value)}
        session, environment = session_id(event.run, step), self._environment_of(split)
        scores = [
            LangfuseScore(
                digest(event.id, scored[metric]),
                scored[metric],
                numbers[metric],
                event.at,
                session=session,
                environment=environment,
                metadata={"model": event.model, **({} if index else {"metrics": numbers})},
            )
            for index, metric in enumerate(name for name in scored if name in numbers)
        ]
        self._scores.send(scores)

    def _spans(
        self, rollout: RolloutTrace, event: GroupsFinished, experiments: Mapping[str, Experiment]
    ) -> Sequence[OtlpSpan]:
        scenario = rollout.record.place.scenario or ""
        spans, environment, trace = rollout_spans(rollout), self._environment_of(event.split), trace_id(rollout)
        shared = trace_attributes(rollout, spans[0], event, environment, experiments.get(scenario)) | self._release
        return [
            self._sender.span(
                trace,
                span_id(rollout, span.key),
                span_id(rollout, span.parent) if span.parent is not None else None,
                span.name,
                (span.start, span.end),
                {**shared, **span_attributes(span, rollout.record.metadata, self._mask)},
                error=span.error,
            )
            for span in spans
        ]

    def _items(self) -> dict[str, Experiment]:
        """The dataset's items by id, read once."""
        if self._dataset is None:
            return {}
        if self._experiments is None:
            items = dataset_items(self._connection, self._dataset)
            self._experiments = {item.id: Experiment(item.dataset_id, item.id, item.expected) for item in items}
            if not self._experiments:
                raise DeliveryError(
                    f"the Langfuse dataset {self._dataset!r} has no items: call save_dataset(...) first"
                )
        return self._experiments

    def _environment_of(self, split: str) -> str:
        return environment_name(self._environment or split)


def _sample_rate(given: float | None) -> float:
    text = os.environ.get(SAMPLE_RATE)
    if given is not None or not text:
        return checked_rate(1.0 if given is None else given, "LangfuseSink: sample_rate")
    try:
        return checked_rate(float(text), SAMPLE_RATE)
    except ValueError:
        return checked_rate(text, SAMPLE_RATE)
