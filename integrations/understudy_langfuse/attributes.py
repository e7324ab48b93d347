"""Langfuse's span attributes. Those of the trace stand on every span: the server filters observations, not traces."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass

from understudy.integration import (
    Attribute,
    CallTrace,
    GroupsFinished,
    Json,
    RolloutTrace,
    RunStarted,
    SpanKind,
    TraceSpan,
    json_text,
    span_id,
)


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
    session = session_id(event.run, event.step)
    found: dict[str, Attribute] = {
        "langfuse.trace.name": str(place.scenario or "rollout"),
        "langfuse.session.id": session,
        "session.id": session,
        "langfuse.trace.tags": ["understudy", f"split:{event.split}", f"model:{record.model}"],
        "langfuse.environment": environment,
        "langfuse.version": f"lora-step-{event.step}",
    }
    known: dict[str, Json] = {
        "run": event.run,
        "split": event.split,
        "step": event.step,
        "scenario": place.scenario,
        "group": place.group,
        "index": place.index,
        "trajectory": record.id,
        "reward": record.reward,
    }
    known |= {f"rollout.{name}": value for name, value in record.metadata.items()}
    found |= {f"langfuse.trace.metadata.{name}": as_text(value) for name, value in known.items() if value is not None}
    if experiment is not None:
        name = f"{event.run}@step-{event.step}"
        found |= {
            "langfuse.experiment.id": name,
            "langfuse.experiment.name": name,
            "langfuse.experiment.dataset.id": experiment.dataset_id,
            "langfuse.experiment.item.id": experiment.item_id,
            "langfuse.experiment.item.root_observation_id": f"{span_id(rollout, root.key):016x}",
            "langfuse.experiment.item.expected_output": json_text(experiment.expected),
        }
    return found


def span_attributes(span: TraceSpan, mask: Callable[[Json], Json]) -> dict[str, Attribute]:
    """What one span says, besides the attributes of its trace."""
    found: dict[str, Attribute] = {"langfuse.observation.type": span.kind.value}
    if span.parent is None:
        found["langfuse.internal.is_app_root"] = True
    if span.input is not None:
        found["langfuse.observation.input"] = as_json(mask(span.input))
    if span.output is not None:
        found["langfuse.observation.output"] = as_json(mask(span.output))
    if span.error is not None:
        found |= {"langfuse.observation.level": "ERROR", "langfuse.observation.status_message": span.error}
    if span.call is not None:
        found |= _generation(span.call)
    for name, value in (span.facts or {}).items():
        found[f"langfuse.observation.metadata.{name}"] = as_text(value)
    if span.kind is SpanKind.TOOL:
        found["gen_ai.tool.name"] = span.name
    return found


def _generation(call: CallTrace) -> dict[str, Attribute]:
    output = sum(each.tokens for each in call.outputs)
    usage = {"input": call.prompt_tokens, "output": output, "total": call.prompt_tokens + output}
    known: dict[str, Json] = {
        "call": call.id,
        "step": call.step,
        "status": call.status.value,
        "finish_reason": [each.finish_reason for each in call.outputs],
        "logprob_mean": [each.logprob_mean for each in call.outputs],
        "logprob_min": [each.logprob_min for each in call.outputs],
    }
    if call.constrained is not None:
        known["constrained"] = call.constrained
    if call.late:
        known["late"] = True
    if any(each.parse_failure for each in call.outputs):
        known["parse_failure"] = True
    if call.tools:
        known["tools"] = [each.get("function", each) for each in call.tools]
    if call.origin is not None:
        known |= call.origin.model_dump(mode="json", exclude_defaults=True)
    return {
        "langfuse.observation.model.name": f"{call.model}@{call.step}",
        "langfuse.observation.model.parameters": call.sampling.model_dump_json(),
        "langfuse.observation.usage_details": json_text(usage),
        **{f"langfuse.observation.metadata.{name}": as_text(value) for name, value in known.items()},
    }


def run_attributes(event: RunStarted, environment: str) -> dict[str, Attribute]:
    """The run itself as one span."""
    return {
        "langfuse.observation.type": "span",
        "langfuse.internal.is_app_root": True,
        "langfuse.trace.name": "run",
        "langfuse.session.id": session_id(event.run, event.step),
        "session.id": session_id(event.run, event.step),
        "langfuse.trace.tags": ["understudy", "run", f"model:{event.model}"],
        "langfuse.environment": environment,
        "langfuse.version": f"lora-step-{event.step}",
        "langfuse.trace.metadata.run": event.run,
        "langfuse.observation.input": as_json(dict(event.settings)),
    }


def session_id(run: str, step: int) -> str:
    """The session of a run's step."""
    return f"{run}/step-{step:05d}"


def environment_name(text: str) -> str:
    """As Langfuse takes it: lower case letters, digits, `-` and `_`, at most 40; anything else would become "default"."""
    name = re.sub(r"[^a-z0-9_-]", "-", text.lower())[:40]
    return f"env-{name}"[:40] if name.startswith("langfuse") or not name else name


def as_json(value: Json) -> str:
    """Inputs and outputs are JSON strings."""
    return json_text(value)


def as_text(value: Json) -> str:
    """Metadata: texts as they are, anything else as JSON."""
    return value if isinstance(value, str) else as_json(value)
