"""Tool executions of a rollout, timed by the adapter that ran or saw them.

They stand in `Trajectory.tool_runs` and, durable, in the server's `TrajectoryRecord.tool_runs`, in order of start. Times are
unix seconds of the client's clock; those of model calls are the server's.
"""

from __future__ import annotations

from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field, field_validator

UnixSeconds = Annotated[float, Field(ge=0, lt=253_402_300_800, allow_inf_nan=False)]
"""A time from 1970 to 9999, as calendars show it."""


class ToolRun(BaseModel):
    """One execution of a tool that a model call asked for by `tool_call_id`. A retried one is another run of the same id.
    Its arguments are in the call that asked, its result in the messages of the next call that was sent it."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    tool_call_id: str
    name: str
    started_at: UnixSeconds
    ended_at: UnixSeconds
    error: str | None = None  # what the tool raised or reported
    result: str | None = None  # its text, only where no recorded model call was sent it

    @field_validator("name", "error", "result", mode="before")
    @classmethod
    def _encodable(cls, text: object) -> object:
        """Lone surrogates, which UTF-8 does not have, become question marks."""
        return text.encode("utf-8", "replace").decode() if isinstance(text, str) else text
