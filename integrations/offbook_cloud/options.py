"""The options of `offbook serve` on a machine of a cloud."""

from __future__ import annotations

from pydantic import Field

from offbook.base.config import Options


class MirrorOptions(Options):
    """Where the copies are."""

    mirror: str | None = Field(
        default=None,
        description="place for copies of checkpoints: s3://, gs:// or az://BUCKET/PATH, or file:///FOLDER",
    )


class IdleOptions(Options):
    """When a server without work ends."""

    idle_exit: float | None = Field(
        default=None,
        gt=0,
        description="stop the server after this many minutes without calls, changes or training; None: never",
    )
