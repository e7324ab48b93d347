"""Stands for `art.mcp`, of which nothing exists yet."""

from .names import ELSEWHERE, missing_name


def __getattr__(name: str) -> object:
    raise missing_name(__name__, name, ELSEWHERE["mcp"])
