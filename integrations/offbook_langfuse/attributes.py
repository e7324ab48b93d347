"""Langfuse's span attributes. Those of the trace are on every span, because the server filters observations, not traces."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Final

from offbook.base.types import CallTrace, Json
from offbook.base.wire import RolloutTrace
from offbook.contracts import GroupsFinished, RunStarted
from offbook_sinks.spans import Attribute, SpanKind, TraceSpan, as_text, json_text, span_id

from .connection import OWN_TAG

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
