"""The reading half of the Langfuse stand-in: observations, scores, experiments, datasets and prompts, with the limits that
the API's reference names."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any
from urllib.parse import unquote

if TYPE_CHECKING:
    from .trace_server import Received, TraceServer

Query = dict[str, list[str]]
Answer = tuple[int, Any]
NOW = "2026-01-01T00:00:00.000Z"
PAGE = 2
"""Items of a page, so that every reader turns pages."""


def rest(server: TraceServer, method: str, path: str, query: Query, body: Any) -> Answer:
    """The answer to a request that is no export."""
    word = unquote(path.rsplit("/", 1)[-1])
    if path.startswith(("/api/public/v2/datasets", "/api/public/dataset-items")):
        return _datasets(server, method, path, query, body, word)
    if path.startswith("/api/public/v2/prompts"):
        return _prompts(server, method, query, body, word)
    if path == "/api/public/v2/observations":
        return _observations(server, query)
    if path == "/api/public/v3/scores":
        return _scores(server, query)
    if path in ("/api/public/experiments", "/api/public/experiment-items"):
        return _experiments(server, query, items=word == "experiment-items")
    return 404, {"message": f"no {method} {path}"}


def _datasets(server: TraceServer, method: str, path: str, query: Query, body: Any, word: str) -> Answer:
    if path == "/api/public/v2/datasets" and method == "POST":
        server.datasets.setdefault(body["name"], {})
        return 200, _dataset(body["name"])
    if path.startswith("/api/public/v2/datasets/"):
        return (200, _dataset(word)) if word in server.datasets else (404, {"message": "Dataset not found"})
    if method == "POST":
        if body["datasetName"] not in server.datasets:
            return 404, {"message": "Dataset not found"}
        item = {
            **body, "datasetId": f"dataset-{body['datasetName']}", "status": "ACTIVE", "createdAt": NOW, "updatedAt": NOW,
            "mediaReferences": [],
        }  # fmt: skip
        server.datasets[body["datasetName"]][body["id"]] = item
        return 200, item
    items, page = list(server.datasets[query["datasetName"][0]].values()), int(query["page"][0])
    meta = {"page": page, "limit": PAGE, "totalItems": len(items), "totalPages": -(-len(items) // PAGE)}
    return 200, {"data": items[(page - 1) * PAGE : page * PAGE], "meta": meta}


def _dataset(name: str) -> dict[str, Any]:
    times = {"createdAt": NOW, "updatedAt": NOW}
    return {"id": f"dataset-{name}", "name": name, "metadata": {}, "projectId": "project", **times}


def _prompts(server: TraceServer, method: str, query: Query, body: Any, word: str) -> Answer:
    """A prompt is kept under its name, and each version of it under `name@version`."""
    if method == "POST":
        version = server.prompts.get(body["name"], {}).get("version", 0) + 1
        known = {"config": {}, "labels": [], "tags": [], "type": "text"} | body | {"version": version}
        server.prompts[body["name"]] = server.prompts[f"{body['name']}@{version}"] = known
        return 200, known
    if method == "DELETE":
        for key in [key for key in server.prompts if key.split("@")[0] == word]:
            del server.prompts[key]
        return 204, None
    name = f"{word}@{query['version'][0]}" if "version" in query else word
    found = server.prompts.get(name)
    return (200, found) if found is not None else (404, {"message": "Prompt not found"})


def _observations(server: TraceServer, query: Query) -> Answer:
    if int(query.get("limit", ["50"])[0]) > 1000:
        return 400, {"message": "limit: at most 1000"}
    items = server.observations + [_observation(span) for span in server.spans.values()]
    if "filter" in query:  # takes the place of the other parameters
        try:
            conditions = [_condition(each) for each in json.loads(query["filter"][0])]
        except (KeyError, ValueError) as error:
            return 400, {"message": "Invalid request data", "error": [{"path": ["filter"], "message": repr(error)}]}
        items = [each for each in items if all(holds(each) for holds in conditions)]
        return _page(sorted(items, key=lambda each: str(each.get("startTime")), reverse=True), query)
    for parameter in ("traceId", "sessionId", "version"):
        if parameter in query:
            items = [each for each in items if each.get(parameter) in query[parameter]]
    return _page(items, query)


OPERATORS: dict[str, dict[str, Callable[[Any, Any], bool]]] = {
    "string": {"=": lambda own, value: own == value},
    "boolean": {"=": lambda own, value: own == value},
    "datetime": {">=": lambda own, value: own >= value, "<": lambda own, value: own < value},
    "stringOptions": {"any of": lambda own, value: own in value},
    "arrayOptions": {
        "all of": lambda own, value: set(value) <= set(own),
        "none of": lambda own, value: not set(value) & set(own),
    },
}
COLUMNS = {
    "isRootObservation": "boolean", "environment": "stringOptions", "userId": "string", "version": "string", "name": "string",
    "traceName": "string", "tags": "arrayOptions", "startTime": "datetime", "traceId": "stringOptions",
}  # fmt: skip


def _condition(condition: dict[str, Any]) -> Callable[[dict[str, Any]], bool]:
    """A condition of `filter`, of those types and operators that the API's reference has for its column."""
    column, kind, value = condition["column"], condition["type"], condition["value"]
    if COLUMNS[column] != kind:
        raise ValueError(f"{column} is {COLUMNS[column]}")
    holds, default = OPERATORS[kind][condition["operator"]], {"tags": [], "isRootObservation": True}.get(column)
    moment: Callable[[Any], Any] = datetime.fromisoformat if kind == "datetime" else (lambda own: own)
    return lambda item: holds(moment(item.get(column, default)), moment(value))


def _observation(span: Received) -> dict[str, Any]:
    """A span as the observation that the server makes of it."""
    own = span.attributes

    def named(prefix: str) -> dict[str, Any]:
        return {key.removeprefix(prefix): value for key, value in own.items() if key.startswith(prefix)}

    metadata, input = (
        named("langfuse.observation.metadata.") | named("langfuse.trace.metadata."),
        own.get("langfuse.observation.input"),
    )
    if "tools" in metadata:  # Langfuse 4 shows these tools beside the messages
        input = json.dumps({"messages": json.loads(str(input)), "tools": json.loads(metadata.pop("tools"))})
    return {
        "id": span.id, "traceId": span.trace, "projectId": "project", "parentObservationId": span.parent or None,
        "startTime": _time(span.start), "endTime": _time(span.end), "type": span.type.upper(),
        "isRootObservation": own.get("langfuse.internal.is_app_root") is True or not span.parent,
        "name": span.name, "level": own.get("langfuse.observation.level", "DEFAULT"),
        "statusMessage": own.get("langfuse.observation.status_message"), "version": own.get("langfuse.version"),
        "environment": own.get("langfuse.environment"), "sessionId": own.get("langfuse.session.id"),
        "input": input, "output": own.get("langfuse.observation.output"), "metadata": metadata,
        "userId": own.get("user.id"), "release": own.get("langfuse.release"),
        "promptName": own.get("langfuse.observation.prompt.name"),
        "promptVersion": own.get("langfuse.observation.prompt.version"),
        "completionStartTime": own.get("langfuse.observation.completion_start_time"),
        "costDetails": json.loads(own.get("langfuse.observation.cost_details", "{}")),
        "model": own.get("langfuse.observation.model.name"),
        "modelParameters": json.loads(own.get("langfuse.observation.model.parameters", "null")),
        "usageDetails": json.loads(own.get("langfuse.observation.usage_details", "{}")),
        "tags": own.get("langfuse.trace.tags", []), "traceName": own.get("langfuse.trace.name"),
    }  # fmt: skip


def _scores(server: TraceServer, query: Query) -> Answer:
    if int(query.get("limit", ["50"])[0]) > 100:
        return 400, {"message": "limit: at most 100"}
    if ("valueMin" in query or "valueMax" in query) and query.get("dataType") != ["NUMERIC"]:
        return 400, {"message": "valueMin and valueMax require dataType=NUMERIC"}
    groups = set(query.get("fields", [""])[0].split(",")) - {""}
    if unknown := groups - FIELD_GROUPS.keys():
        return 400, {"message": f"fields: unknown {sorted(unknown)}"}
    items = server.kept_scores + [_score(body) for body in server.scores.values()]
    for parameter, kind in (("traceId", "trace"), ("sessionId", "session")):
        if parameter in query:
            items = [each for each in items if each["subject"] == {"kind": kind, "id": query[parameter][0]}]
    for parameter, default in (("name", ""), ("source", "API")):
        if parameter in query:
            wanted = query[parameter][0].split(",")
            items = [each for each in items if each.get(parameter, default) in wanted]
    if "dataType" in query:
        items = [each for each in items if each.get("dataType", "NUMERIC") in query["dataType"]]
        least, most = float(query.get("valueMin", ["-inf"])[0]), float(query.get("valueMax", ["inf"])[0])
        items = [each for each in items if least <= each["value"] <= most]
    hidden = {name for group, names in FIELD_GROUPS.items() if group not in groups for name in names}
    return _page([{name: fact for name, fact in each.items() if name not in hidden} for each in items], query)


FIELD_GROUPS = {
    "details": ("comment", "configId", "metadata"),
    "subject": ("subject",),
    "annotation": ("authorUserId",),
}
"""Fields of a score that are read only with their group in the parameter `fields`."""


def _score(body: Mapping[str, Any]) -> dict[str, Any]:
    """A score as it is read, by the API's third version."""
    kind = next(kind for kind in ("observation", "trace", "session") if f"{kind}Id" in body)
    inner = {"traceId": body["traceId"]} if kind == "observation" else {}
    data_type, value = body.get("dataType") or "NUMERIC", body["value"]
    return {
        "id": body["id"], "projectId": "project", "name": body["name"], "dataType": data_type,
        "value": bool(value) if data_type == "BOOLEAN" else value, "source": body.get("source", "API"),
        "timestamp": NOW, "environment": body.get("environment", "default"), "createdAt": NOW,
        "updatedAt": body["updatedAt"], "comment": body.get("comment"), "metadata": body.get("metadata"),
        "subject": {"kind": kind, "id": body[f"{kind}Id"], **inner},
    }  # fmt: skip


def _experiments(server: TraceServer, query: Query, *, items: bool) -> Answer:
    """What the spans' attributes make: an experiment has an item for each root."""
    if "fromStartTime" not in query:
        return 400, {"message": "fromStartTime is required"}
    prefix, parameter = "langfuse.experiment.", "experimentName" if items else "name"
    found: list[dict[str, Any]] = []
    for span in server.spans.values():
        own = span.attributes
        if span.parent or prefix + "name" not in own or own[prefix + "name"] not in query.get(parameter, []):
            continue
        found.append({
            "id": span.id, "traceId": span.trace, "startTime": _time(span.start), "endTime": _time(span.end),
            "level": "DEFAULT", "environment": own["langfuse.environment"], "experimentId": own[prefix + "id"],
            "experimentName": own[prefix + "name"], "experimentItemId": own[prefix + "item.id"],
            "experimentDatasetId": own[prefix + "dataset.id"],
            "expectedOutput": own[prefix + "item.expected_output"], "description": own[prefix + "description"],
            "metadata": json.loads(own[prefix + "metadata"]),
        })  # fmt: skip
    if items:
        return _page(found, query)
    whole = [
        {"id": each["experimentId"], "name": each["experimentName"], "startTime": each["startTime"],
         "endTime": each["endTime"], "itemCount": len(found), "datasetId": each["experimentDatasetId"],
         "description": each["description"],
         **({"metadata": each["metadata"]} if "metadata" in query.get("fields", [""])[0] else {})}
        for each in found[:1]
    ]  # fmt: skip
    return _page(whole, query)


def _page(items: Iterable[dict[str, Any]], query: Query) -> Answer:
    every, start = list(items), int(query.get("cursor", ["0"])[0])
    more = str(start + PAGE) if start + PAGE < len(every) else None
    return 200, {"data": every[start : start + PAGE], "meta": {"cursor": more, "limit": PAGE}}


def _time(nanoseconds: int) -> str:
    return datetime.fromtimestamp(nanoseconds / 1e9, UTC).isoformat().replace("+00:00", "Z")
