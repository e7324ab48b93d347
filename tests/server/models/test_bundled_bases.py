"""Both bundled policies are bases by name, wherever the package is installed."""

from __future__ import annotations

from pathlib import Path

import pytest

from offbook import tiny
from offbook.engine.checkpoint_files import CheckpointNote
from offbook.memory_plan.parts import find_shape
from offbook.server.base_model import find, reference
from offbook.server.models.checkpoints import base_name
from offbook_dashboard.token_pieces import folder_of_base


@pytest.mark.parametrize("name", tiny.FOLDERS)
def test_a_bundled_policy_is_found_by_its_name_only(name: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(tmp_path)
    for other in tiny.FOLDERS:
        Path(other).mkdir()  # a folder of the user's does not take the name
    base = find(name)
    assert base.path == tiny.path(name) == folder_of_base(name) and reference(name) == name
    assert [base.is_called(other) for other in tiny.FOLDERS] == [other == name for other in tiny.FOLDERS]
    assert find_shape(name).vocabulary > 1_500


@pytest.mark.parametrize("name", tiny.FOLDERS)
def test_a_checkpoint_of_another_installation_names_the_policy(name: str) -> None:
    elsewhere = Path("/opt/venv/lib/offbook/tiny", tiny.FOLDERS[name])
    note = CheckpointNote.model_construct(base_model=str(elsewhere))
    assert base_name(note) == name
    other = CheckpointNote.model_construct(base_model="Qwen/Qwen2.5-7B-Instruct")
    assert base_name(other) == "Qwen/Qwen2.5-7B-Instruct"
