"""Training from a task's description as it is written for OpenPipe ART by hand: only the import says something else."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

import pytest
from pydantic import BaseModel, Field

import offbook_art as art
from offbook.rewards import ruler_score_group
from offbook.testing import LlmReply, LlmRequest, ShownConversation, attempts_shown, judges, says, scripted_llm
from offbook_art.local import LocalBackend  # type: ignore[import-not-found]
from offbook_art.utils import iterate_dataset  # type: ignore[import-not-found]
from offbook_art.utils.litellm import convert_litellm_choice_to_openai  # type: ignore[import-not-found]

TASK = "Say in one word what the user's note is about."
NOTES = [f"note {number}: the {thing} is broken" for number, thing in enumerate(("lift", "door", "lamp", "tap"))]


class Note(BaseModel):
    input: str = Field(description="the text of a note")


class Notes(BaseModel):
    inputs: list[Note]


class TaskInput(BaseModel):
    step: int
    input_text: str


def taste(conversations: list[ShownConversation]) -> float:
    """A score that differs between answers."""
    answer = str(conversations[0].messages[-1])
    return hashlib.sha256(answer.encode()).digest()[0] / 255


def llm(request: LlmRequest) -> LlmReply:
    if attempts_shown(request.messages):
        return judges(request, taste)
    if "response_format" in request.body:
        return says(json.dumps({"inputs": [{"input": text} for text in NOTES]}))
    return says("  Answer with one word.  ")


async def notes_for(litellm: Any, url: str, description: str, number: int) -> list[str]:
    asked = [
        {"role": "system", "content": f"Task: {description}"},
        {"role": "user", "content": f"Write {number} inputs."},
    ]
    answer = await litellm.acompletion(
        model="openai/writer", base_url=url, api_key="k", messages=asked, response_format=Notes, temperature=1.0
    )
    return [each.input for each in Notes.model_validate_json(answer.choices[0].message.content).inputs]


@pytest.mark.slow("more real servers")
async def test_a_model_is_trained_from_a_description_after_changing_the_import(
    litellm: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("OFFBOOK_DIR", str(tmp_path))
    with scripted_llm(llm) as endpoint:
        inputs = await notes_for(litellm, endpoint.url, TASK, len(NOTES))
        answer = await litellm.acompletion(
            model="openai/writer",
            base_url=endpoint.url,
            api_key="k",
            messages=[{"role": "user", "content": f"Task: {TASK}"}],
        )
        prompt = answer.choices[0].message.content.strip()

        model = art.TrainableModel(name="agent-auto-rl", project="auto-rl", base_model="tiny")
        backend = LocalBackend(dir=str(tmp_path / ".art"), max_model_len=4096)
        await model.register(backend)

        async def rollout(model: art.Model, task_input: TaskInput) -> art.Trajectory:
            traj = art.Trajectory(
                reward=0.0,
                messages_and_choices=[],
                metadata={"step": task_input.step, "input": task_input.input_text},
            )
            traj.messages_and_choices = [
                {"role": "system", "content": prompt},
                {"role": "user", "content": task_input.input_text},
            ]
            name = f"hosted_vllm/{model.name}" if model.trainable else model.name
            response = await litellm.acompletion(
                model=name,
                base_url=model.inference_base_url,
                api_key=model.inference_api_key,
                temperature=0.7,
                messages=traj.messages(),
                caching=False,
            )
            traj.messages_and_choices.append(convert_litellm_choice_to_openai(response.choices[0]))
            return traj

        task_inputs = [TaskInput(step=0, input_text=text) for text in inputs]
        judge = {"api_base": endpoint.url, "api_key": "k"}
        steps: list[int] = []
        for batch in iterate_dataset(task_inputs, groups_per_step=2, num_epochs=1, initial_step=await model.get_step()):
            groups: list[art.TrajectoryGroup] = []
            for task_input in batch.items:
                task_input.step = batch.step
                groups.append(art.TrajectoryGroup(rollout(model, task_input) for _ in range(6)))
            finished = await art.gather_trajectory_groups(
                groups, pbar_desc="Generating responses", max_exceptions=6 * len(batch.items)
            )
            judged: list[art.TrajectoryGroup] = []
            for group in finished:
                scored = await ruler_score_group(group, "openai/judge", judge, debug=False)
                assert scored is not None
                judged.append(scored)
            await model.delete_checkpoints()
            await model.train(judged, config=art.TrainConfig(learning_rate=1e-5))
            steps.append(await model.get_step())
        assert steps == [1, 2]
        result = await rollout(model, TaskInput(step=999, input_text=inputs[0]))
        assert result.messages()[-1]["role"] == "assistant"
        step = f"{await model.get_step():04d}"
        assert (tmp_path / ".art" / model.project / "models" / model.name / "checkpoints" / step).is_dir()
        await backend.close()
    assert sum(bool(attempts_shown(request.messages)) for request in endpoint.requests) == len(NOTES)
