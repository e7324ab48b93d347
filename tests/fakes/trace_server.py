"""An OTLP collector and Langfuse's REST API over real HTTP, as strict as a real server was seen to be: what it silently drops
is a fault here.

Statuses, content types and bodies are those of Langfuse 4, read in its repository langfuse/langfuse:
web/src/pages/api/public/otel/v1/traces/index.ts (answers the job that packages/shared/src/server/otel/OtelIngestionProcessor.ts
put into its queue, and {} without spans), web/src/pages/api/public/ingestion.ts with
packages/shared/src/server/ingestion/processEventBatch.ts, web/src/pages/api/public/scores/index.ts, and for errors
web/src/features/public-api/server/withMiddlewares.ts. A list of scores is answered as Langfuse's own client 5.0
(langfuse/api/scores/types) describes it. Other collectors answer as in REPLIES; "protobuf" and "json" are of the OTLP
specification 1.9 (OTLP/HTTP Response)."""

from __future__ import annotations

import gzip
import json
import threading
import time
from base64 import b64encode
from collections import deque
from collections.abc import Callable, Generator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import UTC, datetime
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import parse_qs, urlsplit

from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import (
    ExportTraceServiceRequest,
    ExportTraceServiceResponse,
)

from offbook.base.types import new_id

from .langfuse_rest import NOW, rest

PUBLIC, SECRET = "pk-lf-test", "sk-lf-test"
TYPES = {"agent", "generation", "tool", "span", "evaluator"}
ON_EVERY_SPAN = (
    "langfuse.observation.type", "langfuse.trace.name", "langfuse.session.id", "langfuse.trace.tags", "langfuse.environment",
)  # fmt: skip
READ = (
    *ON_EVERY_SPAN, "langfuse.version", "langfuse.release", "user.id", "langfuse.internal.is_app_root",
    *(f"langfuse.observation.{name}" for name in (
        "input", "output", "level", "status_message", "model.name", "model.parameters", "usage_details", "cost_details",
        "completion_start_time", "prompt.name", "prompt.version",
    )),
    *(f"langfuse.experiment.{name}" for name in (
        "id", "name", "description", "metadata", "dataset.id", "item.id", "item.root_observation_id", "item.expected_output",
    )),
)  # fmt: skip
"""Attributes of packages/shared/src/server/otel/attributes.ts that the processor reads; others say nothing, or the same twice."""
PREFIXES = ("langfuse.trace.metadata.", "langfuse.observation.metadata.")
Fault = int | str
"""A status to answer with, `hang`, or `redirect`."""
JSON = "application/json; charset=utf-8"
JOB = {
    "name": "otel-ingestion-job", "id": "12", "opts": {"attempts": 6}, "progress": 0, "returnvalue": None, "stacktrace": None,
    "data": {"id": "0a", "name": "otel-ingestion-job", "payload": {"data": {"fileKey": "otel/p/1.json", "publicKey": PUBLIC}}},
    "queueQualifiedName": "bull:otel-ingestion-queue", "timestamp": 1767225600000,
}  # fmt: skip
REPLIES: dict[str, tuple[str | None, bytes]] = {
    "langfuse": (JSON, json.dumps(JOB).encode()),
    "protobuf": ("application/x-protobuf", b""),
    "json": ("application/json", b'{"partialSuccess":{}}'),
    "empty json": ("application/json", b"{}"),
    "text": ("text/plain; charset=utf-8", b"OK"),
    "html": ("text/html", b"<html>thanks</html>"),
    "no json": ("application/json", b"accepted"),
    "no protobuf": ("application/x-protobuf", b"accepted"),
    "nothing": (None, b""),
}
"""Content type and body of an accepted export."""


@dataclass
class Received:
    """A span as it arrived."""

    trace: str
    id: str
    parent: str
    name: str
    start: int
    end: int
    attributes: dict[str, Any]
    error: str | None
    resource: dict[str, Any]

    @property
    def type(self) -> str:
        return str(self.attributes.get("langfuse.observation.type"))


@dataclass
class TraceServer:
    """`spans` by (trace, span id, start), as the server keeps them; `doubles` are ids that came with other times; `scores` by
    id. `faults` are what the next requests meet; `breaks` says of a body's trace ids whether the server refuses it (400)."""

    url: str = ""
    spans: dict[tuple[str, str, int], Received] = field(default_factory=dict)
    doubles: list[str] = field(default_factory=list)
    broken: list[str] = field(default_factory=list)  # rules that were not held
    scores: dict[str, dict[str, Any]] = field(default_factory=dict)
    requests: list[tuple[str, str]] = field(default_factory=list)
    faults: deque[Fault] = field(default_factory=deque)
    hang_seconds: float = 30.0
    breaks: Callable[[set[str]], bool] = lambda traces: False
    refused_scores: Callable[[Mapping[str, Any]], bool] = lambda body: False
    bulk: bool = True
    langfuse: bool = True
    reply: str = ""  # a key of REPLIES; "": Langfuse's, else the specification's
    partial: tuple[int, str] | None = None  # spans that each export rejects, and the message
    datasets: dict[str, dict[str, dict[str, Any]]] = field(default_factory=dict)
    observations: list[dict[str, Any]] = field(default_factory=list)
    kept_scores: list[dict[str, Any]] = field(default_factory=list)
    prompts: dict[str, dict[str, Any]] = field(default_factory=dict)
    over: threading.Event = field(default_factory=threading.Event)
    lock: threading.Lock = field(default_factory=threading.Lock)

    @property
    def endpoint(self) -> str:
        return f"{self.url}/v1/traces"

    def traces(self) -> dict[str, list[Received]]:
        """The spans of each trace in order of start."""
        found: dict[str, list[Received]] = {}
        for span in sorted(self.spans.values(), key=lambda span: span.start):
            found.setdefault(span.trace, []).append(span)
        return found

    def accepted(self) -> tuple[str | None, bytes]:
        """Content type and body for an export that was accepted, perhaps in part."""
        if self.partial is None:
            return REPLIES[self.reply or ("langfuse" if self.langfuse else "protobuf")]
        count, message = self.partial
        if "json" in self.reply:
            text = json.dumps({"partialSuccess": {"rejectedSpans": str(count), "errorMessage": message}})
            return "application/json", text.encode()
        answer = ExportTraceServiceResponse()
        answer.partial_success.rejected_spans, answer.partial_success.error_message = count, message
        return "application/x-protobuf", answer.SerializeToString()

    def add(self, body: bytes) -> int:
        """Take an export; 400 when the whole batch is refused."""
        request = ExportTraceServiceRequest.FromString(body)
        new = [
            _received(span, _attributes(resource.resource.attributes))
            for resource in request.resource_spans
            for scope in resource.scope_spans
            for span in scope.spans
        ]
        for scope in [scope.scope for resource in request.resource_spans for scope in resource.scope_spans]:
            known = scope.name.startswith("langfuse-sdk") and _attributes(scope.attributes) == {"public_key": PUBLIC}
            if self.langfuse and not known:
                self.broken.append(f"{scope.name}: all attributes are shown again as metadata")
        if self.breaks({span.trace for span in new}) or any(
            int(span.id, 16) == 0 or len(span.id) != 16 for span in new
        ):
            return 400
        for span in new:
            self._examine(span)
            key = (span.trace, span.id, span.start)
            if key not in self.spans and any((span.trace, span.id) == known[:2] for known in self.spans):
                self.doubles.append(span.name)
            self.spans[key] = span
        return 200

    def faults_found(self) -> list[str]:
        """The rules that what has arrived does not hold."""
        found = list(self.broken)
        for trace, spans in self.traces().items():
            starts = [span.start // 1_000_000 for span in spans]
            if len(set(starts)) != len(starts):
                found.append(f"{trace}: two spans start in one millisecond")
            ids = {span.id for span in spans}
            roots = [span for span in spans if not span.parent or span.parent not in ids]
            if len(roots) != 1:
                found.append(f"{trace}: {len(roots)} roots")
            if any(span.end < span.start for span in spans):
                found.append(f"{trace}: a span ends before it starts")
        return found + [f"{name} came again with another start" for name in self.doubles]

    def _examine(self, span: Received) -> None:
        if not self.langfuse:
            return
        self.broken += [f"{span.name}: no {name}" for name in ON_EVERY_SPAN if name not in span.attributes]
        self.broken += [
            f"{span.name}: {name} is not read" for name in span.attributes
            if name not in READ and not name.startswith(PREFIXES)
        ]  # fmt: skip
        both = [
            {name.removeprefix(prefix) for name in span.attributes if name.startswith(prefix)} for prefix in PREFIXES
        ]
        self.broken += [f"{span.name}: trace metadata {name} hides the observation's" for name in both[0] & both[1]]
        if len(str(span.attributes.get("langfuse.session.id"))) > 200:
            self.broken.append(f"{span.name}: the session id is too long and dropped")
        if span.type not in TYPES:
            self.broken.append(f"{span.name}: type {span.type!r}")
        if not span.parent and span.attributes.get("langfuse.internal.is_app_root") is not True:
            self.broken.append(f"{span.name}: no is_app_root")
        environment = str(span.attributes.get("langfuse.environment"))
        if set(environment) - set("abcdefghijklmnopqrstuvwxyz0123456789-_"):
            self.broken.append(f"{span.name}: environment {environment!r}")
        for name in ("input", "output", "usage_details", "cost_details", "model.parameters"):
            json.loads(span.attributes.get(f"langfuse.observation.{name}", "null"))
        if span.error is not None and span.attributes.get("langfuse.observation.level") != "ERROR":
            self.broken.append(f"{span.name}: an error without its level")


def _received(span: Any, resource: dict[str, Any]) -> Received:
    return Received(
        span.trace_id.hex(), span.span_id.hex(), span.parent_span_id.hex(), span.name, span.start_time_unix_nano,
        span.end_time_unix_nano, _attributes(span.attributes), span.status.message if span.status.code == 2 else None,
        resource,
    )  # fmt: skip


def _attributes(pairs: Any) -> dict[str, Any]:
    def plain(value: Any) -> Any:
        kind = value.WhichOneof("value")
        return [plain(each) for each in value.array_value.values] if kind == "array_value" else getattr(value, kind)

    return {pair.key: plain(pair.value) for pair in pairs}


class Handler(BaseHTTPRequestHandler):
    server_version, protocol_version = "stand-in", "HTTP/1.1"
    wbufsize = 65536  # head and body in one packet: a delayed ACK takes 40 ms
    stand_in: TraceServer

    def log_message(self, format: str, *args: Any) -> None:
        """Quiet."""

    def do_GET(self) -> None:
        self._serve("GET")

    def do_POST(self) -> None:
        self._serve("POST")

    def do_DELETE(self) -> None:
        self._serve("DELETE")

    def _serve(self, method: str) -> None:
        body = self.rfile.read(int(self.headers.get("content-length") or 0))
        if self.headers.get("content-encoding") == "gzip":
            body = gzip.decompress(body)
        parts = urlsplit(self.path)
        with self.stand_in.lock:
            self.stand_in.requests.append((method, parts.path))
            fault = self.stand_in.faults.popleft() if self.stand_in.faults else None
        if fault == "hang":
            self.stand_in.over.wait(self.stand_in.hang_seconds)
            self.close_connection = True
            return
        if fault == "redirect":
            self.send_response(301)
            self.send_header("location", "/elsewhere")
            self.send_header("content-length", "0")
            self.end_headers()
            return
        if parts.path == "/elsewhere":
            return self._answer(200, {})
        if isinstance(fault, int):
            return self._answer(fault, {"message": f"scripted {fault}"})
        wanted = "Basic " + b64encode(f"{PUBLIC}:{SECRET}".encode()).decode()
        if self.stand_in.langfuse and self.headers.get("authorization") != wanted:
            kind = {"error": "UnauthorizedError"} if parts.path == "/api/public/ingestion" else {}
            return self._answer(
                401, {**kind, "message": "Invalid credentials. Confirm that you've configured the correct host."}
            )
        with self.stand_in.lock:
            self._route(method, parts.path, {key: values for key, values in parse_qs(parts.query).items()}, body)

    def _route(self, method: str, path: str, query: dict[str, list[str]], body: bytes) -> None:
        server = self.stand_in
        if path in ("/api/public/otel/v1/traces", "/v1/traces"):
            if server.langfuse and self.headers.get("x-langfuse-ingestion-version") != "4":
                server.broken.append("no x-langfuse-ingestion-version")
            status = server.add(body)
            if status != 200:
                return self._answer(status, {"error": "Failed to parse OTel Protobuf Trace"})
            empty = server.langfuse and not body
            return self._raw(200, *((JSON, b"{}") if empty else server.accepted()))
        if path == "/api/public/projects":
            return self._answer(200, {"data": [{"id": "project", "name": "test"}]})
        if path == "/api/public/ingestion" and server.bulk:
            return self._ingest(json.loads(body))
        if path == "/api/public/scores" and method == "POST":
            return self._score(json.loads(body))
        answer = rest(server, method, path, query, json.loads(body) if body else None)
        return self._answer(*answer)

    def _ingest(self, body: dict[str, Any]) -> None:
        done, errors = [], []
        for item in body["batch"]:
            fault = "type" if item["type"] != "score-create" else self._kept(item["body"], item["timestamp"])
            if fault is not None:
                errors.append({"id": item["id"], "status": 400, "message": "Invalid request data", "error": fault})
                continue
            done.append({"id": item["id"], "status": 201})
        self._answer(207, {"successes": done, "errors": errors})

    def _score(self, body: Any) -> None:
        """A list of scores, as newer servers take it."""
        if not isinstance(body, list):
            issue = {"code": "invalid_type", "expected": "array", "path": [], "message": "Expected array"}
            return self._answer(400, {"message": "Invalid request data", "error": [issue]})
        faults = [fault for each in body if (fault := self._kept(each, each.get("timestamp", NOW))) is not None]
        if not faults:
            return self._answer(202, {"message": "Accepted"})
        counts = {"accepted": len(body) - len(faults), "rejected": len(faults)}
        self._answer(207, {**counts, "errors": [{"message": fault} for fault in faults]})

    def _kept(self, body: dict[str, Any], timestamp: str) -> str | None:
        """Keep a score, or say why not. ClickHouse keeps one row for each name, id and day of a score."""
        fault = _score_fault(body) or ("refused" if self.stand_in.refused_scores(body) else None)
        if fault is None:
            known = self.stand_in.scores.get(body.setdefault("id", new_id("score")))
            if known is not None and known["timestamp"][:10] != timestamp[:10]:
                self.stand_in.broken.append(f"score {body['name']} came again with another day")
            self.stand_in.scores[body["id"]] = {
                **body, "timestamp": timestamp, "updatedAt": datetime.now(UTC).isoformat().replace("+00:00", "Z"),
            }  # fmt: skip
        return fault

    def _answer(self, status: int, body: Any) -> None:
        self._raw(status, JSON, json.dumps(body).encode())

    def _raw(self, status: int, kind: str | None, body: bytes) -> None:
        self.send_response(status)
        if kind is not None:
            self.send_header("content-type", kind)
        self.send_header("content-length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)


def _score_fault(body: Mapping[str, Any]) -> str | None:
    if not ("traceId" in body) ^ ("sessionId" in body):
        return "traceId or sessionId"
    value, kind = body.get("value"), str if body.get("dataType") == "CATEGORICAL" else int | float
    return None if isinstance(value, kind) and value == value else f"value {value!r}"


@contextmanager
def trace_server(**options: Any) -> Generator[TraceServer]:
    """Serve on a free port until the block ends."""
    stand_in = TraceServer(**options)
    http = ThreadingHTTPServer(("127.0.0.1", 0), type("Bound", (Handler,), {"stand_in": stand_in}))
    http.daemon_threads = True
    stand_in.url = f"http://127.0.0.1:{http.server_address[1]}"
    thread = threading.Thread(target=http.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True)
    thread.start()
    try:
        yield stand_in
    finally:
        stand_in.over.set()
        http.shutdown()
        http.server_close()
        thread.join(5)


def until(true: Callable[[], bool], seconds: float = 10.0) -> bool:
    """Poll until it holds or the deadline has passed."""
    deadline = time.monotonic() + seconds
    while not true():
        if time.monotonic() > deadline:
            return False
        time.sleep(0.01)
    return True
