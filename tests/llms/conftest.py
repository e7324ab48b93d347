"""litellm is imported before anything is timed, and retries come quickly."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from offbook.llms import llm, provider
from offbook.testing import says, scripted_llm

from .asking import HELLO, llm_at


@pytest.fixture(autouse=True)
def short_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    """Milliseconds between attempts, where the provider does not say."""
    monkeypatch.setattr(llm, "FIRST_WAIT", 0.01)


@pytest.fixture(autouse=True)
def forgotten_schemas(monkeypatch: pytest.MonkeyPatch) -> None:
    """No endpoint is known to reject schemas."""
    monkeypatch.setattr(llm, "_without_schema", set())


@pytest.fixture(scope="session", autouse=True)
def litellm() -> Any:
    """The package, as the seam loads it, after a call on each of its client paths: the first takes long."""
    with scripted_llm([says("fine")]) as endpoint:
        for model in ("openai/judge", "hosted_vllm/judge"):
            asyncio.run(llm_at(endpoint, model).ask_text(HELLO))
    return provider.load()
