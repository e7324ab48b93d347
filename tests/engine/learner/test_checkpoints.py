from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from offbook.base.config import LoraOptions, TrainConfig
from offbook.base.errors import EngineError
from offbook.base.types import TrainResult
from offbook.engine import checkpoint_files
from offbook.engine.checkpoint_files import CheckpointNote
from offbook.engine.learner import checkpoints
from offbook.engine.learner.checkpoints import Draft, OptimizerState


def note(step: int, request_id: str = "r", model: str = "agent") -> CheckpointNote:
    return CheckpointNote(
        step=step,
        request_id=request_id,
        model=model,
        base_model="toy",
        lora=LoraOptions(),
        config=TrainConfig().model_dump(mode="json"),
        metrics={"reward/mean": 0.5},
        result=TrainResult(model=model, step=step, applied=True, request_id=request_id),
        created_at=1.0,
    )


def fill(draft: Draft) -> None:
    (draft.path / "adapter_config.json").write_text("{}")
    (draft.path / "adapter_model.safetensors").write_bytes((8).to_bytes(8, "little") + b"{}      ")
    draft.write_optimizer(OptimizerState({"a|exp_avg": torch.arange(3.0)}, updates=7))
    draft.write_rng(checkpoints.rng_states())


def write(folder: Path, step: int, request_id: str = "r") -> Path:
    with Draft(folder, step) as draft:
        fill(draft)
        return draft.commit(note(step, request_id))


def test_a_committed_checkpoint_is_found_with_its_note_and_its_state(tmp_path: Path) -> None:
    path = write(tmp_path, 1)
    assert path == tmp_path / "0001"
    found = checkpoints.newest(tmp_path, pytest.fail)
    assert found is not None
    assert (found.path, found.note.metrics) == (path, {"reward/mean": 0.5})
    state = checkpoints.load_optimizer(path)
    assert (state.updates, state.tensors["a|exp_avg"].tolist()) == (7, [0.0, 1.0, 2.0])
    assert {child.name for child in path.iterdir()} == set(checkpoint_files.FILES)
    assert [child.name for child in tmp_path.iterdir()] == ["0001"]


def test_a_draft_left_without_commit_leaves_nothing(tmp_path: Path) -> None:
    with pytest.raises(KeyboardInterrupt), Draft(tmp_path, 1) as draft:
        fill(draft)
        raise KeyboardInterrupt
    assert list(tmp_path.iterdir()) == []
    assert checkpoints.newest(tmp_path, pytest.fail) is None


def test_scratch_of_a_killed_process_is_removed_and_never_read(tmp_path: Path) -> None:
    write(tmp_path, 1)
    with Draft(tmp_path, 2) as draft:
        fill(draft)
        draft.path.rename(tmp_path / "elsewhere")
    (tmp_path / "elsewhere").rename(tmp_path / draft.path.name)
    found = checkpoints.newest(tmp_path, pytest.fail)
    assert found is not None
    assert found.note.step == 1
    checkpoints.remove_scratch(tmp_path)
    assert [child.name for child in tmp_path.iterdir()] == ["0001"]


@pytest.mark.parametrize("name", checkpoint_files.FILES)
def test_a_checkpoint_without_one_of_its_files_is_passed_over_with_a_warning(tmp_path: Path, name: str) -> None:
    write(tmp_path, 1)
    (write(tmp_path, 2) / name).unlink()
    warnings: list[str] = []
    found = checkpoints.newest(tmp_path, warnings.append)
    assert found is not None
    assert found.note.step == 1
    assert len(warnings) == 1
    assert f"has no {name}" in warnings[0]


@pytest.mark.parametrize("name", checkpoint_files.FILES)
def test_a_truncated_file_is_noticed(tmp_path: Path, name: str) -> None:
    path = write(tmp_path, 1)
    content = (path / name).read_bytes()
    (path / name).write_bytes(content[:-1])
    with pytest.raises(EngineError, match="is damaged"):
        checkpoint_files.read(path)


@pytest.mark.parametrize("name", [name for name in checkpoint_files.FILES if name != "offbook.json"])
def test_flipped_bytes_of_the_newest_step_are_noticed_where_a_step_before_it_is_whole(
    tmp_path: Path, name: str
) -> None:
    write(tmp_path, 1)
    flip(write(tmp_path, 2) / name)
    with pytest.raises(EngineError, match=f"the bytes of {name} are not those that were written|is damaged"):
        checkpoint_files.read(tmp_path / "0002")
    warnings: list[str] = []
    found = checkpoints.newest(tmp_path, warnings.append)
    assert found is not None and found.step == 1
    assert len(warnings) == 1 and "0002 is damaged" in warnings[0]


def test_a_checkpoint_from_before_there_were_digests_is_whole(tmp_path: Path) -> None:
    path = write(tmp_path, 1)
    written = json.loads((path / "offbook.json").read_text())
    assert set(written.pop("digests")) == set(checkpoint_files.FILES) - {"offbook.json"}
    (path / "offbook.json").write_text(json.dumps(written))
    found = checkpoints.newest(tmp_path, pytest.fail)
    assert found is not None and found.step == 1


def test_bytes_are_read_down_to_the_first_whole_step_and_not_those_of_a_trusted_one(tmp_path: Path) -> None:
    for step in (1, 2, 3):
        flip(write(tmp_path, step) / "optimizer.safetensors")
    damaged: list[str] = []
    trusted = checkpoint_files.whole(tmp_path, lambda path, _: damaged.append(path.name), trusted=2)
    assert [checkpoint.step for checkpoint in trusted] == [2, 1]
    assert damaged == ["0003"]


def flip(path: Path) -> None:
    """Change the last byte of a file, whose size stays."""
    content = path.read_bytes()
    path.write_bytes(content[:-1] + bytes([content[-1] ^ 1]))


def test_a_complete_checkpoint_is_never_overwritten_and_a_damaged_one_is_put_aside(tmp_path: Path) -> None:
    path = write(tmp_path, 1, "first")
    with pytest.raises(EngineError, match="never overwritten"):
        write(tmp_path, 1, "second")
    assert checkpoint_files.read(path).note.request_id == "first"
    (path / "optimizer.json").unlink()
    write(tmp_path, 1, "third")
    assert checkpoint_files.read(path).note.request_id == "third"
    assert sorted(child.name for child in tmp_path.iterdir()) == ["0001", "0001.damaged-0"]


def test_a_checkpoint_is_found_by_its_request_and_its_model(tmp_path: Path) -> None:
    write(tmp_path, 1, "first")
    write(tmp_path, 2, "second")
    found = checkpoints.of_request(tmp_path, "agent", "first")
    assert found is not None
    assert found.note.step == 1
    assert checkpoints.of_request(tmp_path, "a-fork", "first") is None
    assert checkpoints.of_request(tmp_path, "agent", "third") is None


def test_the_note_is_plain_json_with_the_fields_that_others_read(tmp_path: Path) -> None:
    written = json.loads((write(tmp_path, 1) / "offbook.json").read_text())
    names = {"step", "request_id", "model", "base_model", "lora", "config", "metrics", "result", "created_at"}
    assert names <= written.keys()


def test_generators_go_on_where_they_were() -> None:
    states = checkpoints.rng_states()
    first = torch.rand(3)
    checkpoints.set_rng_states(states)
    assert torch.equal(torch.rand(3), first)
