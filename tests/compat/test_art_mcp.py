"""`art.mcp`: its names, and scenarios of exactly the number that was asked for, whatever the writer does."""

from __future__ import annotations

import json

import pytest

import offbook.compat.art as compat
from offbook.base.errors import LlmError
from offbook.testing import LlmReply, LlmRequest, fails, says, scripted_llm

art = compat.mcp  # type: ignore[attr-defined]
TOOLS = [art.MCPTool("search", "Finds notes", {"type": "object"})]


def tasks(*names: str, difficulty: int = 2) -> LlmReply:
    calls = [{"tool": "search", "arguments": "{}"}]
    return says(json.dumps({"scenarios": [{"task": name, "difficulty": difficulty, "calls": calls} for name in names]}))


async def generated(endpoint_url: str, count: int, monkeypatch: pytest.MonkeyPatch) -> object:
    return await art.generate_scenarios(
        TOOLS,
        num_scenarios=count,
        generator_model="openai/writer",
        generator_base_url=endpoint_url,
        generator_api_key="k",
    )


@pytest.fixture(autouse=True)
def _own_cache(monkeypatch: pytest.MonkeyPatch, tmp_path: object) -> None:
    monkeypatch.setenv("OFFBOOK_DIR", str(tmp_path))


async def test_too_few_are_topped_up_doubles_dropped_too_many_cut(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    script = [fails(500, headers={"retry-after": "0"}), tasks("a", "b"), tasks("b", " a"), tasks("c", "d", "e", "f")]
    with scripted_llm(script) as endpoint:
        made = await generated(endpoint.url, 5, monkeypatch)
        last = endpoint.requests[-1].messages[-1]["content"]
    assert [each.task for each in made] == ["a", "b", "c", "d", "e"]  # type: ignore[attr-defined]
    assert "Write exactly 3 tasks" in last and '[\n"a",\n"b"\n]' in last and "the same task as another (2)" in last
    assert "2/5:   5" in capsys.readouterr().out


async def test_resources_and_the_users_instructions_are_shown_to_the_writer() -> None:
    reply = says(json.dumps({"scenarios": [{"task": "Sum up the notes", "difficulty": 9, "calls": []}]}))
    with scripted_llm([reply]) as endpoint:
        made = await art.generate_scenarios(
            [],
            [{"uri": "notes://all", "name": "notes", "description": "Every note", "mimeType": "text/plain"}],
            num_scenarios=1,
            show_preview=False,
            custom_instructions="Write in French",
            generator_model="openai/writer",
            generator_base_url=endpoint.url,
            generator_api_key="k",
        )
        asked = endpoint.requests[-1].messages[-1]["content"]
    assert made.to_dicts() == [{"task": "Sum up the notes", "difficulty": 5}]
    assert '"notes://all": "notes: Every note"' in asked and "Above all: Write in French" in asked


async def test_a_writer_that_repeats_itself_is_a_clear_error(monkeypatch: pytest.MonkeyPatch) -> None:
    def repeats(request: LlmRequest) -> LlmReply:
        return tasks("a")

    with (
        scripted_llm(repeats) as endpoint,
        pytest.raises(LlmError, match="wrote 1 different scenarios of 3 in 4 questions"),
    ):
        await generated(endpoint.url, 3, monkeypatch)


async def test_nothing_to_write_about_is_an_error() -> None:
    with pytest.raises(ValueError, match="at least one tool or resource"):
        await art.generate_scenarios([])


def test_collections_split_filter_and_survive_json(capsys: pytest.CaptureFixture[str]) -> None:
    made = art.GeneratedScenarioCollection([art.GeneratedScenario(f"task {n}", n) for n in range(1, 6)])
    assert art.GeneratedScenarioCollection.from_json(made.to_json()).to_dicts() == made.to_dicts()
    assert art.GeneratedScenarioCollection.from_json(json.dumps(made.to_dicts())).to_dicts() == made.to_dicts()
    first, others = made.split(2)
    assert [each.difficulty for each in first] == [1, 2] and len(others) == 3
    assert [each.difficulty for each in made.filter_by_difficulty(2, 3)] == [2, 3]
    assert sorted(made.shuffle().to_dicts(), key=str) == made.to_dicts()
    assert made.get_summary()["avg_difficulty"] == 3
    made.preview(1)
    assert "task 1" in capsys.readouterr().out
    with pytest.raises(ValueError, match="there are 5 scenarios, 6"):
        made.split(6)
    with pytest.raises(ValueError, match="from 1 to 5 is needed, got 6"):
        art.GeneratedScenario("a", 6)


def test_tools_and_resources_are_read_as_mcp_writes_them() -> None:
    resource = art.MCPResource.from_dict({"uri": "a:b", "name": "n", "description": "", "mimeType": "text/plain"})
    assert resource.mime_type == "text/plain" and resource.to_dict()["mimeType"] == "text/plain"
    assert art.MCPTool.from_dict(TOOLS[0].to_dict()) == TOOLS[0]
    assert art.complete_task_tool["function"]["name"] == "complete_task"
