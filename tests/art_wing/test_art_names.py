"""Names of OpenPipe ART: those that exist here, and what the others are answered with."""

from __future__ import annotations

import gc
import importlib
import re
from typing import Any

import pytest
from openai.types.chat import ChatCompletion

import offbook
import offbook_art as compat
from offbook.base.errors import ConfigError, RolloutError
from offbook_art import ELSEWHERE, MODULES
from offbook_art.guided_completion import get_guided_completion_params  # type: ignore[import-not-found]

art: Any = compat  # names of another library have no static type


@pytest.mark.parametrize("name", ELSEWHERE)
def test_an_old_name_says_what_to_use_as_an_attribute_and_in_a_from_import(name: str) -> None:
    with pytest.raises(AttributeError) as attribute:
        getattr(art, name)
    with pytest.raises(ImportError) as imported:
        exec(f"from offbook_art import {name}", {})
    assert str(attribute.value) == str(imported.value) == f"'offbook_art' has no {name!r}: {ELSEWHERE[name]}"


def test_modules_of_art_have_the_names_of_the_package() -> None:
    for module in MODULES:
        assert importlib.import_module(f"offbook_art.{module}").TrainableModel is art.TrainableModel
    assert issubclass(art.LocalBackend, art.Backend) and art.LocalTrainResult is offbook.TrainResult
    assert art.local.LocalBackend is offbook.LocalBackend and art.dev.TrainConfig() == {}
    with pytest.raises(AttributeError, match=r"module 'offbook_art' has no attribute 'nothing'$"):
        art.nothing  # noqa: B018


@pytest.mark.parametrize("line", ["import offbook_art.nothing", "import offbook_art.utils.nothing"])
def test_a_module_that_art_has_not_is_not_found(line: str) -> None:
    with pytest.raises(ModuleNotFoundError, match=r"No module named 'offbook_art.*nothing'"):
        exec(line, {})


def test_a_function_of_art_stays_callable_after_its_module_was_imported() -> None:
    from offbook_art.auto_trajectory import auto_trajectory  # type: ignore[import-not-found]
    from offbook_art.utils import retry  # type: ignore[import-not-found]
    from offbook_art.utils.retry import retry as same  # type: ignore[import-not-found]

    lazy: Any = compat
    assert lazy.auto_trajectory() is auto_trajectory() is None and retry is same


ART_BATCHES = {
    "max_batch_exceptions": "use max_exceptions=",
    "max_concurrent_batches": "use prefetch, one less",
    "skip_batches": "use groups[skipped * batch_size:]",
    "pbar_total_completion_tokens": "use nothing",
}


@pytest.mark.parametrize(("option", "says"), ART_BATCHES.items())
async def test_a_keyword_of_arts_batches_says_what_to_use_and_leaves_no_coroutine_behind(
    option: str, says: str, recwarn: pytest.WarningsRecorder
) -> None:
    async def rollout() -> offbook.Trajectory:
        return offbook.Trajectory(reward=1.0)

    async def group() -> offbook.TrajectoryGroup:
        return offbook.TrajectoryGroup([rollout()])

    def groups() -> list[Any]:
        return [offbook.TrajectoryGroup(rollout() for _ in range(2)), group()]

    with pytest.raises(ConfigError, match=re.escape(f"there is no option {option!r}: {says}")):
        art.trajectory_group_batches(groups(), batch_size=1, **{option: 1})
    with pytest.raises(ConfigError, match="max_exceptions"):
        await art.gather_trajectory_groups(groups(), max_exceptions=-1)
    with pytest.raises(ConfigError, match="expected a TrajectoryGroup"):
        await art.gather_trajectory_groups([*groups(), "none"])
    with pytest.raises(ConfigError, match="retries"):
        await art.gather_trajectory_groups(groups(), retries=1)
    async for _ in art.trajectory_group_batches(groups(), batch_size=1, prefetch=0):
        break
    gc.collect()
    assert [str(warning.message) for warning in recwarn] == []


async def test_what_arts_models_take_and_ours_do_not_is_refused_with_what_to_use() -> None:
    assert await art.Model("judge").get_step() == 0
    with pytest.raises(ConfigError, match="use project="):
        art.Model("judge", entity="me")
    trained = art.TrainableModel("agent", base_model="tiny")
    with pytest.raises(ConfigError, match="use LocalBackend"):
        await trained.register(None, _openai_client_config={})


def test_rulers_functions_are_where_users_of_the_other_library_import_them() -> None:
    from offbook import ruler, ruler_score_group
    from offbook.rewards import ruler_score_group as ours
    from offbook_art.rewards import ruler as theirs  # type: ignore[import-not-found]
    from offbook_art.rewards import ruler_score_group as their_group  # type: ignore[import-not-found]
    from offbook_art.rewards.ruler import DEFAULT_RUBRIC  # type: ignore[import-not-found]

    assert DEFAULT_RUBRIC is art.rewards.DEFAULT_RUBRIC and theirs is ruler and their_group is ours is ruler_score_group
    assert art.rewards.ruler is ruler


@pytest.mark.parametrize(
    ("use", "says"),
    [
        (lambda: art.Backend(base_url="http://x:7999"), r"use RemoteBackend\(url\), or LocalBackend\(\)"),
        (lambda: art.LocalBackend(remote_server_url="http://x"), r"no option 'remote_server_url': use RemoteBackend\(url\)"),
        (lambda: art.TrainableModel("a", base_model="tiny", remote_server_url="x"), r"use backend=RemoteBackend\(url\)"),
    ],
)  # fmt: skip
def test_what_cannot_be_done_here_says_so_when_it_is_used(use: Any, says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        use()


@pytest.mark.parametrize(("groups", "named"), [(None, None), ([], [])])
async def test_the_groups_of_a_step_are_given_once(groups: Any, named: Any) -> None:
    model = art.TrainableModel("agent", base_model="tiny", backend=art.RemoteBackend("http://127.0.0.1:9"))
    with pytest.raises(ConfigError, match=r"^groups: "):
        await model.train(groups, trajectory_groups=named)


async def test_a_yielded_trajectory_is_captured_and_outside_nothing_happens() -> None:
    async def answer(text: str) -> str:
        art.yield_trajectory(art.Trajectory(reward=len(text)))
        return text

    assert await answer("for the user") == "for the user"
    first, second = await art.gather_trajectories(art.capture_yielded_trajectory(answer(text)) for text in ("a", "abc"))
    assert (first.reward, second.reward) == (1, 3)

    async def silent() -> None: ...

    with pytest.raises(RolloutError, match="no trajectory was yielded"):
        await art.capture_yielded_trajectory(silent())


def completion(message: dict[str, Any]) -> ChatCompletion:
    choice = {"index": 0, "finish_reason": "stop", "message": {"role": "assistant", **message}}
    body = {"id": "x", "object": "chat.completion", "created": 0, "model": "m", "choices": [choice]}
    return ChatCompletion.model_validate(body)


def test_a_teachers_answer_becomes_what_a_student_must_say() -> None:
    schema = {"type": "object", "properties": {"to": {"type": "string"}}}
    tools = [{"type": "function", "function": {"name": name, "parameters": schema}} for name in ("stay", "move")]
    assert get_guided_completion_params(completion({"content": "A1"})) == (["A1"], None, None)
    call = {"id": "c", "type": "function", "function": {"name": "move", "arguments": '{"to": "A1"}'}}
    choice, tool_choice, fixed = get_guided_completion_params(
        completion({"content": None, "tool_calls": [call]}), tools
    )
    assert choice is None and tool_choice == {"type": "function", "function": {"name": "move"}} and fixed is not None
    assert fixed[0]["function"]["parameters"]["properties"] == {"to": {"enum": ["A1"]}}
    with pytest.raises(ConfigError, match="base_tools: the completion calls 'move'"):
        get_guided_completion_params(completion({"content": None, "tool_calls": [call]}))
    with pytest.raises(ConfigError, match="no text and no tool call"):
        get_guided_completion_params(completion({"content": None}))
