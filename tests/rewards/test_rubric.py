"""Rubrics that a judge writes: printed, kept, and not written twice."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

import offbook
from offbook.base.errors import ConfigError, LlmError
from offbook.testing import says, scripted_llm

CRITERIA = says(json.dumps({"criteria": ["The order's state is right.", "No order\nis invented."]}))


async def test_a_rubric_is_written_printed_and_kept_and_an_edited_one_is_used(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OFFBOOK_DIR", str(tmp_path))
    with scripted_llm([CRITERIA]) as endpoint:
        options = {"api_base": endpoint.url, "api_key": "k", "cache": None}
        rubric = await offbook.write_rubric("Answer {questions} about orders", "openai/judge", **options)
        assert rubric == "- The order's state is right.\n- No order is invented."
        [file] = tmp_path.glob("rubrics/*.md")
        assert capsys.readouterr().out == f"rubric ({file}):\n{rubric}\n"
        file.write_text("- My own.\n")
        assert await offbook.write_rubric("Answer {questions} about orders", "openai/judge", **options) == "- My own."
    assert len(endpoint.requests) == 1
    assert "Answer {questions} about orders" in endpoint.requests[0].messages[0]["content"]


async def test_a_rubric_is_kept_where_it_was_asked_for_and_an_empty_one_is_none(tmp_path: Path) -> None:
    file = tmp_path / "mine" / "rubric.md"
    with scripted_llm([says('{"criteria": []}')]) as endpoint:
        options = {"api_base": endpoint.url, "api_key": "k", "cache": None, "file": file}
        with pytest.raises(LlmError, match="criteria are needed"):
            await offbook.write_rubric("Count", "openai/judge", **options)
    assert len(endpoint.requests) == 2 and not file.exists()
    file.parent.mkdir()
    file.write_text("\n")
    with pytest.raises(ConfigError, match="is empty: delete it"):
        await offbook.write_rubric("Count", "openai/judge", **options)
    with pytest.raises(ConfigError, match="description"):
        await offbook.write_rubric(" ")
