"""A mirror in a bucket or a folder. obstore reads the credentials from the environment."""

from __future__ import annotations

import atexit
import os
import re
import time
from collections.abc import Awaitable
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar
from urllib.parse import urlsplit

from offbook.base.errors import ConfigError, MissingExtraError, StoreError

try:
    from obstore.exceptions import AlreadyExistsError, BaseError
    from obstore.store import ObjectStore, from_url
except ModuleNotFoundError as error:
    raise MissingExtraError("obstore", "mirror") from error
if TYPE_CHECKING:
    from obstore.store import ClientConfig

BUCKETS = {"s3": "bucket", "gs": "bucket", "az": "container"}
"""What the host of a URL with this scheme names."""
RANGE = 8 * 2**20
"""Bytes of one request of a download, each with the time limit of a request."""
REQUEST_SECONDS = 60
_T = TypeVar("_T")
# A thread of obstore's may still be handing over the last answer. If it wants the interpreter while that ends, the process is
# aborted (pyo3-async-runtimes, issue 40): it gets the time before.
atexit.register(time.sleep, 0.2)


class BucketPlace:
    """The objects below a URL. Every method raises StoreError with the provider's own message if it fails."""

    def __init__(self, url: str) -> None:
        """Raises ConfigError for a URL that names no place that can be used."""
        self.url = url.rstrip("/")
        _check(url)
        unencrypted = os.environ.get("AWS_ENDPOINT_URL", "").startswith("http://")  # which the user wrote
        limit = timedelta(seconds=REQUEST_SECONDS)
        client: ClientConfig = {"timeout": limit, "allow_http": unencrypted}
        try:
            if url.startswith("file:"):
                self._store: ObjectStore = from_url(url, mkdir=True)
            else:
                self._store = from_url(
                    url, client_options=client, retry_config={"max_retries": 3, "retry_timeout": limit}
                )
        except (BaseError, OSError, ValueError) as error:
            raise ConfigError(f"--mirror {url}: {_message(error)}") from error

    async def sizes(self) -> dict[str, int]:
        """The bytes of every object by its path."""

        async def listed() -> dict[str, int]:
            stream = self._store.list_async()  # pyright: ignore[reportUnknownMemberType]  # Arrow's
            return {meta["path"]: meta["size"] async for batch in stream for meta in batch}

        return await self._answer("list", "it", listed())

    async def read(self, path: str) -> bytes | None:
        """The content of a small object; None if there is none."""

        async def content() -> bytes | None:
            try:
                answer = await self._store.get_async(path)
            except FileNotFoundError:
                return None
            return bytes(await answer.bytes_async())

        return await self._answer("read", path, content())

    async def upload(self, path: str, source: Path) -> None:
        """Write an object from a file. Nobody sees a part of it. Raises FileNotFoundError if the file is gone."""
        try:
            await self._answer("write", path, self._store.put_async(path, source))
        except StoreError:
            if not source.exists():
                raise FileNotFoundError(str(source)) from None
            raise

    async def create(self, path: str, content: bytes) -> bool:
        """Write a new object, and return whether there was none before; an existing one stays."""

        async def created() -> bool:
            try:
                await self._store.put_async(path, content, mode="create")
            except AlreadyExistsError:
                return False
            return True

        return await self._answer("write", path, created())

    async def rename(self, path: str, target: str) -> None:
        """Move an object."""
        await self._answer("rename", path, self._store.rename_async(path, target))

    async def download(self, path: str, size: int, target: Path) -> None:
        """Write an object of `size` bytes to a new file. Raises OSError if the file cannot be written."""
        with target.open("xb") as file:
            for start in range(0, size, RANGE):
                length = min(RANGE, size - start)
                part = await self._answer("read", path, self._store.get_range_async(path, start=start, length=length))
                file.write(bytes(part))

    async def _answer(self, verb: str, path: str, request: Awaitable[_T]) -> _T:
        try:
            return await request
        except (BaseError, OSError, ValueError) as error:
            raise StoreError(f"mirror {self.url}: could not {verb} {path}: {_message(error)}") from error


def _check(url: str) -> None:
    """Raise ConfigError for a URL that is no place."""
    parts = urlsplit(url)
    if parts.scheme not in (*BUCKETS, "file"):
        raise ConfigError(
            f"--mirror {url}: unknown scheme {parts.scheme!r}; use s3://BUCKET/PATH, gs://BUCKET/PATH, "
            "az://CONTAINER/PATH or file:///FOLDER"
        )
    if "@" in parts.netloc or parts.query:
        raise ConfigError(
            f"--mirror {parts.scheme}://...: a URL with credentials would be in logs; set the provider's environment variables"
        )
    if parts.scheme == "file" and (parts.netloc or not parts.path.strip("/")):
        raise ConfigError(f"--mirror {url}: a folder is written with its absolute path: file:///srv/mirror")
    if parts.scheme != "file" and not parts.netloc:
        raise ConfigError(f"--mirror {url}: it names no {BUCKETS[parts.scheme]}: {parts.scheme}://NAME/PATH")


def _message(error: Exception) -> str:
    """An error as the provider put it (S3's and Azure's answers are XML), without obstore's dump of its source."""
    text = " ".join(str(error).partition("\n\nDebug source")[0].split())
    told = [match[1] for name in ("Code", "Message") if (match := re.search(f"<{name}>([^<]+)</{name}>", text))]
    if "169.254.169.254" in text or "metadata.google" in text:
        text = f"no key in the environment variables, and none from the machine: {text}"
    return ": ".join(told) or text or type(error).__name__
