"""A teacher elsewhere: a model on a vLLM server, written openai/NAME?api_base=URL."""

from __future__ import annotations

from dataclasses import dataclass
from urllib.parse import parse_qsl, urlsplit

from .errors import ConfigError

_MARK = "?api_base="


@dataclass(frozen=True)
class TeacherEndpoint:
    """`model` as the server names it; `root`: the server's URL without /v1, since vLLM's /tokenize lies beside it."""

    model: str
    root: str


def teacher_endpoint(teacher: str) -> TeacherEndpoint | None:
    """The endpoint that a teacher's name means; None for a model of the server that trains. Raises ConfigError.

    >>> teacher_endpoint("openai/big?api_base=http://gpu:8000/v1")
    TeacherEndpoint(model='big', root='http://gpu:8000')
    >>> teacher_endpoint("expert@12") is None
    True
    """
    if _MARK not in teacher:
        return None
    name, _, query = teacher.partition("?")
    provider, _, model = name.partition("/")
    options = dict(parse_qsl(query, keep_blank_values=True))
    root = options.pop("api_base", "").rstrip("/")
    try:
        valid = urlsplit(root).scheme in ("http", "https") and bool(urlsplit(root).hostname)
    except ValueError:  # such as an IPv6 address that does not end
        valid = False
    if provider != "openai" or not model or options or not valid:
        raise ConfigError(
            f"teacher {teacher!r:.300}: write openai/NAME?api_base=URL, with the http URL of a vLLM server"
        )
    return TeacherEndpoint(model, root.removesuffix("/v1"))
