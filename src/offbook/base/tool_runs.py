"""Executions of tools in a rollout, timed by the adapter that ran or observed them.

They are in `Trajectory.tool_runs` and, stored, in the server's `TrajectoryRecord.tool_runs`, ordered by start. Times
are unix seconds of the client's clock; those of model calls are of the server's."""

from __future__ import annotations

from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field, field_validator

from .plain_values import plain_text

UnixSeconds = Annotated[float, Field(ge=0, lt=253_402_300_800, allow_inf_nan=False)]
"""A time between 1970 and 9999."""


class ToolRun(BaseModel):
    """One execution of the tool call `tool_call_id`. A retry is another run with the same id.

    The arguments are in the model call that requested it. The result is in the messages of the next model call."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    tool_call_id: str
    name: str
    started_at: UnixSeconds
    ended_at: UnixSeconds
    error: str | None = None  # the error that the tool raised or reported
    result: str | None = None  # its text, if no recorded model call received it

    @field_validator("name", "error", "result", mode="before")
    @classmethod
    def _encodable(cls, text: object) -> object:
        """Replace lone surrogates, which UTF-8 cannot encode, by question marks."""
        return plain_text(text) if isinstance(text, str) else text
