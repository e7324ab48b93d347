"""A server that misses an environment variable: the message says how to pass it on."""

from __future__ import annotations

import pytest

from offbook.base.errors import ConfigError
from offbook_mcp import McpStartError, ServerPool
from offbook_mcp.commands.scenarios import exploration_lines
from offbook_mcp.connection.environment_references import variable_hint
from offbook_mcp.scenarios.explore import explore
from offbook_mcp.scenarios.generate import generate_scenarios
from tests.mcp_adapter.conftest import misbehaving

GENERIC = "if it reads an environment variable, add --env NAME: a server inherits only a few variables, such as PATH"
ADD = "add --env SHOP_TOKEN: a server inherits only a few variables, such as PATH"


async def test_a_server_that_dies_without_its_variable_is_told_with_the_option(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SHOP_TOKEN", "known-here")
    with pytest.raises(McpStartError, match=f"; {ADD}; the end of its stderr:"):
        async with ServerPool(misbehaving("needs-variable")):
            pass


async def test_a_tool_that_answers_that_a_key_is_missing_is_told_with_the_option() -> None:
    target = misbehaving("needs-key", only=("goad",), allow=("goad",))
    line = f"odd seems to miss a variable: set SHOP_TOKEN, and {ADD}"
    async with ServerPool(target, ahead=0) as pool:
        exploration = await explore(pool)
        assert line in list(exploration_lines(pool, exploration))
        with pytest.raises(ConfigError, match=f"no call of goad worked: .*\n{line}\n"):
            await generate_scenarios(pool, exploration=exploration)


@pytest.mark.parametrize(
    "text",
    [
        "    raise KeyError(key) from None\nKeyError: 'SHOP_TOKEN'",  # os.environ["SHOP_TOKEN"]
        "SHOP_TOKEN environment variable is required",
        "Error: set SHOP_TOKEN first",
        "the api_key must be set, by the SHOP_TOKEN environment variable for instance",
        "Please provide SHOP_TOKEN",
    ],
)
def test_a_missing_variable_is_named(text: str) -> None:
    assert variable_hint(text) == f"set SHOP_TOKEN, and {ADD}"
    assert variable_hint(text, {"SHOP_TOKEN": "given"}) in ("", GENERIC)


def test_all_variables_of_a_line_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SLACK_BOT_TOKEN", "known-here")
    hint = variable_hint("Please set SLACK_BOT_TOKEN and SLACK_TEAM_ID environment variables")
    assert hint.startswith("set SLACK_TEAM_ID, and add --env SLACK_BOT_TOKEN --env SLACK_TEAM_ID: ")


@pytest.mark.parametrize(
    "text",
    [
        "API key is missing",
        "No API key provided",
        "Not authenticated: no credentials",
        "the token was not set",
        "pydantic_core.ValidationError: 1 validation error for Settings\napi_key\n  Field required",
    ],
)
def test_a_key_without_a_name_gets_the_option(text: str) -> None:
    assert variable_hint(text) == GENERIC


@pytest.mark.parametrize(
    "text",
    [
        "KeyError: 'title'",
        "KeyError: 'EURUSD'",
        "syntax error: expected token ','",
        "code: 'ERR_MODULE_NOT_FOUND'",
        "OPENAI_API_KEY is invalid",
        "HTTP 404: not found, see API_DOCS",
        "No module named 'shop'",
    ],
)
def test_other_errors_get_no_hint(text: str) -> None:
    assert variable_hint(text) == ""
