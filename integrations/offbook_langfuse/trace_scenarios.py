"""Real users' inputs, read from traces in Langfuse as scenarios, with what the old model answered."""

from __future__ import annotations

import json
import logging
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from heapq import merge
from typing import Final, TypedDict, Unpack, cast

from offbook import Scenario
from offbook.base.errors import ConfigError
from offbook.base.redaction import MARK, Redaction
from offbook.base.text import counted
from offbook.base.types import Json
from offbook.base.user_values import json_value

from .connection import OWN_TAG, LangfuseConnection, LangfuseRest

logger = logging.getLogger("offbook")

FIELDS: Final = "core,basic,io,metadata,trace_context"
PAGE: Final = 500
"""Observations of a request."""
SCORES: Final = 100
"""Scores of a request: the API takes no more."""
IDS: Final = 50
"""Trace ids of a request, whose URL holds them."""
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
        match = _SCORE.fullmatch(text)
        if match is None:
            raise ConfigError(f"low_score: {text!r} is not of the form NAME<NUMBER, such as 'helpfulness<0.5'")
        return cls(match["name"], match["sign"], float(match["value"]))

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
    """The newest traces that fit, at most `limit`, one scenario for each different input; an empty list if none fits.

    A scenario has `prompt` (the last user message, where the input is a text or messages), `input` (the whole), `answer`
    (what the app answered then), `trace_id`, and `score` when `low_score` chose it; then those scored last come first. Its
    id is the trace's. Traces that Offbook sent are left out, unless `tags` names theirs (`offbook`)."""
    wanted: TraceFilter = {**(filter or {}), **also}
    unknown = sorted(set(wanted) - set(TraceFilter.__annotations__))
    if unknown:
        raise ConfigError(f"filter: there is no {unknown[0]!r}; there are {', '.join(TraceFilter.__annotations__)}")
    if limit < 1:
        raise ConfigError(f"limit: a whole number of at least 1 is needed, got {limit!r}")
    with LangfuseRest(connection or LangfuseConnection.from_environment()) as rest:
        bound = ScoreBound.parse(low_score) if low_score is not None else None
        scores = _scored(rest, bound, wanted.get("from_time")) if bound is not None else None
        return _without_keys(list(_scenarios(rest, wanted, scores, limit)))


def _without_keys(scenarios: list[Scenario]) -> list[Scenario]:
    """The scenarios without the keys that users wrote into their texts: agents would send them to every model."""
    redaction = Redaction()
    clean = [Scenario.model_validate(redaction.value(scenario.model_dump())) for scenario in scenarios]
    if redaction.marks:
        logger.warning("scenarios from traces: %s replaced by %s", counted(redaction.marks, "key"), MARK)
    return clean


def _scored(rest: LangfuseRest, bound: ScoreBound, since: datetime | None) -> dict[str, float]:
    """Trace id -> the score, where it is in bounds, those scored last first."""
    scores: dict[str, float] = {}
    parameters = {**bound.parameters, "fields": "subject", "limit": SCORES, "fromTimestamp": _time(since)}
    for score in rest.by_cursor("/api/public/v3/scores", parameters):
        trace = _trace_of(score)
        value = score.get("value")
        if trace is not None and isinstance(value, int | float) and bound.holds(float(value)):
            scores.setdefault(trace, float(value))
    return scores


def _trace_of(score: Mapping[str, Json]) -> str | None:
    """The trace that a score is on, itself or in an observation. A session's score has no trace."""
    about: Json = score.get("subject")
    subject = cast(Mapping[str, Json], about if isinstance(about, dict) else {})
    trace = subject.get("id") if subject.get("kind") == "trace" else subject.get("traceId")
    return None if trace is None else str(trace)


def _scenarios(
    rest: LangfuseRest, wanted: TraceFilter, scores: Mapping[str, float] | None, limit: int
) -> Iterator[Scenario]:
    known: set[str] = set()
    for root in _roots(rest, wanted, scores):
        trace, text = str(root.get("traceId")), json.dumps(_value(root.get("input")), sort_keys=True)
        if text in known or root.get("input") is None:
            continue
        known.add(text)
        facts: dict[str, Json] = {
            "trace_id": trace,
            "input": _value(root.get("input")),
            "answer": _value(root.get("output")),
        }
        if scores is not None and trace in scores:
            facts["score"] = scores[trace]
        yield Scenario.model_validate({"id": trace, "prompt": _last_user_text(facts["input"]), **facts})
        if len(known) == limit:
            return


def _roots(rest: LangfuseRest, wanted: TraceFilter, scores: Mapping[str, float] | None) -> Iterator[Mapping[str, Json]]:
    """The root observation of each trace that fits, newest first. Traces by id are read in several requests, whose order is
    that of the ids."""
    chosen = wanted.get("trace_ids")
    ids = list(chosen) if scores is None and chosen is not None else None
    if scores is not None:
        ids = [trace for trace in scores if chosen is None or trace in chosen]
    chunks = [None] if ids is None else [ids[start : start + IDS] for start in range(0, len(ids), IDS)]
    known: set[str] = set()
    for chunk in chunks:
        conditions = [
            *_conditions(wanted),
            *([condition("traceId", "stringOptions", "any of", chunk)] if chunk else []),
        ]
        queries = [{"fields": FIELDS, "limit": PAGE, "filter": json.dumps(each)} for each in _named(wanted, conditions)]
        read = [rest.by_cursor("/api/public/v2/observations", query) for query in queries]
        for root in merge(*read, key=lambda root: str(root.get("startTime")), reverse=True):
            trace = str(root.get("traceId"))
            if trace not in known:
                known.add(trace)
                yield root


def _named(wanted: TraceFilter, conditions: list[Json]) -> list[list[Json]]:
    """The conditions for traces of a name: that of the trace or, without one, of its root observation."""
    name = wanted.get("name")
    if name is None:
        return [conditions]
    return [[*conditions, condition(column, "string", "=", name)] for column in ("traceName", "name")]


def _conditions(wanted: TraceFilter) -> list[Json]:
    """The filter in the form of the API's parameter `filter`, which takes the place of all its other parameters."""
    environment, tags = wanted.get("environment"), list(wanted.get("tags") or ())
    environments = [environment] if isinstance(environment, str) else environment
    known: list[tuple[str, str, str, Json]] = [
        ("isRootObservation", "boolean", "=", True),
        ("environment", "stringOptions", "any of", list(environments) if environments else None),
        ("userId", "string", "=", wanted.get("user_id")),
        ("version", "string", "=", wanted.get("version")),
        ("tags", "arrayOptions", "all of", tags or None),
        ("tags", "arrayOptions", "none of", None if OWN_TAG in tags else [OWN_TAG]),
        ("startTime", "datetime", ">=", _time(wanted.get("from_time"))),
        ("startTime", "datetime", "<", _time(wanted.get("to_time"))),
    ]
    return [condition(*each) for each in known if each[3] is not None]


def condition(column: str, kind: str, operator: str, value: Json) -> Json:
    """One condition of the API's parameter `filter`."""
    return {"type": kind, "column": column, "operator": operator, "value": value}


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
        return json_value(json.loads(text), "a trace")
    except (ValueError, ConfigError, RecursionError):  # no JSON, or JSON that no record takes: NaN, 1e999, deep nesting
        return text


def _last_user_text(value: Json) -> str | None:
    """The last thing the user said, in a text, a list of messages, or an object with either."""
    if isinstance(value, str):
        return value
    if isinstance(value, Mapping):
        named = cast(Mapping[str, Json], value)
        for key in ("messages", "input", "question", "prompt", "query", "text"):
            if key in named and (text := _last_user_text(named[key])) is not None:
                return text
        return _text(named.get("content")) if named.get("role", named.get("type")) in ("user", "human") else None
    if isinstance(value, Sequence):
        items = reversed(cast(Sequence[Json], value))
        texts = (_last_user_text(item) for item in items if isinstance(item, Mapping))
        return next((text for text in texts if text is not None), None)
    return None


def _text(content: Json) -> str | None:
    if isinstance(content, str):
        return content
    pieces = [
        cast(Mapping[str, Json], each) for each in cast(Sequence[Json], content or ()) if isinstance(each, Mapping)
    ]
    parts = [piece.get("text") for piece in pieces]
    return " ".join(str(part) for part in parts if part) or None
