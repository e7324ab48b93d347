"""Files that users and other programs write, with bytes that we do not expect: read, or refused with the file's name."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import pytest

from offbook.base.errors import OffbookError
from offbook.base.http_access import key_option
from offbook.client.local import running_server
from offbook.commands.option_values import judge_option
from offbook.contracts import Alert
from offbook.llms.cache import AnswerCache
from offbook.memory_plan.parts import shape_in
from offbook.rewards.rubric import write_rubric
from offbook.scenarios.loading import load_scenarios
from offbook.server.base_model import BaseModelPath
from offbook.server.http.auth import key_for
from offbook.server.models.checkpoints import scan_models
from offbook.tracing.jsonl import JsonlSink
from offbook.trainer.evaluate import read_report
from offbook_mcp.commands.options import Permissions
from offbook_mcp.connection.target import read_mcp_json
from offbook_mcp.scenarios.scenario import load_scenarios as load_mcp_scenarios


class Reader(NamedTuple):
    name: str
    """The file, below the folder."""
    text: str
    """Three lines, or one value, as we write them."""
    read: Callable[[Path], object]


def _alert(folder: Path) -> None:
    JsonlSink(folder).alert(Alert("run", "model", 1, 0.0, "kind", "message", 1.0, 2.0))


def _base(folder: Path) -> object:
    base = BaseModelPath("a", folder, "a")
    return base.answers_plainly(), base.special_tokens(("<|call|>",))


def _permitted(folder: Path) -> object:
    return asyncio.run(Permissions(folder / "file.json", asks=False)((), (), {}))


def _rubric(folder: Path) -> object:
    return asyncio.run(write_rubric("an agent", "openai/none", file=folder / "rubric.md"))


def _cache(folder: Path) -> object:
    return asyncio.run(AnswerCache(folder / "cache").get("key"))


ROW = '{"input": "a", "id": "%d"}\n'
READERS = {
    "scenarios.jsonl": Reader("f.jsonl", "".join(ROW % i for i in range(3)), lambda f: load_scenarios(f / "f.jsonl")),
    "scenarios.csv": Reader("f.csv", "input,id\na,1\nb,2\n", lambda f: load_scenarios(f / "f.csv")),
    "MCP scenarios": Reader("f.jsonl", "".join(ROW % i for i in range(3)), lambda f: load_mcp_scenarios(f / "f.jsonl")),
    "mcp.json": Reader("f.json", '{"mcpServers": {"a": {"command": "b"}}}', lambda f: read_mcp_json(f / "f.json")),
    "permissions": Reader("file.json", '{"a": {"tool": "b", "allowed": true}}', _permitted),
    "--api-key @": Reader("file", "key\n#\n#\n", lambda f: key_option(f"@{f / 'file'}")),
    "key": Reader("key", "# a\nkey\n#\n", lambda f: key_for("0.0.0.0", None, f)),
    "server.json": Reader("server.json", '{"url": "http://127.0.0.1:1", "pid": 1}', running_server),
    "report": Reader("f.json", '{"scores": [1.0]}', lambda f: read_report(f / "f.json")),
    "--rubric": Reader(
        "file", "- a\n- b\n- c\n", lambda f: judge_option({"judge": "openai/none", "rubric": f / "file"})
    ),
    "rubric": Reader("rubric.md", "- a\n- b\n- c\n", _rubric),
    "alerts.jsonl": Reader("alerts.jsonl", '{"id": "a"}\n' * 3, _alert),
    "model.json": Reader("p/models/m/model.json", '{"name": "m"}', lambda f: scan_models(f)),
    "config.json": Reader("config.json", '{"model_type": "qwen2"}', lambda f: shape_in(f, "a")),
    "tokenizer.json": Reader("tokenizer.json", '{"added_tokens": []}', _base),
    "template": Reader("tokenizer_config.json", '{"chat_template": "a"}', _base),
    "judges' cache": Reader("cache", "a\nb\nc\n", _cache),
}
BYTES: dict[str, Callable[[bytes], bytes]] = {
    "as it was": lambda content: content,
    "Latin-1": lambda content: content[:1] + b"\xe9" + content[1:],
    "NUL": lambda content: content[:-1] + b"\0" + content[-1:],
    "BOM": lambda content: b"\xef\xbb\xbf" + content,
    "UTF-16": lambda content: content.decode().encode("utf-16"),
    "CRLF": lambda content: content.replace(b"\n", b"\r\n"),
    "empty": lambda content: b"",
    "an empty line": lambda content: b"\n",
    "deep": lambda content: b"[" * 100_000,
    "a list": lambda content: b"[]",
    "null": lambda content: b"null\n",
    "digits": lambda content: b'{"a": ' + b"9" * 5_000 + b"}",
}


@pytest.mark.parametrize("reader", READERS)
@pytest.mark.parametrize("changed", BYTES)
def test_a_file_with_other_bytes_is_read_or_refused_with_its_name(reader: str, changed: str, tmp_path: Path) -> None:
    name, text, read = READERS[reader]
    file = tmp_path / name
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_bytes(BYTES[changed](text.encode()))
    try:
        read(tmp_path)
    except OffbookError as error:
        assert file.name in str(error) or (reader == "dataset" and str(tmp_path) in str(error)), error
        if changed == "Latin-1" and file.suffix == ".jsonl":
            assert re.search(r"line 1\b|:1: ", str(error)), error
