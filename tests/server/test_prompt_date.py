"""The date of prompts: one for a directory, whatever the day, the same for sampler and learner."""

from __future__ import annotations

import datetime
from pathlib import Path

import pytest

from offbook import LocalBackend
from offbook.base.errors import ConfigError
from offbook.base.server_options import EngineOptions, ServerOptions
from offbook.server.directory_lock import with_prompt_date
from offbook.server.maintenance import backup
from offbook.server.records.store import create_file
from offbook.server.sampler.engine_choice import EngineChoice


def date_of(folder: Path, named: str | None = None) -> str:
    """The date with which a server of the folder starts its engine."""
    options = with_prompt_date(ServerOptions(dir=folder, engine=EngineOptions(prompt_date=named)))  # type: ignore[arg-type]  # pydantic reads it
    words = EngineChoice("embedded", options.engine).command(folder, folder / "socket")
    return words[words.index("--prompt-date") + 1]


class Later(datetime.date):
    """Days later, by the machine's clock."""

    @classmethod
    def today(cls) -> Later:
        return cls(2031, 5, 6)


def test_a_directory_keeps_the_date_of_its_first_start(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(datetime, "date", Later)
    first = date_of(tmp_path)
    assert first == "2031-05-06"
    monkeypatch.setattr(Later, "today", lambda: Later.fromisoformat("2031-05-09"))
    assert date_of(tmp_path) == first and not caplog.records
    assert date_of(tmp_path, "2026-11-29") == "2026-11-29"
    assert "had the date 2031-05-06 until now, and have 2026-11-29 from now on" in caplog.text
    assert date_of(tmp_path) == "2026-11-29"


def test_a_backup_keeps_the_date(tmp_path: Path) -> None:
    (tmp_path / "own").mkdir()
    date_of(tmp_path / "own", "2026-11-29")
    create_file(tmp_path / "own" / "records.db")
    backup(tmp_path / "own", tmp_path / "copy")
    assert date_of(tmp_path / "copy") == "2026-11-29"


def test_a_damaged_date_is_named(tmp_path: Path) -> None:
    (tmp_path / "prompt_date").write_text("today")
    with pytest.raises(ConfigError, match="prompt_date holds no date: write one such as 2026-11-29"):
        date_of(tmp_path)


def test_a_backend_takes_the_date_as_an_option(tmp_path: Path) -> None:
    assert LocalBackend(dir=tmp_path, prompt_date="2026-11-29")
    with pytest.raises(ConfigError, match="prompt_date"):
        LocalBackend(dir=tmp_path, prompt_date="tomorrow")
