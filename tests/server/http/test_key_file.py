"""Keys that change while the server runs."""

from __future__ import annotations

import stat
from pathlib import Path

import pytest

from offbook.server.directory_lock import make_private
from offbook.server.http import auth
from offbook.server.http.auth import Guard, KeyFile, key_for


def passes(guard: Guard, key: str) -> bool:
    return guard.refusal("/v1/models", {"authorization": f"Bearer {key}"}) is None


def test_keys_are_rotated_by_their_file_without_a_restart(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(auth, "LOOK_SECONDS", 0.0)
    kept = key_for("0.0.0.0", None, tmp_path)
    assert kept is not None and kept.kept is not None
    guard = Guard(kept.text, file=KeyFile(kept.kept, kept.text))
    assert passes(guard, kept.text) and not passes(guard, "new")
    kept.kept.write_text(f"# both, until every client has moved\n{kept.text}\nnew-one\n")
    assert passes(guard, kept.text) and passes(guard, "new-one") and not passes(guard, "# both")
    kept.kept.write_text("new-one\n")
    assert not passes(guard, kept.text) and passes(guard, "new-one")
    for broken in ("", "k\u00e9y\n"):
        kept.kept.write_text(broken)
        assert passes(guard, "new-one") and "stay as they were" in caplog.text
        caplog.clear()
    kept.kept.unlink()
    assert passes(guard, "new-one") and not passes(guard, kept.text)


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
