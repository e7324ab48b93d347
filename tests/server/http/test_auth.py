"""Who may call: keys beyond loopback, the Host header on loopback."""

from __future__ import annotations

import base64
import stat
from pathlib import Path

import pytest

from offbook.base.errors import ConfigError
from offbook.server.http.auth import Guard, key_for


def test_on_loopback_without_a_key_nobody_needs_one(tmp_path: Path) -> None:
    assert key_for("127.0.0.1", None, tmp_path) is None
    assert Guard(None).refusal("/v1/models", {"host": "127.0.0.1:8000"}) is None
    assert Guard(None).refusal("/v1/models", {"host": "[::1]:8000"}) is None
    assert Guard(None).refusal("/v1/models", {"host": "[::1]"}) is None


@pytest.mark.parametrize("host", ["evil.com", "evil.com:8000", "", "127.0.0.1.evil.com:80"])
def test_a_page_that_rebinds_its_name_to_loopback_is_refused(host: str) -> None:
    refusal = Guard(None).refusal("/v1/models", {"host": host})
    assert refusal is not None
    assert refusal[:2] == (403, "host_not_allowed")
    assert "--api-key" in refusal[2]


def test_beyond_loopback_a_key_is_made_once_and_kept_for_the_owner_only(tmp_path: Path) -> None:
    first = key_for("0.0.0.0", None, tmp_path)
    assert first is not None and first.is_new and len(first.text) > 40
    assert stat.S_IMODE((tmp_path / "key").stat().st_mode) == 0o600
    again = key_for("0.0.0.0", None, tmp_path)
    assert again is not None and not again.is_new and again.text == first.text


def test_a_kept_key_that_others_may_read_is_closed_again(tmp_path: Path) -> None:
    (tmp_path / "key").write_text("secret\n")
    (tmp_path / "key").chmod(0o644)
    kept = key_for("10.0.0.1", None, tmp_path)
    assert kept is not None and kept.text == "secret"
    assert stat.S_IMODE((tmp_path / "key").stat().st_mode) == 0o600


@pytest.mark.parametrize("given", ["", "  ", "schlüssel", "a\nb"])
def test_a_key_that_no_header_can_carry_is_refused(tmp_path: Path, given: str) -> None:
    with pytest.raises(ConfigError, match="--api-key"):
        key_for("127.0.0.1", given, tmp_path)


def test_a_key_is_asked_for_everywhere_but_at_health() -> None:
    guard = Guard("secret")
    assert guard.refusal("/health", {"host": "any"}) is None
    for headers in ({}, {"authorization": ""}, {"authorization": "Bearer "}, {"authorization": "secret"}):
        refusal = guard.refusal("/v1/models", headers)
        assert refusal is not None and refusal[:2] == (401, "missing_api_key")
    wrong = guard.refusal("/v1/models", {"authorization": "Bearer secre"})
    assert wrong is not None and wrong[:2] == (401, "invalid_api_key")
    assert "secret" not in wrong[2]
    assert guard.refusal("/v1/models", {"authorization": "Bearer secret", "host": "gpu-box"}) is None


def test_a_browser_may_send_the_key_as_a_password() -> None:
    guard = Guard("se:cret")
    good = base64.b64encode(b"anyone:se:cret").decode()
    assert guard.refusal("/", {"authorization": f"Basic {good}"}) is None
    for bad in ("!!!", base64.b64encode(b"anyone:no").decode(), base64.b64encode(b"nocolon").decode()):
        assert guard.refusal("/", {"authorization": f"Basic {bad}"}) is not None
