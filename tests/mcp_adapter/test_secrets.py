"""What a server is given in confidence is shown neither to the model nor in a message."""

from __future__ import annotations

import json
import sys
from typing import Any

import pytest
from mcp import types

from offbook_mcp import ServerPool, StdioServer, Target
from offbook_mcp.connection.servers import References, argument_secrets, names_secret, url_secrets, without
from offbook_mcp.tools.rollout_tools import ToolResult, as_tool_result
from tests.mcp_adapter.conftest import SERVERS


def masked(structured: Any, *secrets: str) -> ToolResult:
    """The converted result of a server that was started with these secrets."""
    references = References("shop")
    for number, secret in enumerate(secrets):
        references.resolve(secret, f"API_KEY_{number}")
    answer = types.CallToolResult(
        content=[types.TextContent(type="text", text=json.dumps(structured))], structured_content=structured
    )
    return as_tool_result(answer, 1_000, lambda text: without(text, references.secrets()))


def test_a_number_that_is_a_secret_is_masked_and_another_number_stays() -> None:
    result = masked({"account": 123456, "parts": [1234567, {"of": 123456}], "open": True}, "123456")
    assert result.structured == {"account": "***", "parts": [1234567, {"of": "***"}], "open": True}
    assert json.loads(result.text) == result.structured


@pytest.mark.parametrize("secret", ['quo"ted-1', "back\\slash", "schlüssel", "tab\tbed-1", "🔑🔑🔑🔑🔑🔑"])
def test_a_secret_that_json_escapes_is_masked(secret: str) -> None:
    result = masked({"result": {f"of {secret}": [f"it is {secret}."]}}, secret)
    assert result.structured == {"result": {"of ***": ["it is ***."]}}
    assert result.text == '{"of ***": ["it is ***."]}'


@pytest.mark.parametrize("secret", ['quo"ted-1', "back\\slash", "schlüssel"])
@pytest.mark.parametrize("ascii_only", [True, False])
def test_a_secret_is_masked_in_a_text_that_is_json(secret: str, ascii_only: bool) -> None:
    references = References("shop")
    references.resolve(secret, "PASSWORD")
    text = json.dumps({"password": secret}, ensure_ascii=ascii_only)
    assert without(text, references.secrets()) == '{"password": "***"}'


@pytest.mark.parametrize(
    "name",
    [
        "API_TOKEN",
        "GITHUB_TOKEN",
        "SLACK_TOKENS",
        "AUTH",
        "AUTHORIZATION",
        "Proxy-Authorization",
        "X-Api-Key",
        "X-Auth-Token",
        "Cookie",
        "apiKey",
        "accessToken",
        "APIKEY",
        "PGPASSWORD",
        "MYSQL_PWD",
        "SMTP_PASS",
        "GITHUB_PAT",
        "KEY",
        "AWS_SECRET_ACCESS_KEY",
        "client.secret",
        "npm_config__authToken",
        "SSH_PASSPHRASE",
        "API_KEY_2",
        "--api-key",
        "CREDENTIALS",
        "INPUT_API_KEY",
    ],
)
def test_the_name_of_a_secret_is_recognised(name: str) -> None:
    assert names_secret(name)


@pytest.mark.parametrize(
    "name",
    [
        "GIT_AUTHOR_NAME",
        "AUTHOR",
        "AUTHORITY",
        "MAX_TOKENS",
        "maxOutputTokens",
        "OPENAI_MAX_OUTPUT_TOKENS",
        "TOKEN_LIMIT",
        "TOKENS_MAX",
        "TOKENIZERS_PARALLELISM",
        "KEYBOARD",
        "MONKEY_ISLAND",
        "PASSENGER",
        "MIN_PASSWORD_LENGTH",
        "TOKEN_URL",
        "AUTH_TYPE",
        "PWD",
        "PATH",
        "COMPASS",
    ],
)
def test_a_name_that_only_contains_the_word_is_no_secret(name: str) -> None:
    assert not names_secret(name)


async def test_only_secret_variables_are_masked() -> None:
    variables = {"GIT_AUTHOR_NAME": "Ada Lovelace", "MAX_TOKENS": "100000", "API_TOKEN": "sk-100000"}
    command = ("-I", "-S", str(SERVERS / "misbehaving.py"), "environment")
    target = Target((StdioServer("odd", sys.executable, command, variables),), allow_all=True)
    async with ServerPool(target) as pool, pool.rollout() as tools:
        shown = json.loads((await tools.call("goad", {})).text)
    assert {name: shown[name] for name in variables} == {**variables, "API_TOKEN": "***"}


@pytest.mark.parametrize(
    "words",
    [
        ("--api-key", "s3cret-word"),
        ("--access-token=s3cret-word",),
        ("-e", "SHOP_TOKEN=s3cret-word"),
        ("--header", "Authorization: Bearer s3cret-word"),
        ("postgres://me:s3cret-word@db/shop",),
        ("sk-proj-s3cret-word0123456789",),
    ],
)
async def test_a_secret_among_the_arguments_of_a_command_is_masked(words: tuple[str, ...]) -> None:
    command = ("-I", "-S", str(SERVERS / "misbehaving.py"), "arguments", *words, "--page", "ordinary-word")
    target = Target((StdioServer("odd", sys.executable, command),), allow_all=True)
    assert "s3cret" not in target.shown() and "--page ordinary-word" in target.shown()
    async with ServerPool(target) as pool, pool.rollout() as tools:
        shown = (await tools.call("goad", {})).text
    assert "s3cret" not in shown and "***" in shown and json.loads(shown)[-2:] == ["--page", "ordinary-word"]


def test_a_flag_that_names_a_file_masks_nothing() -> None:
    assert argument_secrets(["shop", "--private-key", __file__, "--sort", "key=column", "C:\\shop"]) == []


def test_a_url_hides_its_password_and_its_secret_parameters() -> None:
    url = "https://me:s3cret-word@shop.example/mcp?api_key=s3cret-key&page=ordinary"
    assert url_secrets(url) == ["s3cret-key", "s3cret-word"]


@pytest.mark.parametrize("scheme", ["Bearer", "Basic", "Token", "ApiKey", "bearer", "Digest"])
def test_a_header_hides_its_credential_and_not_its_scheme(scheme: str) -> None:
    references = References("shop")
    assert references.resolve(f"{scheme} sk-123456", "Authorization") == f"{scheme} sk-123456"
    text = f"{scheme} of bad news: sk-123456, or {scheme} sk-123456"
    assert without(text, references.secrets()) == f"{scheme} of bad news: ***, or {scheme} ***"
