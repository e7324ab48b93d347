"""The sink for Langfuse: rollouts as traces, and scores by REST under fixed ids, of which the same one overwrites.

Attributes of a trace are on each of its spans, because the server filters observations, not traces."""

from __future__ import annotations

import math
import os
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Final, cast

import httpx

from offbook import TraceSink
from offbook.base.errors import ConfigError
from offbook.base.redaction import error_text
from offbook.base.types import CallTrace, Json
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
    SpanKind,
    TraceSpan,
    as_text,
    json_text,
    rollout_spans,
    span_id,
    trace_id,
)

from .connection import OWN_TAG, REQUEST_SECONDS, LangfuseConnection
from .stored import dataset_items

Mask = Callable[[Json], Json]
"""Input, output or explanation -> the value that may leave the process."""
BULK: Final = 200
"""Scores of one request."""
EXPLANATION: Final = "RULER explanation: "


def score_body(
    id: str,
    name: str,
    value: float,
    scored_at: float,
    environment: str = "default",
    comment: str | None = None,
    metadata: Mapping[str, Json] | None = None,
    **target: str,
) -> dict[str, Json]:
    """A number on a trace (`traceId`) or a session (`sessionId`), as the API takes it. Langfuse overwrites the score that has
    the same id and day, so `scored_at` (Unix seconds) must be the same when the score is sent again."""
    moment = datetime.fromtimestamp(scored_at, UTC).isoformat().replace("+00:00", "Z")
    body: dict[str, Json] = {
        "id": id,
        "name": name,
        "value": value,
        "timestamp": moment,
        "dataType": "NUMERIC",
        **target,
    }
    body |= {"environment": environment, "metadata": dict(metadata or {})}
    return body | ({"comment": comment} if comment else {})


def rollout_scores(rollout: RolloutTrace, environment: str, mask: Mask) -> list[dict[str, Json]]:
    """The scores of one rollout. The judge's explanation is the comment of the reward and of its own score."""
    record, trace = rollout.record, f"{trace_id(rollout):032x}"
    told = [line.removeprefix(EXPLANATION) for line in record.logs if line.startswith(EXPLANATION)]
    comment = str(mask(told[-1])) if told else None
    values = ({"reward": record.reward} if record.reward is not None else {}) | record.metrics
    explained = {"reward", "ruler_score"}
    return [
        score_body(
            digest(record.id, name),
            name,
            float(value),
            record.ended_at,
            environment,
            comment if name in explained else None,
            traceId=trace,
        )
        for name, value in values.items()
    ]


def send_scores(connection: LangfuseConnection, scores: Sequence[Mapping[str, Json]], timeout: float) -> None:
    """Send scores in bulk. Values that are no finite number are left out: the API refuses them.

    Raises RejectedError naming the first that was refused, DeliveryError if the server accepts nothing."""
    finite = [score for score in scores if math.isfinite(score["value"])]
    refused: list[str] = []
    with connection.client(timeout) as http:
        for start in range(0, len(finite), BULK):
            refused += _refused(http, finite[start : start + BULK])
    if refused:
        raise RejectedError(f"{len(refused)} of {len(finite)} scores were refused, such as {refused[0]}")


def _refused(http: httpx.Client, scores: Sequence[Mapping[str, Json]]) -> list[str]:
    """Send scores by the bulk route, to a newer server without it as a list; returns the refusals."""
    batch: Json = [
        {"id": score["id"], "timestamp": score["timestamp"], "type": "score-create", "body": score} for score in scores
    ]
    answer = _posted(http, "/api/public/ingestion", {"batch": batch})
    if answer.status_code == 404:
        answer = _posted(http, "/api/public/scores", list(scores))
    if answer.status_code == 400:
        return [_line(answer)] * len(scores)
    if not answer.is_success:
        raise DeliveryError(_line(answer))
    return [f"{error!r:.300}" for error in cast(Sequence[Json], _json(answer).get("errors") or ())]


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


USER: Final = "user_id"
PROMPT: Final = "prompt"
"""Keys of a rollout's metadata that Langfuse has fields for: the user's id, and `name@version` of a managed prompt."""
LONGEST_SESSION: Final = 200
"""Langfuse drops longer session ids."""


@dataclass(frozen=True)
class Experiment:
    """The dataset item that an evaluated rollout belongs to."""

    dataset_id: str
    item_id: str
    expected: Json


def trace_attributes(
    rollout: RolloutTrace, root: TraceSpan, event: GroupsFinished, environment: str, experiment: Experiment | None
) -> dict[str, Attribute]:
    """What all spans of a rollout say."""
    record, place = rollout.record, rollout.record.place
    found: dict[str, Attribute] = {
        "langfuse.trace.name": root.name,
        "langfuse.session.id": session_id(event.run, event.step),
        "langfuse.trace.tags": [OWN_TAG, f"split:{event.split}", f"model:{record.model}"],
        "langfuse.environment": environment,
    }
    if place.step is not None:
        found["langfuse.version"] = f"lora-step-{event.step}"
    if user := record.metadata.get(USER):
        found["user.id"] = str(user)[:LONGEST_SESSION]
    known: dict[str, Json] = {
        "run": event.run,
        "split": event.split,
        "step": place.step,
        "scenario": place.scenario,
        "group": place.group,
        "index": place.index,
        "trajectory": record.id,
    }
    known |= {f"rollout.{name}": value for name, value in record.metadata.items() if name not in (USER, PROMPT)}
    found |= {f"langfuse.trace.metadata.{name}": as_text(value) for name, value in known.items() if value is not None}
    if experiment is not None:
        found |= _experiment(rollout, root, event, experiment)
    return found


def _experiment(
    rollout: RolloutTrace, root: TraceSpan, event: GroupsFinished, item: Experiment
) -> dict[str, Attribute]:
    """One experiment for each run, split and step. Its name begins with what tells rows apart, and has no comma: Langfuse's
    API takes comma-separated lists of names."""
    model, step = rollout.record.model, rollout.record.place.step
    policy = model if step is None else f"{model} step {step}"
    facts: dict[str, Json] = {"model": model, "step": step, "split": event.split, "run": event.run}
    return {
        "langfuse.experiment.id": f"{event.run}/{event.split}@step-{event.step}",
        "langfuse.experiment.name": f"{policy} {event.split} ({event.run})",
        "langfuse.experiment.description": f"Offbook evaluated {policy} on the split {event.split} of run {event.run}.",
        "langfuse.experiment.metadata": json_text({name: fact for name, fact in facts.items() if fact is not None}),
        "langfuse.experiment.dataset.id": item.dataset_id,
        "langfuse.experiment.item.id": item.item_id,
        "langfuse.experiment.item.root_observation_id": f"{span_id(rollout, root.key):016x}",
        "langfuse.experiment.item.expected_output": json_text(item.expected),
    }


def span_attributes(
    span: TraceSpan, metadata: Mapping[str, Json], mask: Callable[[Json], Json]
) -> dict[str, Attribute]:
    """What one span says, besides the attributes of its trace. `metadata`: the rollout's.

    Langfuse merges the metadata of observation and trace, so each kind of span has a prefix of its own.
    """
    found: dict[str, Attribute] = {"langfuse.observation.type": span.kind.value}
    if span.parent is None:
        found["langfuse.internal.is_app_root"] = True
    if span.input is not None:
        shown = mask(span.input)
        tools = span.call.tools if span.call is not None else None
        found["langfuse.observation.input"] = json_text({"messages": shown, "tools": tools} if tools else shown)
    if span.output is not None:
        found["langfuse.observation.output"] = json_text(mask(span.output))
    if span.error is not None:
        found |= {"langfuse.observation.level": "ERROR", "langfuse.observation.status_message": span.error}
    if span.call is not None:
        found |= _generation(span.call) | _prompt(metadata)
    prefix = "tool" if span.kind is SpanKind.TOOL else "app"
    for name, value in (span.facts or {}).items():
        found[f"langfuse.observation.metadata.{prefix}.{name.removeprefix('tool_')}"] = as_text(value)
    return found


def _generation(call: CallTrace) -> dict[str, Attribute]:
    output = sum(each.tokens for each in call.outputs)
    usage = {"input": call.prompt_tokens, "output": output, "total": call.prompt_tokens + output}
    known: dict[str, Json] = {
        "call.id": call.id,
        "call.step": call.step,
        "call.status": call.status.value,
        "call.finish_reason": _single([each.finish_reason for each in call.outputs]),
        "call.logprob_mean": _single([each.logprob_mean for each in call.outputs]),
        "call.logprob_min": _single([each.logprob_min for each in call.outputs]),
        "call.constrained": call.constrained,
        "call.late": call.late or None,
        "call.parse_failure": any(each.parse_failure for each in call.outputs) or None,
    }
    if call.origin is not None:
        origin: dict[str, Json] = call.origin.model_dump(mode="json", exclude_defaults=True)
        known |= {f"app.{name}": value for name, value in origin.items()}
    settings = {"temperature": call.sampling.temperature, **call.sampling.model_dump(exclude_defaults=True)}
    found: dict[str, Attribute] = {
        "langfuse.observation.model.name": call.model,
        "langfuse.observation.model.parameters": json_text(settings),
        "langfuse.observation.usage_details": json_text(usage),
    }
    if call.cost is not None:
        found["langfuse.observation.cost_details"] = json_text({"total": call.cost})
    if call.first_token_at is not None:
        moment = datetime.fromtimestamp(call.first_token_at, UTC)
        found["langfuse.observation.completion_start_time"] = moment.isoformat(timespec="milliseconds")
    named = {
        f"langfuse.observation.metadata.{name}": as_text(value) for name, value in known.items() if value is not None
    }
    return found | named


def _prompt(metadata: Mapping[str, Json]) -> dict[str, Attribute]:
    name, _, version = str(metadata.get(PROMPT) or "").rpartition("@")
    if not name or not version.isdecimal():
        return {}
    return {"langfuse.observation.prompt.name": name, "langfuse.observation.prompt.version": int(version)}


def run_attributes(event: RunStarted, environment: str) -> dict[str, Attribute]:
    """The run itself as one span."""
    return {
        "langfuse.observation.type": "span",
        "langfuse.internal.is_app_root": True,
        "langfuse.trace.name": "run",
        "langfuse.session.id": session_id(event.run, event.step),
        "langfuse.trace.tags": [OWN_TAG, "run", f"model:{event.model}"],
        "langfuse.environment": environment,
        "langfuse.version": f"lora-step-{event.step}",
        "langfuse.trace.metadata.run": event.run,
        "langfuse.observation.input": json_text(dict(event.settings)),
    }


def session_id(run: str, step: int) -> str:
    """The session of a run's step. Langfuse's tables show its first 30 letters, so the step comes first."""
    return f"step-{step:05d}/{run}"[:LONGEST_SESSION]


def environment_name(text: str) -> str:
    """As Langfuse takes it: lower case letters, digits, `-` and `_`, at most 40; anything else would become "default"."""
    name = re.sub(r"[^a-z0-9_-]", "-", text.lower())[:40]
    return f"env-{name}"[:40] if name.startswith("langfuse") or not name else name


def _single(values: Sequence[Json]) -> Json:
    """The value of a call's only choice; a list for several."""
    return values[0] if len(values) == 1 else list(values)


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
        self._mask: Mask = mask or (lambda value: value)
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
        self._timeout = timeout

    def check(self) -> None:
        self._connection.check()

    def run_started(self, event: RunStarted) -> None:
        """The run as a trace of its own, with the settings as its input."""
        trace, start = int(digest(event.id) * 2, 16), int(event.at * 1e9)
        attributes = run_attributes(event, self._environment_of("train")) | self._release
        self._sender.send([[self._sender.span(trace, trace % 2**64 or 1, None, "run", (start, start), attributes)]])

    def groups_finished(self, event: GroupsFinished) -> None:
        shown = [rollout for rollout in event.rollouts if trace_id(rollout) / 2**128 < self._rate]
        experiments = self._items() if event.split.startswith(EVALUATED) else {}
        environment = self._environment_of(event.split)
        scores = [score for rollout in shown for score in rollout_scores(rollout, environment, self._mask)]
        try:
            self._sender.send([self._spans(rollout, event, experiments) for rollout in shown])
        except RejectedError:  # the other rollouts were accepted
            self._send_scores(scores)
            raise
        self._send_scores(scores)

    def evaluation_finished(self, event: EvaluationFinished) -> None:
        names = [name for name in event.metrics if name not in EVALUATION_DETAILS]
        self._session_scores(event, event.step, event.split, {name: f"{event.split}/{name}" for name in names})

    def step_finished(self, event: StepFinished) -> None:
        """Session scores of the rollouts that the step was trained on."""
        self._session_scores(event, event.began, "train", {name: name for name in STEP_SCORES})

    def alert(self, event: Alert) -> None:
        session = session_id(event.run, event.step)
        score = score_body(
            digest(event.id),
            f"alert/{event.kind}",
            event.value,
            event.at,
            self._environment_of("train"),
            event.message,
            sessionId=session,
        )
        self._send_scores([score])

    def _send_scores(self, scores: Sequence[Mapping[str, Json]]) -> None:
        send_scores(self._connection, scores, self._timeout)

    def _session_scores(
        self, event: StepFinished | EvaluationFinished, step: int, split: str, scored: Mapping[str, str]
    ) -> None:
        """Send metrics as scores of the session. `scored`: the score's name by metric. The first score has all metrics of the
        event as its metadata."""
        numbers: Json = {name: float(value) for name, value in event.metrics.items() if math.isfinite(value)}
        session, environment = session_id(event.run, step), self._environment_of(split)
        scores = [
            score_body(
                digest(event.id, scored[metric]),
                scored[metric],
                numbers[metric],
                event.at,
                environment,
                sessionId=session,
                metadata={"model": event.model, **({} if index else {"metrics": numbers})},
            )
            for index, metric in enumerate(name for name in scored if name in numbers)
        ]
        self._send_scores(scores)

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
    """The share of rollouts to show. Raises ConfigError unless it is a number from 0 to 1."""
    rate = os.environ.get(SAMPLE_RATE) or 1.0 if given is None else given
    try:
        value = float(rate)
    except (TypeError, ValueError):
        value = -1.0
    if not 0 <= value <= 1:
        raise ConfigError(f"LangfuseSink: sample_rate: a number from 0 to 1 is needed, got {rate!r} ({SAMPLE_RATE})")
    return value
