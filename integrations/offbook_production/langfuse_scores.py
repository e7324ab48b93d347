"""Scores that people gave in Langfuse, as feedback on the rollouts whose traces have them."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Final, cast

from pydantic import ValidationError

from offbook.base.errors import ConfigError
from offbook.base.text import counted
from offbook.base.types import Json
from offbook.contracts import digest
from offbook_langfuse.connection import OWN_TAG, LangfuseConnection, LangfuseRest
from offbook_langfuse.trace_scenarios import IDS, PAGE, SCORES, condition, subject_of

from .feedback import FeedbackRequest

PEOPLE: Final = "ANNOTATION,API"
"""Sources of scores that people give, in Langfuse or through an app. Those of Langfuse's evaluators are EVAL."""
LONGEST_COMMENT: Final = 10_000
"""Characters of a comment; the rest is cut."""


@dataclass(frozen=True)
class ScoredTrace:
    """A score and what it is on. `trajectory`: of the trace. `call`: a model call in it, or None for the whole."""

    trace: str
    trajectory: str
    call: str | None
    score: Mapping[str, Json]

    @property
    def changed_at(self) -> tuple[str, str]:
        """When it was changed last (ISO 8601), then its id."""
        return str(self.score.get("updatedAt")), str(self.score.get("id"))

    def request(self, name: str, numbers: Mapping[str, float]) -> FeedbackRequest:
        """It as feedback called `name`. Raises ConfigError for a value that is no number, and feedback that is none."""
        value, comment = self.score.get("value"), self.score.get("comment")
        number = numbers.get(value) if isinstance(value, str) else value
        if not isinstance(number, int | float):
            raise ConfigError(
                f"score {self.score.get('name')!r} of trace {self.trace} is {value!r:.200}, which is not a number: "
                f"give the number of each category, such as --value '{value!s:.50}=1'"
            )
        about = {"trajectory_id": self.trajectory} if self.call is None else {"call_id": self.call}
        text = str(comment)[:LONGEST_COMMENT] if comment else None
        try:
            return FeedbackRequest.model_validate({**about, "score": float(number), "comment": text, "name": name})
        except ValidationError as error:
            [first, *_] = error.errors()
            where = "--as" if first["loc"] == ("name",) else f"score {number!r} of trace {self.trace}"
            raise ConfigError(f"{where}: {first['msg']}, got {first['input']!r:.200}") from error


@dataclass(frozen=True)
class LangfuseFeedback:
    """Feedback from Langfuse, each with the id of the scored trace. `left_out`: why other scores are not part of it."""

    requests: tuple[tuple[str, FeedbackRequest], ...]
    left_out: tuple[str, ...]


def langfuse_feedback(
    score: str, name: str, numbers: Mapping[str, float], connection: LangfuseConnection | None = None
) -> LangfuseFeedback:
    """The scores called `score` that people gave on traces that Offbook sent, as feedback called `name`.

    A trace or model call with several such scores has the one that was changed last. true is 1, false is 0, and a category
    has its number in `numbers`. Raises ConfigError for another value, for missing keys and for what Langfuse refuses,
    ConnectionError without an answer.
    """
    if not score.strip() or "," in score:
        raise ConfigError(f"--name: the name of one score is needed, without a comma; got {score!r}")
    with LangfuseRest(connection or LangfuseConnection.from_environment()) as rest:
        parameters = {"name": score, "source": PEOPLE, "fields": "details,subject", "limit": SCORES}
        scores = [(*subject_of(each), each) for each in rest.by_cursor("/api/public/v3/scores", parameters)]
        roots = _observations(rest, [trace for trace, _, _ in scores if trace is not None], roots=True)
        trajectories = {trace: trajectory for trace, trajectory, _ in roots.values()}
        inner = [trace for trace, id, _ in scores if trace in trajectories and id is not None and id not in roots]
        observations = _observations(rest, inner, roots=False) | roots
    newest: dict[tuple[str, str | None], ScoredTrace] = {}
    elsewhere: list[str] = []
    left_out: list[str] = []
    for trace, id, each in scores:
        if trace is None or trace not in trajectories:
            elsewhere.append(str(trace or each.get("id")))
            continue
        trajectory = trajectories[trace]
        call = observations[id][2] if id in observations else None
        if id is not None and id not in roots and call is None:
            left_out.append(
                f"trace {trace}: observation {id} is no model call; score the trace or one of its generations"
            )
        elif each.get("id") != digest(trajectory, score):  # not one that Offbook sent with the trace
            placed = ScoredTrace(trace, trajectory, call, each)
            known = newest.setdefault((trajectory, call), placed)
            newest[trajectory, call] = max(known, placed, key=lambda one: one.changed_at)
    if elsewhere:
        left_out.append(f"{counted(len(elsewhere), 'score')} of what Offbook did not send, such as {elsewhere[0]}")
    return LangfuseFeedback(
        tuple((one.trace, one.request(name, numbers)) for one in newest.values()), tuple(dict.fromkeys(left_out))
    )


def _observations(rest: LangfuseRest, traces: Sequence[str], *, roots: bool) -> dict[str, tuple[str, str, str | None]]:
    """Observation id -> its trace, trajectory and model call, of those traces that Offbook sent."""
    known: dict[str, tuple[str, str, str | None]] = {}
    for each in _read(rest, list(dict.fromkeys(traces)), roots=roots):
        facts = cast(Mapping[str, Json], each.get("metadata") or {})
        if "trajectory" in facts:
            call = facts.get("call.id")
            place = (str(each.get("traceId")), str(facts["trajectory"]), None if call is None else str(call))
            known[str(each.get("id"))] = place
    return known


def _read(rest: LangfuseRest, traces: Sequence[str], *, roots: bool) -> Iterator[Mapping[str, Json]]:
    for start in range(0, len(traces), IDS):
        conditions = [
            condition("tags", "arrayOptions", "all of", [OWN_TAG]),
            condition("traceId", "stringOptions", "any of", list(traces[start : start + IDS])),
            *([condition("isRootObservation", "boolean", "=", True)] if roots else []),
        ]
        parameters = {"fields": "core,basic,metadata", "limit": PAGE, "filter": json.dumps(conditions)}
        yield from rest.by_cursor("/api/public/v2/observations", parameters)
