"""The question that most tests ask."""

from __future__ import annotations

from typing import Any

from pydantic import BaseModel, ConfigDict

from offbook.llms import Llm
from offbook.testing import ScriptedLlm

GOOD = '{"score": 0.5}'
HELLO = [{"role": "user", "content": "how good is it?"}]


class Verdict(BaseModel):
    model_config = ConfigDict(extra="forbid")

    score: float


def llm_at(endpoint: ScriptedLlm, model: str = "openai/judge", **options: Any) -> Llm:
    """An Llm without a cache, unless one is given."""
    return Llm(model, **{"api_base": endpoint.url, "cache": None, "timeout": 20.0, "retries": 3, **options})
