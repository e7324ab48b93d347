"""The file of the key, and its folder."""

from __future__ import annotations

import stat
from pathlib import Path

import pytest

from offbook.server.directory_lock import make_private
from offbook.server.http.auth import key_for


def test_a_restart_takes_the_first_key_of_several(tmp_path: Path) -> None:
    (tmp_path / "key").write_text("# mine\nfirst\nsecond\n")
    key = key_for("0.0.0.0", None, tmp_path)
    assert key is not None and (key.text, key.is_new) == ("first", False)


def test_a_directory_that_others_could_read_is_closed_at_the_start(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    masks: list[int] = []
    monkeypatch.setattr("offbook.server.directory_lock.os.umask", masks.append)
    folder = tmp_path / "dir"
    folder.mkdir(mode=0o755)
    folder.chmod(0o755)
    records = folder / "records.db"
    records.touch()
    records.chmod(0o644)
    make_private(folder)
    assert masks == [0o077]
    assert [stat.S_IMODE(path.stat().st_mode) for path in (folder, records)] == [0o700, 0o600]
    assert str(records) in caplog.text
    caplog.clear()
    make_private(folder)
    assert not caplog.text
