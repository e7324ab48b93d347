"""The bundled tiny policy: a small Qwen2 model that calls tools, made from scratch by `python -m understudy.tiny.make`."""

from pathlib import Path

__all__ = ["path"]


def path() -> Path:
    """The folder with the policy's config, weights, tokenizer and chat template."""
    return Path(__file__).parent / "policy"
