"""What may be passed as scenarios, groups and candidates: any collection, read once; nothing that only looks like one."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from typing import Any

import pandas as pd
import pytest

import offbook
from offbook.base.errors import ConfigError
from offbook.client.rollouts.dataset import iterate_dataset
from offbook.client.rollouts.records import checked_groups
from offbook.trainer.options import TrainerOptions
from offbook.trainer.trainer import Trainer, checked_scenarios
from offbook_langgraph import trainable

MODEL = offbook.TrainableModel(name="boxes", base_model="tiny")
QUESTIONS = ["Where is box 1?", "Where is box 2?"]


async def rollout(model: Any, scenario: Any) -> offbook.Trajectory:
    return offbook.Trajectory(reward=1.0)


async def streamed() -> AsyncGenerator[str]:
    yield "Where is box 1?"


@pytest.mark.parametrize(
    ("value", "message"),
    [
        ("train.jsonl", "got the str 'train.jsonl'.*read a file first"),
        ({"question": "Where?"}, "got one dict, .*pass .scenario. for one"),
        (offbook.Scenario(prompt="Where?"), "got one Scenario, "),
        (None, "got None"),
        (3, "got int 3"),
        (pd.DataFrame({"question": QUESTIONS}), "got a DataFrame, whose items are its columns: pass .to_dict"),
        (streamed(), "got async_generator .*async for"),
    ],
    ids=lambda value: type(value).__name__,
)
def test_what_is_no_collection_of_scenarios_is_refused_by_what_it_is(value: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=f"scenarios: a list of scenarios is needed, {message}"):
        Trainer(MODEL, rollout, value)
    if value is not None:
        with pytest.raises(ConfigError, match=f"eval: a list of scenarios is needed, {message}"):
            TrainerOptions(eval=value)


async def test_a_generator_is_read_once_wherever_scenarios_are_passed() -> None:
    trainer = Trainer(MODEL, rollout, (text for text in QUESTIONS), eval=(text for text in QUESTIONS))
    assert (trainer.scenarios, trainer.options.eval) == (QUESTIONS, QUESTIONS)
    batches = iterate_dataset((text for text in QUESTIONS), 2, shuffle=False)
    assert [batch.items for batch in batches] == [QUESTIONS]


async def test_an_app_is_evaluated_on_a_generator(
    local_backend: offbook.LocalBackend, model: offbook.TrainableModel
) -> None:
    @trainable(model=model)
    async def app(question: str) -> float:
        completion = await model.openai_client().chat.completions.create(
            model=model.name, messages=[{"role": "user", "content": question}], max_tokens=1
        )
        return float(len(completion.choices))

    await model.register(local_backend)
    evaluation = await app.aevaluate(text for text in QUESTIONS)
    assert (evaluation.scored, evaluation.reward) == (2, 1.0)


def test_groups_and_candidates_are_refused_the_same_way() -> None:
    with pytest.raises(ConfigError, match="groups: a list of groups is needed, got None"):
        checked_groups(None)  # type: ignore[arg-type]  # user input


def test_scenarios_that_come_twice_are_shown_by_id() -> None:
    with pytest.raises(ConfigError, match=r"these appear twice: where-is-box-1-"):
        checked_scenarios(["Where is box 1?", "Where is box 1?"], "scenarios")
    with pytest.raises(ConfigError, match="these appear twice: box"):
        checked_scenarios([{"id": "box"}, {"id": "box", "question": "Where?"}], "scenarios")
