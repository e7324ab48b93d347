"""The options of `offbook serve` for copies of checkpoints."""

from __future__ import annotations

from pydantic import Field

from offbook.base.config import Options


class MirrorOptions(Options):
    """Where the copies are."""

    mirror: str | None = Field(
        default=None,
        description="place for copies of checkpoints: s3://, gs:// or az://BUCKET/PATH, or file:///FOLDER",
    )
