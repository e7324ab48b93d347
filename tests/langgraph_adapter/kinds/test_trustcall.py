"""Extractors as `trustcall` builds them: a forced call, and patches until the object is valid."""

from __future__ import annotations

from typing import Any

from trustcall import create_extractor

from offbook import TrainableModel

from .apps import TEAL, City, asked, own_model
from .one_step import calls_of_a_trained_step
from .policy import Policy, names_of, origins


def extractor(**options: Any) -> Any:
    """Of a City."""
    return create_extractor(own_model(max_tokens=200), tools=[City], **options)


def test_an_object_is_extracted(policy: Policy) -> None:
    with policy.rollout() as made:
        assert extractor(tool_choice="City").invoke(asked("a town of seven"))["responses"] == [TEAL]
    [call] = made.calls(1)
    assert call.constrained == "tool_choice"
    assert call.origin is not None and (call.origin.agent, call.origin.node) == ("TrustCall", "extract")


def test_an_object_that_does_not_fit_is_patched(policy: Policy) -> None:
    patch = "{'op': 'replace', 'path': '/size', 'value': 7}"
    fix = f"PatchFunctionErrors(json_doc_id='City', planned_edits='a number', patches=[{patch}])"
    with policy.rollout() as made:
        state = extractor(tool_choice="City").invoke(asked(f"City(city='teal', size='large') then {fix}"))
    assert (state["responses"], state["attempts"]) == ([TEAL], 2)
    assert [origin.node for origin in origins(made.calls(2))] == ["extract", "patch"]
    assert [names_of(request["tools"])[0] for request in made.requests] == ["City", "PatchFunctionErrors"]
    assert "Input should be a valid integer" in made.requests[1]["messages"][-1]["content"]


async def test_an_object_that_there_is_already_is_updated(policy: Policy) -> None:
    order = "PatchDoc(json_doc_id='City', planned_edits='-', patches=[{'op': 'replace', 'path': '/size', 'value': 7}])"
    known = {"City": {"city": "teal", "size": 1}}
    async with policy.rollout() as made:
        state = await extractor(enable_inserts=True).ainvoke({**asked(order), "existing": known})
    assert state["responses"] == [TEAL]
    made.calls(1)
    assert names_of(made.requests[0]["tools"]) == ["PatchDoc", "City"]


def test_an_extractor_is_trained(model: TrainableModel) -> None:
    app = extractor(tool_choice="City")

    async def extract(scenario: Any) -> Any:
        return await app.ainvoke(asked(scenario["question"]))

    rollouts = calls_of_a_trained_step(extract, model, {"question": "what is the size of box 4821?"})
    assert {call.constrained for calls in rollouts for call in calls} == {"tool_choice"}
