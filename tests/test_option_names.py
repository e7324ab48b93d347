"""An unknown option is answered, as ConfigError, with the right name and its place."""

from __future__ import annotations

import asyncio
import inspect
import re
from collections.abc import Callable
from typing import Any

import pytest
from pydantic import BaseModel, ValidationError

import offbook
from offbook.base.errors import ConfigError
from offbook.base.option_names import FOREIGN, names_checked, owned_options
from offbook.llms.llm import Llm
from offbook_art.utils import retry  # type: ignore[import-not-found]
from offbook_langgraph import trainable
from offbook_mcp import MCPTrainer

SCENARIOS = [{"id": "a"}]
MODEL = offbook.TrainableModel("agent", base_model="tiny", backend=offbook.RemoteBackend("http://127.0.0.1:9"))


async def rollout(model: offbook.TrainableModel, scenario: object) -> offbook.Trajectory:
    raise AssertionError


def app(scenario: object) -> float:
    raise AssertionError


def trainer(**options: Any) -> offbook.Trainer:
    return offbook.Trainer(MODEL, rollout, SCENARIOS, **options)


def awaited(function: Callable[..., Any]) -> Callable[..., Any]:
    return lambda **options: asyncio.run(function(**options))


def model(**options: Any) -> offbook.TrainableModel:
    return offbook.TrainableModel("agent", **{"base_model": "tiny", **options})


CALLS: dict[str, Callable[..., Any]] = {
    "TrainConfig": offbook.TrainConfig,
    "LoraOptions": offbook.LoraOptions,
    "EngineOptions": offbook.EngineOptions,
    "TrainableModel": model,
    "LocalBackend": offbook.LocalBackend,
    "RemoteBackend": lambda **options: offbook.RemoteBackend("http://127.0.0.1:9", **options),
    "Trainer": trainer,
    "Trainer.train": lambda **options: trainer().train(1, **options),
    "Trainer.atrain": awaited(lambda **options: trainer().atrain(1, **options)),
    "Trainer.evaluate": lambda **options: trainer().evaluate(**options),
    "Trainer.aevaluate": awaited(lambda **options: trainer().aevaluate(**options)),
    "model.train": awaited(lambda **options: MODEL.train([], **options)),
    "trainable": lambda **options: trainable(app, **options),
    "app.train": lambda **options: trainable(app, model=MODEL).train(SCENARIOS, **options),
    "app.evaluate": lambda **options: trainable(app, model=MODEL).evaluate(SCENARIOS, **options),
    "app.trained": lambda **options: trainable(app, model=MODEL).trained(**options),
    "Ruler": offbook.Ruler,
    "MCPTrainer": lambda **options: MCPTrainer("server.py", MODEL, **options),
    "MCPTrainer.train": lambda **options: MCPTrainer("server.py", MODEL).train(1, **options),
    "MCPTrainer.evaluate": lambda **options: MCPTrainer("server.py", MODEL).evaluate(**options),
    "gather_trajectory_groups": awaited(lambda **options: offbook.gather_trajectory_groups([], **options)),
    "gather_trajectories": awaited(lambda **options: offbook.gather_trajectories([], **options)),
    "trajectory_group_batches": lambda **options: offbook.trajectory_group_batches([], **options),
    "iterate_dataset": lambda **options: offbook.iterate_dataset([], **options),
    "retry": retry,
}


@pytest.mark.parametrize("where", sorted(set(CALLS) - {"Ruler"}))  # its other options are litellm's parameters
def test_an_unknown_option_of_everything_that_takes_options_is_a_config_error(where: str) -> None:
    with pytest.raises(ConfigError, match="there is no option 'zzz'; there are "):
        CALLS[where](zzz=1)


TRAINERS = "Trainer(), MCPTrainer() or app.train()"


@pytest.mark.parametrize(
    ("where", "option", "remedy"),
    [
        ("TrainConfig", "lr", "use learning_rate=..."),
        ("TrainConfig", "learning_rat", "did you mean 'learning_rate'?"),
        ("TrainConfig", "rank", "use lora=LoraOptions(r=...) in TrainableModel()"),
        ("TrainConfig", "group_size", f"use group_size=... in {TRAINERS}"),
        ("TrainConfig", "num_generations", f"use group_size=... in {TRAINERS}"),
        ("TrainConfig", "beta", "use kl_coef=..."),
        ("TrainConfig", "use_vllm", 'use LocalBackend(engine="vllm")'),
        ("LoraOptions", "rank", "use r=..."),
        ("EngineOptions", "devise", "did you mean 'device'?"),
        ("LocalBackend", "devise", "did you mean 'device'?"),
        ("LocalBackend", "lora_rank", "use lora=LoraOptions(r=...) in TrainableModel()"),
        ("LocalBackend", "start_time_out", "did you mean 'start_timeout'?"),
        ("RemoteBackend", "key", "did you mean 'api_key'?"),
        ("TrainableModel", "model", "use base_model=..."),
        ("TrainableModel", "rank", "use lora=LoraOptions(r=...) in TrainableModel()"),
        ("Trainer", "learning_rate", f"use config=TrainConfig(learning_rate=...) in {TRAINERS}"),
        ("Trainer", "learning_rat", f"did you mean config=TrainConfig(learning_rate=...) in {TRAINERS}?"),
        ("Trainer", "run_name", "use run=..."),
        ("Trainer.train", "learning_rate", f"use config=TrainConfig(learning_rate=...) in {TRAINERS}"),
        ("Trainer.atrain", "lr", f"use config=TrainConfig(learning_rate=...) in {TRAINERS}"),
        ("Trainer.evaluate", "rollout", "did you mean 'rollouts'?"),
        ("model.train", "lr", "use learning_rate=..."),
        ("model.train", "max_steps", "use steps=... in train()"),
        ("trainable", "rewards", "did you mean 'reward'?"),
        ("trainable", "sinks", f"use sinks=... in {TRAINERS}"),
        ("app.train", "learning_rate", f"use config=TrainConfig(learning_rate=...) in {TRAINERS}"),
        ("app.train", "max_steps", "use steps=..."),
        ("app.train", "select", "use select=... in trainable()"),
        ("app.evaluate", "rollout", "did you mean 'rollouts'?"),
        ("app.trained", "setp", "did you mean 'step'?"),
        ("Ruler", "rubrik", "did you mean 'rubric'?"),
        ("Ruler", "concurency", "did you mean 'concurrency'?"),
        ("Ruler", "base_url", "use api_base=..."),
        ("MCPTrainer", "learning_rate", f"use config=TrainConfig(learning_rate=...) in {TRAINERS}"),
        ("MCPTrainer", "max_turn", "did you mean 'max_turns'?"),
    ],
)
def test_an_option_is_answered_with_the_right_name_and_its_place(where: str, option: str, remedy: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(f"there is no option {option!r}: {remedy}") + "$"):
        CALLS[where](**{option: 1})


def test_options_of_llm_and_parameters_of_litellm_reach_the_judges_model() -> None:
    options = offbook.Ruler("openai/o3", temperature=0, api_base="http://box/v1").llm.options
    assert (options.litellm_parameters, options.api_base) == ({"temperature": 0}, "http://box/v1")


@pytest.mark.parametrize("where", ["Trainer", "trainable", "app.train", "MCPTrainer"])
@pytest.mark.parametrize("judge", ["openai/o3", Llm("openai/o3")])
def test_a_model_given_as_judge_is_answered_with_ruler(where: str, judge: object) -> None:
    with pytest.raises(
        ConfigError, match=re.escape(f"judge: {judge!r} is a model: write judge=offbook.Ruler({judge!r})")
    ):
        CALLS[where](judge=judge)


@pytest.mark.parametrize("where", ["Trainer", "app.train", "MCPTrainer"])
def test_a_dict_given_as_config_is_answered_with_train_config(where: str) -> None:
    with pytest.raises(ConfigError, match=re.escape("write config=TrainConfig(learning_rate=0.001, epochs=2)")):
        CALLS[where](config={"learning_rate": 1e-3, "epochs": 2})
    with pytest.raises(ConfigError, match="TrainConfig: there is no option 'lr': use learning_rate="):
        CALLS[where](config={"lr": 1e-3})


def test_a_url_given_as_backend_and_a_rank_given_as_lora_are_answered_with_the_object() -> None:
    with pytest.raises(ConfigError, match=re.escape("write backend=RemoteBackend('http://box')")):
        model(backend="http://box")
    with pytest.raises(ConfigError, match=re.escape("write lora=LoraOptions(r=...)")):
        model(lora=8)
    with pytest.raises(ConfigError, match="LoraOptions: there is no option 'rank': use r="):
        model(lora={"rank": 8})


def test_all_faults_of_an_option_set_are_in_one_error() -> None:
    with pytest.raises(ConfigError) as caught:
        offbook.TrainConfig(learning_rate=7, lr=1)  # type: ignore[call-arg]
    assert str(caught.value).splitlines() == [
        "TrainConfig.learning_rate: Input should be less than or equal to 1 (got 7)",
        "TrainConfig: there is no option 'lr': use learning_rate=...",
    ]


def test_an_option_set_inside_another_model_keeps_the_place_of_its_fault() -> None:
    class Request(BaseModel):
        config: offbook.TrainConfig

    with pytest.raises(ValidationError) as caught:
        Request.model_validate({"config": {"lr": 1, "epochs": 0}})
    assert [fault["loc"] for fault in caught.value.errors()] == [("config", "epochs"), ("config", "lr")]


def test_signatures_keep_their_names() -> None:
    assert list(inspect.signature(offbook.TrainConfig).parameters) == list(offbook.TrainConfig.model_fields)
    assert list(inspect.signature(offbook.RemoteBackend).parameters) == ["url", "api_key"]
    assert str(inspect.signature(offbook.Trainer.atrain)) == "(self, steps: 'int') -> 'TrainReport'"
    assert inspect.iscoroutinefunction(offbook.Trainer.atrain)


def test_what_the_function_itself_raises_stays_as_it_is() -> None:
    @names_checked("f")
    def f(number: int) -> int:
        return number + len(number)  # type: ignore[arg-type]

    with pytest.raises(TypeError, match="has no len"):
        f(number=1)
    with pytest.raises(TypeError, match="missing 1 required positional argument: 'number'"):
        f()  # type: ignore[call-arg]


def test_each_option_belongs_to_one_place_and_each_place_has_some() -> None:
    owned = owned_options()
    names = [name for options in owned.values() for name in options]
    assert len(names) == len(set(names)) and all(owned.values())
    assert {"learning_rate", "r", "group_size", "max_batch", "select", "max_turns", "rubric", "api_key"} <= set(names)


def test_every_hint_that_is_a_name_is_an_option_of_ours() -> None:
    own = {name for options in owned_options().values() for name in options}
    foreign = {name: ours for name, ours in FOREIGN.items() if not name.startswith(("Llm.", "Ruler."))}
    assert {name: ours for name, ours in foreign.items() if ours.isidentifier() and ours not in own} == {}
