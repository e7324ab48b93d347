"""A task says which tool, which values and which results it means, and says it for no other task."""

from __future__ import annotations

import random
from collections.abc import Callable

import pytest
from mcp.server.mcpserver import MCPServer
from mcp.types import ToolAnnotations

from offbook_mcp import ScenarioSet, Target
from offbook_mcp.connection.servers import InProcessServer
from offbook_mcp.scenarios import execution
from offbook_mcp.scenarios.generate import generate_scenarios
from offbook_mcp.scenarios.sampler import DraftCall, Pick, Plan
from offbook_mcp.scenarios.wording import actions, phrases_of, says_nothing, task_of, tells_its_calls
from offbook_mcp.tools.tool import Schema
from tests.mcp_adapter.servers import shapes_server
from tests.mcp_adapter.test_drawn_arguments import tool_of, with_property

READS = ToolAnnotations(read_only_hint=True)


@pytest.fixture(autouse=True)
def _runs_close_together(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(execution, "APART_SECONDS", 0.01)


async def test_tools_of_the_same_name_are_told_apart_by_their_servers() -> None:
    servers = [InProcessServer(name, shapes_server.make(shapes_server.json_lines)) for name in ("harbour", "airport")]
    scenarios = await generate_scenarios(Target(tuple(servers)), count=24)
    for each in scenarios.scenarios:
        assert all(call.tool.split("_")[0] in each.task for call in each.calls)


def people_server() -> MCPServer:
    server = MCPServer("people")
    people = [
        {"person": f"{name}-{number}", "department": f"{name} works", "room": f"R{number}{number}"}
        for number, name in enumerate(["ada", "bob", "cleo", "dan", "eve", "finn"], 1)
    ]

    @server.tool(annotations=READS)
    def list_people() -> list[str]:
        """List the people."""
        return [person["person"] for person in people]

    @server.tool(annotations=READS)
    def get_person(person: str) -> dict[str, str]:
        """Get a person."""
        return next(known for known in people if known["person"] == person)

    return server


async def people(count: int = 30) -> ScenarioSet:
    return await generate_scenarios(Target.parse(people_server()), count=count)


async def test_a_task_with_several_calls_says_of_which_answer_it_wants_a_value() -> None:
    several = [each for each in (await people()).scenarios if each.recipe != "single" and each.answer]
    assert several
    for each in several:
        asked = ("from each answer", "from the first answer", "from the second answer", "from the third answer")
        assert any(text in each.task for text in (*asked, "from the last answer", "results", "all results", "answers"))


def make_sized(size: int) -> Callable[[object], MCPServer]:
    def make(folder: object = None) -> MCPServer:
        server = MCPServer("small")
        known = {name: 100 + number for number, name in enumerate(["north", "south", "east", "west"][:size])}

        @server.tool(annotations=READS, description=f"Count a shelf. Shelves: {', '.join(known)}")
        def count_shelf(shelf: str) -> str:
            return f"{known[shelf]} books"

        return server

    return make


@pytest.mark.parametrize("size", [2, 3, 4])
async def test_a_tool_with_few_values_has_some_held_out(size: int) -> None:
    scenarios = await generate_scenarios(Target.parse(make_sized(size)), count=4)
    assert scenarios.eval and scenarios.train


async def test_no_word_is_a_unit_or_a_city_for_a_server_that_takes_all() -> None:
    server = MCPServer("lenient")

    @server.tool(annotations=READS)
    def convert_length(length: int, from_unit: str, to_unit: str) -> str:
        """Convert a length."""
        return f"{length * 2} {to_unit} for {length} {from_unit}"

    @server.tool(annotations=READS)
    def get_weather(city: str, unit: str) -> str:
        """Get the weather of a city."""
        return f"{len(city) * 3} degrees {unit} in {city}"

    scenarios = await generate_scenarios(Target.parse(server), count=20)
    calls = [call for each in scenarios.scenarios for call in each.calls]
    assert {call.arguments["unit"] for call in calls if "unit" in call.arguments} <= {"celsius", "fahrenheit"}
    assert {call.arguments["to_unit"] for call in calls if "to_unit" in call.arguments} <= {"km", "m", "cm", "mm"}
    assert all(str(call.arguments["city"]).istitle() for call in calls if "city" in call.arguments)


@pytest.mark.parametrize(
    ("name", "description", "phrases"),
    [
        ("fn1", "Returns the price of a product.", ["return the price of a product"]),
        ("tool_a", "The stock of a warehouse.", ["get the stock of a warehouse"]),
        ("查询价格", "查询商品的价格。", ["查询商品的价格"]),
        ("查询价格", "", ["show the 查询价格", "get the 查询价格"]),
        ("größe_der_kiste", "", ["show the größe der kiste", "get the größe der kiste"]),
        ("get_price", "", ["get price"]),
    ],
)
def test_a_description_is_the_tasks_words_where_the_name_says_nothing(
    name: str, description: str, phrases: list[str]
) -> None:
    assert actions(tool_of({"type": "object"}, name, description)) == phrases


def test_names_that_say_nothing() -> None:
    assert all(map(says_nothing, ["x", "arg1", "tool_2", "fnA", "查询", "do_op"]))
    assert not any(map(says_nothing, ["price", "getWeather", "größe", "size_x"]))


def worded(schema: Schema, arguments: dict[str, object], *picks: Pick) -> str:
    tool = tool_of(schema, "find_part")
    plan = Plan((DraftCall(tool, arguments, picks),))
    task = task_of(plan, {}, random.Random(0), phrases_of([tool]))
    assert tells_its_calls(task, plan)
    return task


def test_an_arguments_description_names_it_where_its_name_says_nothing() -> None:
    schema: Schema = {"type": "string", "description": "The part's number, such as 41"}
    assert "part's number bolt-7" in worded(with_property(schema, "x"), {"x": "bolt-7"})
    first: Schema = {"type": "integer", "description": "First number"}
    assert "first number 4" in worded(with_property(first, "a"), {"a": 4})
    assert "serial bolt-7" in worded(with_property(schema, "serial"), {"serial": "bolt-7"})
