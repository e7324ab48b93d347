"""The bundled policies: small Qwen2 models that call tools, trained from random weights by `python -m
policies.make`."""

from pathlib import Path

__all__ = ["FOLDERS", "path"]

FOLDERS = {"tiny": "policy", "tiny-mcp": "mcp_policy"}
"""Name of a bundled base model -> its folder. `tiny` is for tools with one string argument and learns fastest.
`tiny-mcp` is for the tools of real MCP servers."""


def path(name: str = "tiny") -> Path:
    """The folder with a policy's config, weights, tokenizer and chat template. Raises KeyError for an unknown name."""
    return Path(__file__).parent / FOLDERS[name]
