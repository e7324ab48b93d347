"""What a removal leaves of a file that other lines stand in."""

from __future__ import annotations

from pathlib import Path

from offbook_production.removal import remove_from_files


def test_a_line_in_another_encoding_stays_byte_for_byte(tmp_path: Path) -> None:
    other = b'{"id": "another", "said": "caf\xe9"}\n'
    file = tmp_path / "rollouts.jsonl"
    file.write_bytes(b'{"id": "removed"}\n' + other)
    assert remove_from_files(tmp_path, {"removed"}) == 1
    assert file.read_bytes() == other
