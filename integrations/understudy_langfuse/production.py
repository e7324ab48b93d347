"""Real users' inputs, read from traces in Langfuse as scenarios, with what the old model answered."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Final, TypedDict, Unpack, cast

from understudy import Scenario
from understudy.integration import ConfigError, Json

from .connection import LangfuseConnection
from .rest import LangfuseRest

FIELDS: Final = "core,basic,io,metadata,trace_context"
PAGE: Final = 500
"""Observations of a request."""
SCORES: Final = 100
"""Scores of a request: the API takes no more."""
_SCORE = re.compile(r"\s*(?P<name>[^<>=]+?)\s*(?P<sign><=|<|>=|>)\s*(?P<value>-?[0-9.]+(?:e-?[0-9]+)?)\s*")


class TraceFilter(TypedDict, total=False):
    """Which traces: all that are given must fit."""

    name: str
    environment: str | Sequence[str]
    user_id: str
    version: str
    tags: Sequence[str]  # every one
    from_time: datetime
    to_time: datetime
    trace_ids: Sequence[str]


@dataclass(frozen=True)
class ScoreBound:
    """`helpfulness<0.5`: a score's name and where its value must lie."""

    name: str
    sign: str
    value: float

    @classmethod
    def parse(cls, text: str) -> ScoreBound:
        found = _SCORE.fullmatch(text)
        if found is None:
            raise ConfigError(f"low_score: {text!r} is not of the form NAME<NUMBER, such as 'helpfulness<0.5'")
        return cls(found["name"], found["sign"], float(found["value"]))

    def holds(self, value: float) -> bool:
        match self.sign:
            case "<":
                return value < self.value
            case "<=":
                return value <= self.value
            case ">":
                return value > self.value
            case _:
                return value >= self.value

    @property
    def parameters(self) -> dict[str, str | float]:
        """Of the API, whose bounds are inclusive."""
        bound = "valueMax" if self.sign[0] == "<" else "valueMin"
        return {"name": self.name, "dataType": "NUMERIC", bound: self.value}


def scenarios_from_traces(
    filter: TraceFilter | None = None,
    *,
    low_score: str | None = None,
    limit: int = 1000,
    connection: LangfuseConnection | None = None,
    **also: Unpack[TraceFilter],
) -> list[Scenario]:
    """The newest traces that fit, at most `limit`, one scenario for each different input.

    A scenario has `prompt` (the last user message, where the input is a text or messages), `input` (the whole), `answer`
    (what the app answered then), `trace_id`, and `scores` when `low_score` chose it. Its id is the trace's. Raises
    ConfigError where nothing fits."""
    wanted: TraceFilter = {**(filter or {}), **also}
    unknown = sorted(set(wanted) - set(TraceFilter.__annotations__))
    if unknown:
        raise ConfigError(f"filter: there is no {unknown[0]!r}; there are {', '.join(TraceFilter.__annotations__)}")
    if limit < 1:
        raise ConfigError(f"limit: a whole number of at least 1 is needed, got {limit!r}")
    with LangfuseRest(connection or LangfuseConnection.from_environment()) as rest:
        bound = ScoreBound.parse(low_score) if low_score is not None else None
        scores = _scored(rest, bound) if bound is not None else None
        found = list(_scenarios(rest, wanted, scores, limit))
    if not found:
        asked = ", ".join(f"{name}={value!r}" for name, value in wanted.items()) or "no filter"
        raise ConfigError(f"no trace in Langfuse fits {asked}" + (f" and {low_score!r}" if low_score else ""))
    return found


def _scored(rest: LangfuseRest, bound: ScoreBound) -> dict[str, float]:
    """Trace id -> the score, where it is in bounds."""
    found: dict[str, float] = {}
    for score in rest.by_cursor("/api/public/v3/scores", {**bound.parameters, "fields": "subject", "limit": SCORES}):
        subject = cast(Mapping[str, Json], score.get("subject") or {})
        trace = subject.get("id") if subject.get("kind") == "trace" else subject.get("traceId")
        value = score.get("value")
        if trace is not None and isinstance(value, int | float) and bound.holds(float(value)):
            found[str(trace)] = float(value)
    return found


def _scenarios(
    rest: LangfuseRest, wanted: TraceFilter, scores: Mapping[str, float] | None, limit: int
) -> Iterator[Scenario]:
    known: set[str] = set()
    for root in _roots(rest, wanted):
        trace, text = str(root.get("traceId")), json.dumps(_value(root.get("input")), sort_keys=True)
        if (scores is not None and trace not in scores) or text in known or root.get("input") is None:
            continue
        known.add(text)
        facts: dict[str, Json] = {
            "trace_id": trace,
            "input": _value(root.get("input")),
            "answer": _value(root.get("output")),
        }
        if scores is not None:
            facts["score"] = scores[trace]
        yield Scenario.model_validate({"id": trace, "prompt": _last_said(facts["input"]), **facts})
        if len(known) == limit:
            return


def _roots(rest: LangfuseRest, wanted: TraceFilter) -> Iterator[Mapping[str, Json]]:
    """The root observation of each trace that fits."""
    environment = wanted.get("environment")
    parameters: dict[str, str | int | bool | Sequence[str] | None] = {
        "isRootObservation": "true",
        "fields": FIELDS,
        "limit": PAGE,
        "environment": [environment] if isinstance(environment, str) else environment,
        "userId": wanted.get("user_id"),
        "version": wanted.get("version"),
        "fromStartTime": _time(wanted.get("from_time")),
        "toStartTime": _time(wanted.get("to_time")),
    }
    tags, ids, name = set(wanted.get("tags") or ()), wanted.get("trace_ids"), wanted.get("name")
    for root in rest.by_cursor("/api/public/v2/observations", parameters):
        own = set(cast(Sequence[str], root.get("tags") or ()))
        named = name is None or name in (root.get("traceName"), root.get("name"))
        if tags <= own and named and (ids is None or root.get("traceId") in ids):
            yield root


def _time(moment: datetime | None) -> str | None:
    if moment is None:
        return None
    if moment.tzinfo is None:
        raise ConfigError(f"filter: a time needs a time zone, got {moment!r}: use datetime.now(UTC), say")
    return moment.isoformat()


def _value(text: Json) -> Json:
    """Inputs and outputs come as JSON text, or as text that is none."""
    if not isinstance(text, str):
        return text
    try:
        return json.loads(text)
    except ValueError:
        return text


def _last_said(value: Json) -> str | None:
    """The last thing the user said, in a text, a list of messages, or an object with either."""
    if isinstance(value, str):
        return value
    if isinstance(value, Mapping):
        named = cast(Mapping[str, Json], value)
        for key in ("messages", "input", "question", "prompt", "query", "text"):
            if key in named and (said := _last_said(named[key])) is not None:
                return said
        return _text(named.get("content")) if named.get("role", named.get("type")) in ("user", "human") else None
    if isinstance(value, Sequence):
        return next((said for each in reversed(cast(Sequence[Json], value)) if (said := _said(each)) is not None), None)
    return None


def _said(message: Json) -> str | None:
    """What a message says, where a user wrote it."""
    return _last_said(message) if isinstance(message, Mapping) else None


def _text(content: Json) -> str | None:
    if isinstance(content, str):
        return content
    pieces = [
        cast(Mapping[str, Json], each) for each in cast(Sequence[Json], content or ()) if isinstance(each, Mapping)
    ]
    parts = [piece.get("text") for piece in pieces]
    return " ".join(str(part) for part in parts if part) or None
