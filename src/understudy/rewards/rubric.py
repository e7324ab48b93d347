"""A rubric for RULER, written by a language model from the task's description."""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Any

from pydantic import BaseModel, Field
from rich.console import Console

from understudy.config import default_dir
from understudy.errors import ConfigError
from understudy.llms import Llm

_REQUEST = """\
An AI agent is to be trained by reinforcement learning. A judge will compare several attempts at the same task and score each \
from 0 to 1 by a rubric, reading the recorded messages and nothing else. Write that rubric for the task below.

- 4 to 8 criteria, the most important first, each one sentence that two readers would apply alike.
- Say what separates a good attempt from a very good one, and what earns partial credit: attempts will be similar.
- Use only what the messages can show. Prefer what was done to what was claimed.
- Name the shortcuts by which an agent could look good without doing the task, and score them low.
- Give no points for length, politeness or formatting unless the task asks for them.

The task, as its owner describes it:
{description}"""


class Rubric(BaseModel):
    """A rubric."""

    criteria: list[str] = Field(description="the criteria, the most important first, one sentence each")


async def write_rubric(
    description: str, model: str | Llm = "openai/o3", *, file: str | Path | None = None, **llm_options: Any
) -> str:
    """A rubric for `Ruler(rubric=)`. It is printed, and kept in `file` (by default in `rubrics/` of the server's
    directory, named by a hash of the description): where that file exists, its text is the rubric and nobody is asked, so
    that it can be edited. Raises as `Llm.ask` does; ConfigError for an empty description, or file."""
    if not description.strip():
        raise ConfigError("write_rubric: description: say what the agent is to do")
    digest = hashlib.sha256(description.encode("utf-8", "replace")).hexdigest()[:12]
    place = default_dir() / "rubrics" / f"{digest}.md" if file is None else Path(file)
    if not place.exists():
        llm = model if isinstance(model, Llm) else Llm(model, **llm_options)
        request = [{"role": "user", "content": _REQUEST.replace("{description}", description)}]
        answer = await llm.ask(request, Rubric, purpose="rubric", check=_some)
        place.parent.mkdir(parents=True, exist_ok=True)
        lines = (" ".join(each.split()) for each in answer.value.criteria)
        place.write_text("".join(f"- {line}\n" for line in lines), encoding="utf-8")
    rubric = place.read_text(encoding="utf-8").strip("\n")
    if not rubric.strip():
        raise ConfigError(f"write_rubric: {place} is empty: delete it to have one written, or write one")
    Console().print(f"rubric ({place}):\n{rubric}", markup=False, highlight=False, soft_wrap=True)
    return rubric


def _some(rubric: Rubric) -> None:
    if not 2 <= sum(bool(each.strip()) for each in rubric.criteria) <= 20:
        raise ValueError(f"4 to 8 criteria are needed, got {len(rubric.criteria)}")
