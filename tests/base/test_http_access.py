"""The rules of access that every HTTP server of ours shares."""

from __future__ import annotations

import base64
from pathlib import Path

import pytest

from offbook.base.errors import ConfigError
from offbook.base.http_access import is_loopback, key_for_host, key_option, key_refusal


@pytest.mark.parametrize("host", ["127.0.0.1", "127.8.8.8", "localhost", "LOCALHOST", "[::1]", "::1", "app.localhost"])
def test_addresses_of_this_machine_are_loopback(host: str) -> None:
    assert is_loopback(host)


@pytest.mark.parametrize(
    "host", ["0.0.0.0", "::", "10.0.0.1", "example.com", "localhost.example.com", "127.0.0.1.evil.com", ""]
)
def test_all_other_addresses_are_not(host: str) -> None:
    assert not is_loopback(host)


def test_beyond_this_machine_a_key_is_needed() -> None:
    assert key_for_host("127.0.0.1", None) is None
    assert key_for_host("127.0.0.1", "secret") == key_for_host("0.0.0.0", "secret") == "secret"
    with pytest.raises(ConfigError, match="other machines reach it: set a key"):
        key_for_host("0.0.0.0", None)


@pytest.mark.parametrize("key", ["", "  ", "schl\u00fcssel", "a\nb"])
def test_a_key_that_no_header_can_carry_is_refused(key: str) -> None:
    with pytest.raises(ConfigError, match="--api-key: must be printable ASCII"):
        key_for_host("127.0.0.1", key)


def test_a_key_comes_from_a_file_or_a_variable_and_an_argument_is_warned_about(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    file = tmp_path / "key"
    file.write_text("from-a-file\nanother\n")
    monkeypatch.setenv("OFFBOOK_API_KEY", "from-a-variable")
    assert (key_option(None), key_option(f"@{file}")) == ("from-a-variable", "from-a-file")
    assert caplog.text == ""
    assert key_option("sk-written") == "sk-written"
    assert (
        "can read it in `ps`; pass --api-key @FILE, or set OFFBOOK_API_KEY" in caplog.text and "sk-" not in caplog.text
    )
    with pytest.raises(ConfigError, match="--api-key @nowhere: the file cannot be read"):
        key_option("@nowhere")


def test_a_server_with_one_key_answers_who_sends_it_and_health() -> None:
    password = base64.b64encode(b"anyone:se:cret").decode()
    for authorization in ("Bearer se:cret", f"Basic {password}"):
        assert key_refusal("se:cret", "/v1/models", {"authorization": authorization, "host": "gpu-box"}) is None
    assert key_refusal("se:cret", "/health", {"host": "any"}) is None
    for headers in ({}, {"authorization": "se:cret"}, {"authorization": "Bearer secret"}, {"authorization": "Basic !"}):
        refusal = key_refusal("se:cret", "/v1/models", headers)
        assert refusal is not None and refusal[:2] == (401, "invalid_api_key")
        assert "se:cret" not in refusal[2]


@pytest.mark.parametrize("host", ["127.0.0.1:8000", "localhost:8000", "[::1]:8000", "[::1]"])
def test_a_server_without_a_key_answers_this_machine(host: str) -> None:
    assert key_refusal(None, "/v1/models", {"host": host}) is None


@pytest.mark.parametrize("host", ["evil.com", "evil.com:8000", "", "127.0.0.1.evil.com:80"])
def test_a_server_without_a_key_answers_no_other_name(host: str) -> None:
    for path in ("/v1/models", "/health"):
        refusal = key_refusal(None, path, {"host": host})
        assert refusal is not None and refusal[:2] == (403, "host_not_allowed")
