"""A server's mirror: the newest steps are pulled before it starts, and every checkpoint is uploaded while it runs."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any, ClassVar

from offbook.base.errors import StoreError
from offbook.base.server_options import ServerOptions
from offbook.base.terminal import echo
from offbook.server.models.registry import ServedModel
from offbook.server.wing import ServerDoor, ServerWing

from .options import MirrorOptions

if TYPE_CHECKING:  # needs the extra `mirror`
    from .uploads import MirrorUploads


class MirrorWing(ServerWing):
    """`serve --mirror`. No step waits for the place."""

    name: ClassVar[str] = "mirror"

    def __init__(self, options: MirrorOptions, server: ServerDoor) -> None:
        super().__init__(options, server)
        self._uploads: MirrorUploads | None = None

    @classmethod
    def wanted(cls, options: Any) -> bool:
        """With --mirror."""
        return isinstance(options, MirrorOptions) and options.mirror is not None

    @classmethod
    def prepare(cls, options: MirrorOptions, server: ServerOptions) -> None:
        """Pull the steps that are newer at the mirror. Raises ConfigError, MissingExtraError, StoreError."""
        from .place import BucketPlace  # needs the extra `mirror`
        from .pulls import pull

        url = str(options.mirror)
        try:
            pulled = asyncio.run(pull(server.dir, BucketPlace(url)))
        except StoreError as error:
            raise StoreError(
                f"{error}. Which step is the newest is unknown, so the server does not start; without --mirror it starts "
                "from what its directory has"
            ) from error
        for path in pulled:
            echo(f"Pulled {path} from {url}")

    async def open(self) -> None:
        """Begin to upload."""
        from .place import BucketPlace  # needs the extra `mirror`
        from .uploads import MirrorUploads

        place = BucketPlace(self.options.mirror)
        self._uploads = MirrorUploads(place, self.server.options.dir, self.server.models.registry)
        self._uploads.start()

    def model_changed(self) -> None:
        """Upload now."""
        if self._uploads is not None:
            self._uploads.changed()

    def steps_held(self, model: ServedModel) -> int:
        """Steps that are still to be uploaded: all, until the place was listed."""
        behind = None if self._uploads is None else self._uploads.steps_behind(model)
        return model.step if behind is None else behind

    async def close(self, deadline: float) -> None:
        """Upload what is left."""
        if self._uploads is not None:
            await self._uploads.finish(deadline)
