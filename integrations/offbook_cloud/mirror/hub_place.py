"""A mirror in a model repository of the Hugging Face Hub. huggingface_hub reads the token, from HF_TOKEN or a login."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TypeVar

from huggingface_hub import CommitOperationAdd, CommitOperationDelete, HfApi, get_token
from huggingface_hub.errors import HfHubHTTPError, HFValidationError, RemoteEntryNotFoundError, RepositoryNotFoundError
from huggingface_hub.hf_api import RepoFile
from huggingface_hub.utils import disable_progress_bars, validate_repo_id

from offbook.base.errors import ConfigError, StoreError

NOT_MODELS = ("models", "datasets", "spaces", "buckets")
"""First words of other hf:// URLs."""
ANSWER_SECONDS = 120.0
SLOWEST = 100_000
"""Bytes a second below which a transfer counts as hung, after ANSWER_SECONDS: the client itself waits for ever."""
ATTEMPTS = 5
"""How often a step is committed while others commit to the repository."""
_T = TypeVar("_T")


class HubPlace:
    """The files below a folder of a repository, on its branch main: hf://OWNER/REPO[/FOLDER]; see `MirrorPlace`.

    A step is one commit.
    """

    def __init__(self, url: str) -> None:
        """Raises ConfigError for a URL that names no repository, and without a token."""
        self.url = url.rstrip("/")
        owner, _, rest = self.url.removeprefix("hf://").partition("/")
        name, _, self._folder = rest.partition("/")
        self._repo = f"{owner}/{name}"
        try:
            validate_repo_id(self._repo)
        except HFValidationError:
            name = ""
        if (
            owner in NOT_MODELS
            or not (owner and name)
            or {".", ".."} & set(self._folder.split("/"))
            or "//" in self._folder
        ):
            raise ConfigError(
                f"--mirror {url}: a model repository is written hf://OWNER/REPO or hf://OWNER/REPO/FOLDER"
            )
        if get_token() is None:
            raise ConfigError(f"--mirror {url}: there is no token: set HF_TOKEN, or log in with `hf auth login`")
        disable_progress_bars()
        self._api = HfApi(library_name="offbook")

    async def sizes(self) -> dict[str, int]:
        def listed() -> dict[str, int]:
            try:
                entries = list(self._api.list_repo_tree(self._repo, self._folder or None, recursive=True))
            except RemoteEntryNotFoundError:  # the folder, before its first file
                return {}
            files = {entry.path: entry.size for entry in entries if isinstance(entry, RepoFile)}
            return {path.removeprefix(self._path("")): size for path, size in files.items()}

        return await self._answer("list", "it", listed)

    async def read(self, path: str) -> bytes | None:
        return await self._answer("read", path, lambda: self._content(path))

    async def upload(self, path: str, source: Path) -> None:
        def uploaded() -> None:
            self._commit(path, [CommitOperationAdd(self._path(path), source)])

        await self._answer("write", path, uploaded, source)

    async def add(self, files: Mapping[str, Path], marker: str, content: bytes) -> bool:
        def added() -> bool:
            for attempt in range(ATTEMPTS):
                head = self._api.repo_info(self._repo).sha
                if self._api.file_exists(self._repo, self._path(marker), revision=head):
                    return False
                new = [CommitOperationAdd(self._path(path), source) for path, source in files.items()]
                try:
                    self._commit(marker, [*new, CommitOperationAdd(self._path(marker), content)], head)
                except HfHubHTTPError as error:
                    if error.response.status_code != 412 or attempt == ATTEMPTS - 1:  # 412: `head` is not the newest
                        raise
                    continue
                return True
            raise AssertionError("the last attempt returns or raises")

        return await self._answer("write", marker, added, *files.values())

    async def rename(self, path: str, target: str) -> None:
        def renamed() -> None:
            content = self._content(path)
            if content is not None:
                moved = CommitOperationAdd(self._path(target), content)
                self._commit(path, [moved, CommitOperationDelete(self._path(path))])

        await self._answer("rename", path, renamed)

    async def download(self, path: str, size: int, target: Path) -> None:
        def downloaded() -> None:
            with TemporaryDirectory(dir=target.parent) as scratch:
                self._fetched(path, scratch).replace(target)

        await self._answer("read", path, downloaded, size=size)

    def _path(self, path: str) -> str:
        return f"{self._folder}/{path}" if self._folder else path

    def _content(self, path: str) -> bytes | None:
        with TemporaryDirectory() as scratch:
            try:
                return self._fetched(path, scratch).read_bytes()
            except RemoteEntryNotFoundError:
                return None

    def _fetched(self, path: str, folder: str) -> Path:
        """A file that the client wrote below `folder`, and not to its cache."""
        return Path(self._api.hf_hub_download(self._repo, self._path(path), local_dir=folder))  # pyright: ignore[reportUnknownMemberType]  # tqdm's

    def _commit(
        self, path: str, operations: Sequence[CommitOperationAdd | CommitOperationDelete], parent: str | None = None
    ) -> None:
        message = f"offbook: {path}"
        self._api.create_commit(self._repo, operations, commit_message=message, parent_commit=parent)

    async def _answer(self, verb: str, path: str, request: Callable[[], _T], *sources: Path, size: int = 0) -> _T:
        """What a request returns. `sources`: files that it sends; `size`: bytes that it receives."""
        seconds = ANSWER_SECONDS
        try:
            seconds += (size + sum(source.stat().st_size for source in sources)) / SLOWEST
            return await asyncio.wait_for(_in_thread(request), seconds)
        except TimeoutError as error:
            raise StoreError(f"mirror {self.url}: could not {verb} {path}: no answer in {seconds:.0f} s") from error
        except Exception as error:  # the client raises errors of its own, of HTTP, of the system and of its extensions
            if gone := [source for source in sources if not source.exists()]:
                raise FileNotFoundError(str(gone[0])) from None
            if isinstance(error, OSError) and error.errno is not None and not isinstance(error, ConnectionError):
                raise  # of this machine's disk
            raise StoreError(f"mirror {self.url}: could not {verb} {path}: {self._message(error)}") from error

    def _message(self, error: Exception) -> str:
        """Why a request failed, in one sentence."""
        status = error.response.status_code if isinstance(error, HfHubHTTPError) else None
        told = error.server_message if isinstance(error, HfHubHTTPError) else None
        if isinstance(error, RepositoryNotFoundError):
            return (
                f"there is no repository {self._repo}, or the token may not see it: create it with `hf repos create "
                f"{self._repo} --private`"
            )
        if status == 401:
            return f"the Hub does not accept the token: {told or status}"
        if status == 403:
            return f"the token may not write to {self._repo}, or not read it: {told or status}"
        cause = error.__cause__ if isinstance(error, RuntimeError) else None  # "Error while uploading ... to the Hub."
        text = told or " ".join(str(cause or error).split()) or type(error).__name__
        return text if status is None else f"{status}: {text}"


async def _in_thread(request: Callable[[], _T]) -> _T:
    """Run a request in a thread that does not keep the process alive, since none can be stopped."""
    answer = Future[_T]()

    def run() -> None:
        answer.set_running_or_notify_cancel()
        try:
            answer.set_result(request())
        except BaseException as error:  # noqa: BLE001  # for whoever waits
            answer.set_exception(error)

    threading.Thread(target=run, name="offbook-mirror", daemon=True).start()
    return await asyncio.wrap_future(answer)
