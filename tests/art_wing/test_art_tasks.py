"""Tasks as they are written for OpenPipe ART, through its ways to a model: only the import says something else."""

from __future__ import annotations

import json
import os
import random
import uuid
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import openai
import pytest
from langchain_core.messages import HumanMessage, SystemMessage
from langchain_core.tools import tool
from langgraph.prebuilt import create_react_agent
from openai.types.chat.chat_completion import Choice
from pydantic import BaseModel

import offbook_art as art
from offbook_art.langgraph import init_chat_model, wrap_rollout
from offbook_art.utils import iterate_dataset, strip_logprobs  # type: ignore[import-not-found]
from offbook_art.utils.litellm import convert_litellm_choice_to_openai  # type: ignore[import-not-found]

# ---- temporal clue: puzzles with several questions, the share of right answers


@dataclass(frozen=True)
class Puzzle:
    prompt: str
    solution: dict[str, str]


PUZZLES = [Puzzle("Who was where, and when?", {"A": "hall", "B": "noon"}), Puzzle("Who did it?", {"A": "cook"})]


async def rollout_clue(model: art.Model, puzzle: Puzzle, number: int) -> art.Trajectory:
    messages: art.Messages = [
        {"role": "user", "content": f"{puzzle.prompt} {number}"}
    ]  # equal answers to equal ones cancel out
    client = openai.AsyncOpenAI(base_url=model.inference_base_url, api_key=model.inference_api_key)
    completion = await client.chat.completions.create(messages=messages, model=model.name, max_tokens=8)
    await client.close()
    choice = completion.choices[0]
    content = choice.message.content
    assert isinstance(content, str)
    right = sum(f"{question}. {answer}" in content for question, answer in puzzle.solution.items())
    acc = right / len(puzzle.solution)
    return art.Trajectory(messages_and_choices=[*messages, choice], reward=acc + number, metrics={"acc": acc})


@pytest.mark.slow("seconds each: processes, trainings, deadlines")
async def test_temporal_clue_trains_after_changing_its_import(local_backend: art.LocalBackend) -> None:
    model = art.TrainableModel(name="agent-clue", project="temporal-clue", base_model="tiny")
    await model.register(local_backend)
    for step in range(await model.get_step(), 1):
        val, train = (
            await art.gather_trajectories((rollout_clue(model, puzzle, 0) for puzzle in PUZZLES), pbar_desc="val"),
            await art.gather_trajectory_groups(
                (art.TrajectoryGroup(rollout_clue(model, puzzle, i) for i in range(2)) for puzzle in PUZZLES),
                pbar_desc="train",
            ),
        )
        await model.log(val)
        await model.delete_checkpoints()
        result = await local_backend.train(model, trajectory_groups=train, learning_rate=5e-5, verbose=False)
        assert result.step == step + 1 and result.metrics["calls/rendered_share"] == 0


# ---- headline writer: a reward model scores titles


async def score_title(row: dict[str, str], title: str) -> float:
    return len(set(title.lower().split()) & set(row["body"].split())) + len(row["body"]) / 100


async def rollout_headline(
    client: openai.AsyncOpenAI, model_name: str, row: dict[str, str], step: int, epoch: int
) -> art.Trajectory:
    messages: art.Messages = [{"role": "user", "content": f"Write a title: {row['body']}"}]
    completion = await client.chat.completions.create(
        messages=messages, model=model_name, max_tokens=6, temperature=1, logprobs=True
    )
    choice = completion.choices[0]
    title = choice.message.content or ""
    trajectory = art.Trajectory(
        messages_and_choices=[*messages, choice],
        reward=await score_title(row, title) + random.Random(uuid.uuid4().int).random(),
        metrics={"length": len(title), "rm": 0.5, "matches": True},
        metadata={"step": step, "epoch": epoch},
    )
    trajectory.log(f"title: {title}")
    return trajectory


async def test_the_headline_writer_trains_after_changing_its_import(local_backend: art.LocalBackend) -> None:
    model = art.TrainableModel(name="agent-headlines", project="headlines", base_model="tiny")
    await model.register(local_backend)
    client = model.openai_client()
    rows = [{"body": "a cat sat"}, {"body": "rain in the north"}]
    result: art.LocalTrainResult | None = None
    for batch in iterate_dataset(rows, groups_per_step=2, num_epochs=1, initial_step=await model.get_step()):
        groups = await art.gather_trajectory_groups(
            art.TrajectoryGroup(
                rollout_headline(client, model.name, {"body": f"{row['body']} {number}"}, batch.step, batch.epoch)
                for number in range(2)  # equal answers to equal ones cancel out
            )
            for row in batch.items
        )
        groups[0].log("first of the batch")
        result = await model.train(groups, config=art.TrainConfig(learning_rate=1.2e-5))
    assert result is not None and result.applied and result.checkpoint_path == result.checkpoint
    [first, *_] = groups[0].trajectories
    shown = first.for_logging()
    assert [message["trainable"] for message in shown["messages"]] == [False, True]
    assert shown["logs"] == first.logs and shown["reward"] == first.reward and groups[0].logs == ["first of the batch"]
    choice = first.messages_and_choices[-1]
    stripped: Any = strip_logprobs({"choice": choice, "logprobs": [1], "inner": ({"logprobs": 2, "kept": 3},)})
    assert choice.logprobs is not None and stripped["choice"].logprobs is None  # type: ignore[union-attr]
    assert stripped["choice"].message == choice.message and stripped["inner"] == ({"kept": 3},)  # type: ignore[union-attr]


# ---- the e-mail agent: tools over an inbox, its model called through litellm

INBOX = {"m1": "The meeting is on Friday.", "m2": "Lunch at noon."}
TOOLS: list[dict[str, Any]] = [
    {"type": "function", "function": {"name": name, "description": text, "parameters": parameters}}
    for name, text, parameters in (
        (
            "read_email",
            "Read an e-mail",
            {"type": "object", "properties": {"id": {"enum": list(INBOX)}}, "required": ["id"]},
        ),
        (
            "answer",
            "Answer the question",
            {"type": "object", "properties": {"id": {"enum": list(INBOX)}}, "required": ["id"]},
        ),
    )
]


class ProjectTrajectory(art.Trajectory):
    answered: str | None = None


Convert = Callable[[Any], Any]


async def rollout_email(
    litellm: Any, model: art.Model, convert: Convert, number: int, params: dict[str, Any]
) -> ProjectTrajectory:
    trajectory = ProjectTrajectory(
        messages_and_choices=[
            {"role": "system", "content": "You answer questions about an inbox."},
            {"role": "user", "content": f"When is meeting {number}?"},  # unmarked calls of equal text would be refused
        ],
        reward=0,
        tools=TOOLS,
        metadata={"number": number},
    )
    for turn in range(3):
        response = await litellm.acompletion(
            **params,
            messages=trajectory.messages(),
            tools=TOOLS,
            tool_choice="required" if turn else "auto",
            max_completion_tokens=60,
            temperature=1.0,
        )
        choice = convert(response.choices[0])
        trajectory.messages_and_choices.append(choice)
        if not choice.message.tool_calls:
            continue
        call = choice.message.tool_calls[0]
        arguments = json.loads(call.function.arguments)
        text = INBOX.get(arguments.get("id", ""), "no such e-mail")
        trajectory.messages_and_choices.append({"role": "tool", "tool_call_id": call.id, "content": text})
        if call.function.name == "answer":
            trajectory.answered = arguments.get("id")
            break
    trajectory.reward = float(trajectory.answered == "m1") + 2 * number  # never equal
    return trajectory.finish()  # type: ignore[return-value]


def without_mark(choice: Any) -> Any:
    """What a converter leaves that knows OpenAI's fields only."""
    converted = convert_litellm_choice_to_openai(choice)
    fields = {name: value for name, value in converted.model_dump().items() if name in type(converted).model_fields}
    return type(converted).model_validate(fields)


@pytest.mark.slow("seconds each: processes, trainings, deadlines")
@pytest.mark.parametrize("convert", [convert_litellm_choice_to_openai, lambda choice: choice, without_mark])
@pytest.mark.parametrize("route", ["params", "url"])
async def test_the_email_agent_is_trained_on_its_own_tokens_however_litellms_choices_are_kept(
    local_backend: art.LocalBackend, litellm: Any, convert: Convert, route: str
) -> None:
    model = art.TrainableModel(name=f"agent-email-{uuid.uuid4().hex[:8]}", project="email", base_model="tiny")
    await model.register(local_backend)
    params = model.litellm_completion_params()
    if route == "url":
        params = {"model": f"hosted_vllm/{model.name}", "base_url": model.inference_base_url, "num_retries": 0}
        params["api_key"] = model.inference_api_key
    group = art.TrajectoryGroup(rollout_email(litellm, model, convert, i, params) for i in range(2))
    groups = await art.gather_trajectory_groups([group])
    saved = [art.TrajectoryGroup.model_validate_json(group.model_dump_json()) for group in groups]
    assert [t.call_refs() for t in saved[0]] == [t.call_refs() for t in groups[0]]
    await model.log(groups)
    result = await model.train(groups, config=art.TrainConfig(learning_rate=1.2e-5))
    assert result.applied and result.metrics["calls/rendered_share"] == 0
    assert not [warning for warning in result.warnings if "tool_choice" not in warning]  # the app forces calls
    assert result.metrics["calls/trained"] >= 2


async def test_choices_of_another_endpoint_are_rendered_with_a_warning_unless_they_are_wanted(
    local_backend: art.LocalBackend,
) -> None:
    model = art.TrainableModel(name="agent-foreign", project="email", base_model="tiny")
    await model.register(local_backend)

    def rollouts() -> list[art.TrajectoryGroup]:
        answers = [
            Choice.model_validate(
                {"index": 0, "finish_reason": "stop", "message": {"role": "assistant", "content": text}}
            )
            for text in ("hello", "good day")
        ]
        ask: Any = {"role": "user", "content": "Greet me."}
        return [
            art.TrajectoryGroup(
                art.Trajectory(messages_and_choices=[ask, answer], reward=i) for i, answer in enumerate(answers)
            )
        ]

    result = await model.train(rollouts())
    assert result.metrics["calls/rendered_share"] == 1
    [warning] = [each for each in result.warnings if "rendered" in each]
    assert warning.startswith("100% of the calls were rendered from messages") and "completion.choices[0]" in warning
    result = await model.train(rollouts(), rendered_warn=1)
    assert not [each for each in result.warnings if "rendered" in each]


# ---- the e-mail agent as a LangGraph agent


class Answer(BaseModel):
    id: str


class EmailTrajectory(art.Trajectory):
    final_answer: Answer | None = None


async def rollout_graph(model: art.Model, number: int) -> EmailTrajectory:
    trajectory = EmailTrajectory(
        reward=0.0, messages_and_choices=[], metrics={"answered": False}, metadata={"number": number}
    )

    @tool
    def read_email(id: str) -> str:
        """Read an e-mail by its id."""
        return INBOX.get(id, "no such e-mail")

    @tool
    def final_answer(id: str) -> str:
        """Return the e-mail that has the answer."""
        trajectory.final_answer = Answer(id=id)
        return "thank you"

    try:
        chat_model = init_chat_model(model.get_inference_name(), temperature=1.0, max_tokens=40)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # LangGraph has moved create_react_agent
            agent = create_react_agent(chat_model, [read_email, final_answer])
        question = [
            SystemMessage(content=f"You answer question {number} about an inbox."),
            HumanMessage(content="When?"),
        ]
        config: Any = {"configurable": {"thread_id": str(uuid.uuid4())}, "recursion_limit": 6}
        await agent.ainvoke({"messages": question}, config=config)
    except Exception as error:  # noqa: BLE001  # as the published rollout has it
        trajectory.log(f"rollout failed: {error}")
    trajectory.metrics["answered"] = trajectory.final_answer is not None
    trajectory.reward = float(number)
    return trajectory


async def test_the_email_agent_on_langgraph_trains_after_changing_its_imports(local_backend: art.LocalBackend) -> None:
    model = art.TrainableModel(name="agent-graph", project="email", base_model="tiny")
    await model.register(local_backend)
    groups = await art.gather_trajectory_groups(
        art.TrajectoryGroup(wrap_rollout(model, rollout_graph)(model, i) for i in range(2)) for _ in range(1)
    )
    first = groups[0].trajectories[0]
    assert isinstance(first, EmailTrajectory) and first.metrics["captured_calls"] >= 1 and "answered" in first.metrics
    assert [message["role"] for message in first.messages()][:3] == ["system", "user", "assistant"]
    assert first.tools and {each["function"]["name"] for each in first.tools} == {"read_email", "final_answer"}
    result = await model.train(groups, config=art.TrainConfig(learning_rate=1e-5))
    assert result.applied and result.metrics["calls/rendered_share"] == 0
    assert result.metrics["trajectories/trained"] == 2


async def test_a_model_to_compare_with_runs_through_the_same_wrapped_rollout(local_backend: art.LocalBackend) -> None:
    served = art.TrainableModel(name="agent-served", project="email", base_model="tiny")
    await served.register(local_backend)
    model = art.Model(
        name="other",
        inference_base_url=served.inference_base_url,
        inference_api_key=served.inference_api_key,
        inference_model_name=served.name,
    )
    trajectory = await wrap_rollout(model, rollout_graph)(model, 1)
    assert trajectory.messages()[0]["role"] == "system" and trajectory.call_refs() == [] and not trajectory.captured
    with pytest.raises(art.OffbookError, match="inside a rollout that wrap_rollout"):
        init_chat_model("other")
    assert "OPENAI_API_KEY" not in os.environ or model.inference_api_key
