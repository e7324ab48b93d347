"""Recognises a server's complaint that an environment variable or a key is missing, and says how to pass it on."""

from __future__ import annotations

import os
import re
from collections.abc import Collection

from .environment_references import names_secret

_NAME = re.compile(r"\b(?!ERR|INVALID|MISSING)[A-Z][A-Z0-9_]{3,}\b")
_ENVIRONMENT = re.compile(r"\benv(?:iron(?:ment)?)?\b|\bKeyError\b", re.IGNORECASE)
_ABSENT = re.compile(
    r"\b(?:not|never) (?:\w+ )?(?:found|defined|provided|configured|given|present|available|specified)\b|\bKeyError\b"
    r"|\b(?:set|missing|unset|undefined|required|requires?|needs?|must|expected|empty|please|no)\b",
    re.IGNORECASE,
)
_UNNAMED = re.compile(
    r"\b(?:missing|no|needs?|requires?|please \w+) (?:\w+ ){0,2}(?:api[ _-]?key|token|credential)s?\b"
    r"|\b(?:api[ _-]?key|token|credential|env(?:ironment)? variable)s? (?:\w+ )?(?:missing|required|not \w+|needed|undefined)\b"
    r"|\bvalidation error for \w*(?:Settings|Config)\b",  # pydantic-settings names the field, not the variable
    re.IGNORECASE,
)
_INHERITED = "a server inherits only a few variables, such as PATH"


def variable_hint(text: str, given: Collection[str] = ()) -> str:
    """What to do if a server's text says that an environment variable or a key is missing; "" if it says no such thing.

    `given` has the names of the variables that the server was started with.
    """
    for line in text.splitlines():
        written = [name for name in dict.fromkeys(_NAME.findall(line)) if "_" in name or names_secret(name)]
        names = [name for name in written if name not in given]
        if names and _ABSENT.search(line) and (_ENVIRONMENT.search(line) or any(names_secret(name) for name in names)):
            unset = " and ".join(name for name in names if name not in os.environ)
            begin = f"set {unset}, and add" if unset else "add"
            return f"{begin} {' '.join(f'--env {name}' for name in names)}: {_INHERITED}"
    return f"if it reads an environment variable, add --env NAME: {_INHERITED}" if _UNNAMED.search(text) else ""
