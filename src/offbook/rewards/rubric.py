"""Lets a language model write a rubric for RULER from a description of the task."""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Any

from pydantic import BaseModel, Field

from offbook.base.console import Terminal
from offbook.base.errors import ConfigError
from offbook.base.json_files import read_text
from offbook.base.server_options import default_dir
from offbook.llms import Llm

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
    """Write a rubric for `Ruler(rubric=)`, print it and return it.

    The rubric is stored in `file`. The default is a file in `rubrics/` of the server's directory, named by a hash of
    the description. If the file exists, its text is the rubric and no model is called, so you can edit it. Raises
    ConfigError for an
    empty description or file, and the errors of `Llm.ask`."""
    if not description.strip():
        raise ConfigError("write_rubric: description: say what the agent is to do")
    digest = hashlib.sha256(description.encode("utf-8", "replace")).hexdigest()[:12]
    path = default_dir() / "rubrics" / f"{digest}.md" if file is None else Path(file)
    if not path.exists():
        llm = model if isinstance(model, Llm) else Llm(model, **llm_options)
        request = [{"role": "user", "content": _REQUEST.replace("{description}", description)}]
        answer = await llm.ask(request, Rubric, purpose="rubric", check=_some)
        path.parent.mkdir(parents=True, exist_ok=True)
        lines = (" ".join(criterion.split()) for criterion in answer.value.criteria)
        path.write_text("".join(f"- {line}\n" for line in lines), encoding="utf-8")
    rubric = read_text(path).strip("\n")
    if not rubric.strip():
        raise ConfigError(f"write_rubric: {path} is empty: delete it to have one written, or write one")
    Terminal().print(f"rubric ({path}):\n{rubric}", markup=False, highlight=False, soft_wrap=True)
    return rubric


def _some(rubric: Rubric) -> None:
    if not 2 <= sum(bool(criterion.strip()) for criterion in rubric.criteria) <= 20:
        raise ValueError(f"4 to 8 criteria are needed, got {len(rubric.criteria)}")
