"""A stand-in for the Hugging Face Hub over HTTP: the requests that huggingface_hub 1.x makes to commit and read files of a
model repository, with the Hub's statuses, headers and bodies. Large files go by LFS; there is no Xet."""

from __future__ import annotations

import base64
import hashlib
import json
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import parse_qs, unquote, urlsplit

PAGE = 5
"""Entries of one page of a tree; the Hub's have 1,000."""


def git_oid(content: bytes) -> str:
    return hashlib.sha1(b"blob %d\0" % len(content) + content).hexdigest()


@dataclass
class Repository:
    """A repository's branch main. `lfs`: paths whose content is in the large storage; `commits`: their messages."""

    files: dict[str, bytes] = field(default_factory=lambda: {".gitattributes": b"*.safetensors filter=lfs\n"})
    lfs: set[str] = field(default_factory=set[str])
    commits: list[str] = field(default_factory=lambda: ["initial commit"])

    @property
    def head(self) -> str:
        return hashlib.sha1(f"{len(self.commits)} {self.commits[-1]}".encode()).hexdigest()

    def write(self, message: str, files: dict[str, bytes]) -> None:
        """A commit of somebody else."""
        self.files |= files
        self.commits.append(message)


@dataclass
class Hub:
    """`tokens`: those that may read all repositories, and whether they may write. `before_commit` is called with each
    repository before a commit is looked at; `too_many` refuses commits by rate; `answers`: cleared, no request is answered. `cdn`:
    the large storage, on another host, so that a HEAD request is not sent on to it."""

    repositories: dict[str, Repository] = field(default_factory=dict[str, Repository])
    tokens: dict[str, bool] = field(default_factory=lambda: {"hf_write": True, "hf_read": False})
    storage: dict[str, bytes] = field(default_factory=dict[str, bytes])
    requests: list[str] = field(default_factory=list[str])
    before_commit: Callable[[Repository], object] = lambda repository: None
    too_many: bool = False
    answers: threading.Event = field(default_factory=threading.Event)
    url: str = ""
    cdn: str = ""


class Refused(Exception):
    """An answer of the Hub that is an error."""

    def __init__(self, status: int, message: str, code: str | None = None) -> None:
        super().__init__(message)
        self.status, self.message, self.code = status, message, code


class Handler(BaseHTTPRequestHandler):
    """Answers for `hub`."""

    protocol_version = "HTTP/1.1"
    hub: Hub

    def log_message(self, format: str, *args: Any) -> None:
        return

    def do_GET(self) -> None:
        self._answered()

    def do_HEAD(self) -> None:
        self._answered()

    def do_POST(self) -> None:
        self._answered()

    def do_PUT(self) -> None:
        self._answered()

    def _answered(self) -> None:
        self.body = self.rfile.read(int(self.headers.get("content-length") or 0))
        parts = urlsplit(self.path)
        words = [unquote(word) for word in parts.path.strip("/").split("/")]
        self.hub.requests.append(f"{self.command} {unquote(parts.path)}")
        self.hub.answers.wait(60)
        try:
            self._route(words, {name: values[0] for name, values in parse_qs(parts.query).items()})
        except Refused as refused:
            headers = {"X-Error-Message": refused.message} | ({"X-Error-Code": refused.code} if refused.code else {})
            self._send(refused.status, {"error": refused.message}, headers)

    def _route(self, words: list[str], query: dict[str, str]) -> None:
        match self.command, words:
            case "PUT", ["storage", oid]:  # the bucket's URL is signed: it takes no token
                assert "authorization" not in self.headers and hashlib.sha256(self.body).hexdigest() == oid
                self.hub.storage[oid] = self.body
                self._send(200, None)
            case "GET", ["storage", oid]:
                self._send(200, self.hub.storage[oid])
            case "POST", ["verify", oid]:
                assert json.loads(self.body) == {"oid": oid, "size": len(self.hub.storage[oid])}
                self._send(200, None)
            case "GET", ["api", "models", owner, name] | ["api", "models", owner, name, "revision", "main"]:
                repository = self._repository(owner, name)
                told = {"_id": "0", "id": f"{owner}/{name}", "modelId": f"{owner}/{name}", "sha": repository.head}
                self._send(200, {**told, "private": True, "tags": [], "downloads": 0, "likes": 0, "siblings": []})
            case "GET", ["api", "models", owner, name, "tree", "main", *folder]:
                self._tree(self._repository(owner, name), "/".join(folder), query)
            case "POST", ["api", "models", owner, name, "preupload", "main"]:
                self._preupload(self._repository(owner, name, writes=True))
            case "POST", [owner, git, "info", "lfs", "objects", "batch"]:
                self._lfs_batch(self._repository(owner, git.removesuffix(".git"), writes=True))
            case "POST", ["api", "models", owner, name, "commit", "main"]:
                self._commit(self._repository(owner, name, writes=True), f"{owner}/{name}")
            case "HEAD" | "GET", [owner, name, "resolve", revision, *path]:
                self._resolve(self._repository(owner, name), revision, "/".join(path))
            case "GET", ["api", "agent-harnesses"]:  # for the user agent; the client goes on without
                raise Refused(404, "Not found")
            case _:
                raise AssertionError(f"the stand-in has no {self.command} {self.path}")

    def _repository(self, owner: str, name: str, *, writes: bool = False) -> Repository:
        token = self.headers.get("authorization", "").removeprefix("Bearer ")
        if token and token not in self.hub.tokens:
            raise Refused(401, "Invalid credentials in Authorization header")
        repository = self.hub.repositories.get(f"{owner}/{name}")
        if repository is None or not token:
            raise Refused(404 if token else 401, "Repository not found", "RepoNotFound")
        if writes and not self.hub.tokens[token]:
            raise Refused(403, "Forbidden: you must use a write token to upload to a repository.")
        if writes and self.hub.too_many:
            raise Refused(429, "You have exceeded the rate limit for repository commits (128 per hour)")
        return repository

    def _tree(self, repository: Repository, folder: str, query: dict[str, str]) -> None:
        below = [path for path in sorted(repository.files) if path.startswith(f"{folder}/") or not folder]
        if not below:
            raise Refused(404, f'{folder} does not exist on "main"', "EntryNotFound")
        assert (query["recursive"].lower(), query["expand"].lower()) == ("true", "false")
        entries: list[dict[str, Any]] = []
        for path in below:
            parent = path.rpartition("/")[0]
            if parent and all(entry["path"] != parent for entry in entries):
                entries.append({"type": "directory", "oid": git_oid(b""), "size": 0, "path": parent})
            content = repository.files[path]
            entry = {"type": "file", "oid": git_oid(content), "size": len(content), "path": path}
            if path in repository.lfs:
                entry["lfs"] = {"oid": hashlib.sha256(content).hexdigest(), "size": len(content), "pointerSize": 134}
            entries.append(entry)
        start = int(query.get("cursor", 0))
        link = (
            f'<{self.hub.url}{urlsplit(self.path).path}?recursive=true&expand=false&cursor={start + PAGE}>; rel="next"'
        )
        more = {"Link": link} if start + PAGE < len(entries) else {}
        self._send(200, entries[start : start + PAGE], more)

    def _preupload(self, repository: Repository) -> None:
        files = [
            {
                "path": file["path"],
                "uploadMode": "lfs"
                if file["path"].endswith(".safetensors") or file["size"] > 10 * 2**20
                else "regular",
                "shouldIgnore": False,
                "oid": git_oid(repository.files[file["path"]]) if file["path"] in repository.files else None,
            }
            for file in json.loads(self.body)["files"]
        ]
        self._send(200, {"files": files, "commitOid": repository.head})

    def _lfs_batch(self, repository: Repository) -> None:
        asked = json.loads(self.body)
        assert (asked["operation"], asked["hash_algo"], "basic" in asked["transfers"]) == ("upload", "sha256", True)
        objects: list[dict[str, Any]] = []
        for file in asked["objects"]:
            actions = {"upload": {"href": f"{self.hub.cdn}/storage/{file['oid']}"}}
            actions["verify"] = {"href": f"{self.hub.url}/verify/{file['oid']}"}
            known = file["oid"] in self.hub.storage
            objects.append(file | ({} if known else {"authenticated": True, "actions": actions}))
        self._send(200, {"transfer": "basic", "objects": objects})

    def _commit(self, repository: Repository, repo: str) -> None:
        self.hub.before_commit(repository)
        head, *lines = [json.loads(line) for line in self.body.splitlines()]
        if head["value"].get("parentCommit") not in (None, repository.head):
            raise Refused(412, "A commit has happened since. Please refresh and try again.")
        for line in lines:
            value = line["value"]
            path = value["path"]
            if line["key"] == "file":
                repository.files[path] = base64.b64decode(value["content"])
                repository.lfs.discard(path)
            elif line["key"] == "lfsFile":
                if value["oid"] not in self.hub.storage:
                    raise Refused(400, "LFS pointer pointed to a file that does not exist")
                repository.files[path] = self.hub.storage[value["oid"]]
                repository.lfs.add(path)
            else:
                assert line["key"] == "deletedFile"
                del repository.files[path]
        repository.commits.append(head["value"]["summary"])
        url = f"{self.hub.url}/{repo}/commit/{repository.head}"
        self._send(200, {"success": True, "commitOid": repository.head, "commitUrl": url, "hookOutput": ""})

    def _resolve(self, repository: Repository, revision: str, path: str) -> None:
        commit = {"X-Repo-Commit": repository.head}
        if revision not in ("main", repository.head):
            raise Refused(404, f"Invalid rev id: {revision}", "RevisionNotFound")
        if path not in repository.files:
            raise Refused(404, "Entry not found", "EntryNotFound")
        content = repository.files[path]
        if path in repository.lfs:
            oid = hashlib.sha256(content).hexdigest()
            linked = {"X-Linked-Size": str(len(content)), "X-Linked-ETag": f'"{oid}"'}
            self._send(302, None, commit | linked | {"Location": f"{self.hub.cdn}/storage/{oid}"})
        else:
            self._send(200, content, commit | {"ETag": f'"{git_oid(content)}"'})

    def _send(self, status: int, body: object, headers: dict[str, str] | None = None) -> None:
        content = body if isinstance(body, bytes) else b"" if body is None else json.dumps(body).encode()
        self.send_response(status)
        for name, value in (headers or {}).items():
            self.send_header(name, value)
        self.send_header("content-length", str(len(content)))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(content)


@contextmanager
def running_hub() -> Iterator[Hub]:
    """The stand-in at `hub.url`."""
    hub = Hub()
    hub.answers.set()
    server = ThreadingHTTPServer(("127.0.0.1", 0), type("HubHandler", (Handler,), {"hub": hub}))
    server.daemon_threads = True
    hub.url = f"http://127.0.0.1:{server.server_address[1]}"
    hub.cdn = hub.url.replace("127.0.0.1", "localhost")
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield hub
    finally:
        hub.answers.set()
        server.shutdown()
        server.server_close()
        thread.join()
