"""Errors of other libraries in messages: their type and text, and never a key or a repr."""

from __future__ import annotations

import builtins
import logging
import re
from pathlib import Path
from typing import Any

import aiohttp
import httpx
import pytest
from multidict import CIMultiDict, CIMultiDictProxy
from yarl import URL

from offbook.base.redaction import error_text, guard_own_log, protect

ROOT = Path(__file__).parents[2]
KEY = "pk-4821/never+shown=77"
BOUND = re.compile(r"except (?P<kinds>.+?) as (?P<name>\w+):(?P<rest>.*(?:\n(?!\s*except ).*){0,14})")
OURS = re.compile(r"[\w.]*(?:ConfigError|LlmError|OffbookError|Cancelled(?:Error)?|ValidationError)|binascii\.Error")


def test_an_error_is_shown_by_its_type_and_one_bounded_line_without_keys() -> None:
    headers = CIMultiDictProxy(CIMultiDict({"x-api-key": KEY}))
    asked = aiohttp.RequestInfo(URL("http://127.0.0.1"), "POST", headers, URL("http://127.0.0.1"))
    error = aiohttp.ClientResponseError(asked, (), status=400, message="Bad\nstatus line", headers=headers)
    assert KEY in repr(error)
    assert error_text(error) == "ClientResponseError: 400, message='Bad\\nstatus line', url='http://127.0.0.1'"
    protect([KEY])
    assert error_text(httpx.ConnectError(f"no {KEY}\nhere")) == "ConnectError: no [redacted key] here"
    assert error_text(ExceptionGroup("two", [ValueError(), OSError("x")])) == "ValueError"
    assert len(error_text(ValueError("x" * 10**6))) < 600


class Wordless(Exception):
    def __str__(self) -> str:
        raise RuntimeError("no words")


def test_an_error_whose_own_text_raises_is_shown_by_its_type() -> None:
    assert error_text(Wordless()) == "Wordless"


def test_a_servers_log_has_no_key_in_messages_and_tracebacks(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    protect([KEY])
    handler = logging.StreamHandler()
    lines: list[str] = []
    monkeypatch.setattr(handler, "emit", lambda record: lines.append(handler.format(record)))
    monkeypatch.setattr(logging.getLogger(), "handlers", [handler])
    guard_own_log()
    try:
        try:
            raise ValueError(KEY)
        except ValueError as error:
            raise RuntimeError("the call failed") from error
    except RuntimeError:
        logging.getLogger("some_library").exception("%s failed", f"POST {KEY}")
    assert "the call failed" in lines[0] and "ValueError: [redacted key]" in lines[0] and KEY not in lines[0]


def reprs_of_foreign_errors(source: str) -> list[str]:
    """The reprs, in an `except` block's first lines, of errors that are not Python's own or this package's."""
    shown: list[str] = []
    for block in BOUND.finditer(source):
        kinds = [kind for kind in re.split(r"[(), *]+", block["kinds"]) if kind]
        if not all(map(_plain, kinds)):
            name = block["name"]
            shown += re.findall(rf"\b{name}!r|repr\({name}\)|%r[^%\n\"]*\",[^\n]*\b{name}\)", block["rest"])
    return shown


def _plain(kind: str) -> bool:
    found: Any = getattr(builtins, kind, None)
    own = isinstance(found, type) and found not in (Exception, BaseException, ExceptionGroup)
    return own or OURS.fullmatch(kind) is not None


def test_no_message_has_the_repr_of_another_librarys_error() -> None:
    assert reprs_of_foreign_errors('except httpx.HTTPError as lost:\n    log("%r", lost)') == ['%r", lost)']
    files = [file for folder in ("src", "integrations") for file in (ROOT / folder).rglob("*.py")]
    shown = {str(file.relative_to(ROOT)): reprs_of_foreign_errors(file.read_text("utf-8")) for file in files}
    assert {name: reprs for name, reprs in shown.items() if reprs} == {}
