"""ART's supervised training, as its examples call it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

import offbook.compat.art as art
from offbook.base.errors import ConfigError
from offbook.compat.art.utils.sft import (
    TrainSFTConfig,
    create_lr_schedule,
    create_sft_dataset_iterator,
    get_file_row_count,
    iterate_file,
    train_sft_from_file,
)


@pytest.fixture
def data(tmp_path: Path) -> str:
    rows = [
        {"messages": [{"role": "user", "content": f"order {n}"}, {"role": "assistant", "content": f"it is {n}"}]}
        for n in range(5)
    ]
    file = tmp_path / "data.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return str(file)


async def test_a_file_and_chunks_are_trained_with_one_schedule(data: str, local_backend: art.LocalBackend) -> None:
    model = art.TrainableModel(name="art-sft", project="tests", base_model="tiny")
    await model.register(local_backend)
    await train_sft_from_file(model=model, file_path=data, epochs=1, peak_lr=2e-4, warmup_ratio=0.0, verbose=True)
    rates = [checkpoint.metrics["loss/learning_rate"] for checkpoint in await model.checkpoints()]
    assert rates == pytest.approx([2e-4, 1e-4, 1e-12])
    trajectories = list(iterate_file(data))
    chunks = list(
        create_sft_dataset_iterator(trajectories, chunk_size=2, epochs=2, shuffle=False, schedule_type="constant")
    )
    assert [(chunk.step, chunk.epoch, chunk.epoch_step) for chunk in chunks] == [
        (0, 0, 0),
        (2, 0, 2),
        (3, 1, 0),
        (5, 1, 2),
    ]
    for chunk in chunks:
        await model.train_sft(chunk.trajectories, chunk.config, verbose=True)
    assert await model.get_step() == 9


def test_options_and_schedules_are_those_of_art(data: str) -> None:
    assert art.TrainSFTConfig is TrainSFTConfig
    assert TrainSFTConfig().learning_rate == 5e-5
    config = TrainSFTConfig(learning_rate=[1e-4, 0.0], batch_size="auto")  # type: ignore[arg-type]
    assert (config.learning_rate, config.batch_size, config.shuffle) == ((1e-4, 1e-12), 2, False)
    assert create_lr_schedule(4, 1.0, "cosine", warmup_steps=1) == pytest.approx([1.0, 1.0, 0.5, 0.0])
    assert create_lr_schedule(2, 1.0, "constant") == [1.0, 1.0] and create_lr_schedule(0, 1.0) == []
    assert get_file_row_count(data) == 5 and len(list(iterate_file(data, epochs=2, initial_skip=3))) == 7
    first = [trajectory.messages()[0].get("content") for trajectory in iterate_file(data, shuffle_buffer_size=1)]
    assert first == [f"order {n}" for n in range(5)]
    with pytest.raises(ConfigError, match=r"only .jsonl files are read, got 'data.json'"):
        get_file_row_count("data.json")
