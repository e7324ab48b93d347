"""Recognises errors that a server returns as ordinary text, such as `Parser Error: ...` without the error flag."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import cast

from offbook.base.text import word_list
from offbook_mcp.tools.result_values import scalars_of
from offbook_mcp.tools.rollout_tools import ToolResult

from .harvest import words_of

NONSENSE = "zq-nothing-has-this-name"
"""A text that matches nothing: what a tool returns for it shows how the tool refuses."""
NO_ID = 987_654_321
_LONGEST = 1_000
"""Texts with more characters are content, whatever words they have."""
_STARTS = re.compile(
    r"\W*(?:[\w.]+ ){0,3}?(?:[\w.]*(?-i:Error|Exception|Failure)|error|exception|failure|fehler|erreur|ошибка)\b"
    r"(?: \[?\w+\]?){0,3}? ?(?:[:(-]|$)|\W*traceback \(most recent call last\)|\W*(?:错误|失败|エラー)",
    re.IGNORECASE,
)
_ERRNO = re.compile(r"\bE(NOENT|ISDIR|NOTDIR|ACCES|PERM|EXIST|INVAL)\b")
"""A file system error of Node."""
_SAYS = re.compile(
    r"\bnot (?:yet )?(?:authenticated|authori[sz]ed|logged in|configured|permitted|implemented)\b|\bunauthori[sz]ed\b"
    r"|\bauthentication (?:is )?(?:required|failed)\b|\b(?:please|must|need to) (?:log|sign) in\b"
    r"|\b(?:access|permission) (?:is )?denied\b|\bforbidden\b|\b(?:rate limit|quota) (?:was |is )?exceeded\b"
    r"|\btoo many requests\b|\binternal server error\b|\bconnection (?:refused|reset|failed)\b|\btimed out\b"
    r"|\b(?:an )?(?:error|exception) (?:has )?occurred\b|\bsyntax error\b|\bHTTP(?: status)?(?: code)?[: ]+[45]\d\d\b"
    r"|\bfailed to (?:connect|execute|fetch|find|get|load|open|parse|read|resolve|run|retrieve|process)\b"
    r"|\b(?:api[ _]key|credentials|token)\b.{0,30}\b(?:missing|required|not set|invalid|expired)\b"
    r"|\b(?:missing|invalid|no) (?:\w+ )?(?:api[ _]key|credentials|token)\b",
    re.IGNORECASE,
)
_COMPLAINS = re.compile(
    r"error|not found|no such|unknown|invalid|does not exist|doesn't exist|missing|cannot|can't|could not|unable|fail"
    r"|not (?:a )?(?:valid|supported|available|recogni[sz]ed|allowed|defined)|must be",
    re.IGNORECASE,
)
_ABOUT_ERRORS = frozenset(
    word_list(
        """check debug diagnostic error exception explain failure issue lint log problem status trace validate verify warning"""
    )
)
"""Words in the names of tools whose results are about errors."""
_ERROR_KEYS = {"error", "errors", "errormessage", "exception", "traceback"}
_NO_ERROR = {"", "0", "false", "none", "null", "[]", "{}", "no"}
_FAILURES = {"failed", "failure", "fail"}
_EXPLANATIONS = {"detail", "details", "message", "reason", "error"}


@dataclass(frozen=True)
class Control:
    """A tool's result for arguments that match nothing. Other results are compared with it."""

    arguments: Mapping[str, object] = field(hash=False)
    text: str


def reads_like_error(tool: str, arguments: Mapping[str, object], result: ToolResult, control: Control | None) -> bool:
    """Whether a result without the error flag is an error.

    A line that complains is one if the control has the same line. Texts of the arguments are ignored.
    """
    text, structure = result.text, result.values
    if _ERRNO.search(text) or (structure is not None and _reports_error(structure)):
        return True
    lines = masked(text, arguments)
    controlled = masked(control.text, control.arguments) if control is not None else []
    if not {line for line in controlled if _COMPLAINS.search(line)}.isdisjoint(lines):
        return True
    first = next((line for line in lines if line.strip()), "")
    if len(text) > _LONGEST or not _ABOUT_ERRORS.isdisjoint(words_of(tool)):
        return False
    short = len(lines) < 4 or structure is not None
    return bool(_STARTS.match(first)) or (short and bool(_SAYS.search(first)))


def masked(text: str, arguments: Mapping[str, object]) -> list[str]:
    """The lines of a text, with the values of the arguments replaced by `*`."""
    texts = {str(value) for value in scalars_of(arguments) if value is not None and str(value).strip(". ")}
    for value in sorted(texts, key=len, reverse=True):
        text = re.sub(rf"(?<!\w){re.escape(value)}(?!\w)", "*", text)
    return text.splitlines()


def _reports_error(structure: object) -> bool:
    """Whether an object, or each of a list, says so: `{"error": "..."}`, `{"success": false}`, `{"status": "error"}`."""
    if isinstance(structure, Mapping):
        named = {key.casefold().replace("_", ""): value for key, value in cast(Mapping[str, object], structure).items()}
        return any(_is_failure(key, value, named) for key, value in named.items())
    items = cast(Sequence[object], structure) if isinstance(structure, list) else ()
    return bool(items) and all(isinstance(item, Mapping) and _reports_error(cast(object, item)) for item in items)


def _is_failure(key: str, value: object, named: Mapping[str, object]) -> bool:
    """Whether one field reports an error. A job's `error` or `status: "failed"` among other facts is a fact about it."""
    if key in _ERROR_KEYS:
        return len(named) < 4 and str(value).casefold() not in _NO_ERROR
    if key in ("success", "ok", "succeeded"):
        return str(value).casefold() == "false"
    if key == "iserror":
        return value is True
    if key == "status" and isinstance(value, str):
        failed = value.casefold()
        return failed == "error" or (failed in _FAILURES and not _EXPLANATIONS.isdisjoint(named))
    return key in ("statuscode", "httpstatus") and re.fullmatch(r"[45]\d\d", str(value)) is not None
