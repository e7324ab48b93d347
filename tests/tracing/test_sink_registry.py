"""The core's own sink, and names and objects that are no sinks."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from offbook.base.errors import ConfigError
from offbook.testing.sinks import RUN, check_sink
from offbook.tracing.jsonl import JsonlSink
from offbook.tracing.sink_registry import resolve_sinks


def test_the_jsonl_sink_conforms(tmp_path: Path) -> None:
    def ids() -> list[str]:
        files = sorted(tmp_path.glob("*.jsonl"))
        return [f"{file.name} {json.loads(line)['id']}" for file in files for line in file.read_text().splitlines()]

    check_sink(lambda: JsonlSink(tmp_path), ids)
    line = json.loads((tmp_path / "rollouts.jsonl").read_text().splitlines()[1])
    assert (line["run"], line["split"], line["step"], line["group"]) == (RUN, "val", 0, f"{RUN}-val-0-0")
    assert [each["role"] for each in line["messages"]] == ["system", "user", "assistant", "tool", "assistant"]


def test_unknown_names_and_objects_that_are_no_sinks_are_refused() -> None:
    with pytest.raises(ConfigError, match="unknown sink 'langfus'; available are jsonl:FOLDER"):
        resolve_sinks(["langfus"])
    with pytest.raises(ConfigError, match="no trace sink: it has no run_started"):
        resolve_sinks([object()])  # type: ignore[list-item]
    with pytest.raises(ConfigError, match="a class: pass an instance"):
        resolve_sinks([JsonlSink])  # type: ignore[list-item]
    with pytest.raises(ConfigError, match="a list of names"):
        resolve_sinks("langfuse")
