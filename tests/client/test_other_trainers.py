"""Options of OpenPipe ART's that are taken: what they become here, and what is said about it."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

import offbook
from offbook.base.errors import ConfigError
from offbook.client.backend import train_config

art: Any = offbook  # names of another library have no static type


def test_the_options_of_a_local_backend_are_taken(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    backend = offbook.LocalBackend(path=str(tmp_path / ".art"), in_process=True, threads=1)
    assert (backend.dir, backend.engine.threads) == (tmp_path / ".art", 1)
    [line] = caplog.messages
    assert "is dir= here; in_process=True has no effect" in line
    with pytest.raises(ConfigError, match="give the directory once, as dir= or as path="):
        offbook.LocalBackend(tmp_path, path=tmp_path)


async def test_a_local_backend_ends_with_its_block_and_its_close_may_be_awaited(tmp_path: Path) -> None:
    with offbook.LocalBackend(tmp_path) as backend:
        assert backend.dir == tmp_path
    async with offbook.LocalBackend(tmp_path) as backend:
        await backend.close()


@pytest.mark.parametrize("late", [False, True])
def test_an_internal_config_becomes_the_engines_and_the_adapters_options(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, late: bool
) -> None:
    config = art.dev.InternalModelConfig(
        init_args=art.dev.InitArgs(max_seq_length=4096, gpu_memory_utilization=0.7),
        engine_args=art.dev.EngineArgs(enforce_eager=True, max_num_seqs=8),
        peft_args=art.dev.PeftArgs(r=4, lora_alpha=32, target_modules=["q_proj"]),
        inference_gpu_ids=[1],
    )
    backend = offbook.LocalBackend(tmp_path, max_batch=2)
    if late:
        model: Any = offbook.TrainableModel("agent", base_model="tiny", backend=backend)
        model._internal_config = config
    else:
        model = offbook.TrainableModel("agent", base_model="tiny", backend=backend, _internal_config=config)
    assert model.lora == offbook.LoraOptions(r=4, alpha=32, target_modules=("q_proj",))
    engine = {"max_model_len": 4096, "inference_gpus": (1,), "engine_args": {"enforce_eager": True}}
    assert backend.engine == offbook.EngineOptions(max_batch=2, **engine)  # the backend's own option goes first
    [line] = caplog.messages
    assert "LocalBackend(max_model_len=4096, " in line and "max_batch=8" in line and "lora=LoraOptions(r=4" in line
    assert "no effect here: init_args.gpu_memory_utilization" in line


def test_a_server_elsewhere_keeps_its_engines_options(caplog: pytest.LogCaptureFixture) -> None:
    backend = offbook.RemoteBackend("http://box")
    offbook.TrainableModel(
        "a", base_model="tiny", backend=backend, _internal_config={"init_args": {"max_seq_length": 64}}
    )
    assert "engine options max_model_len are ignored, the server has its own" in caplog.text


@pytest.mark.parametrize(
    ("config", "says"),
    [
        ({"chat_template": "{{ x }}"}, "chat_template has no equivalent here"),
        ({"init_args": {"full_finetuning": True}}, "init_args.full_finetuning has no equivalent here"),
        ({"trainer_args": {"max_grad_norm": 0.1}}, r"pass its options to train\(\), as TrainConfig"),
        ({"init_args": 3}, "init_args: a dict of options is needed, got 3"),
        ({"init_args": {"max_seq_length": -1}}, "EngineOptions.max_model_len"),
        ("fast", "_internal_config: a dict of options is needed"),
    ],
)
def test_what_would_change_a_result_is_refused(config: object, says: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=says):
        offbook.TrainableModel("a", base_model="tiny", backend=offbook.LocalBackend(tmp_path), _internal_config=config)


STEP: Any = {"learning_rate": 1e-4}


@pytest.mark.parametrize(
    ("config", "options", "expected", "says"),
    [
        (offbook.TrainConfig(**STEP), {"_config": {"logprob_calculation_chunk_size": 8}}, STEP, "without effect here: logprob_"),
        (offbook.TrainConfig(**STEP), {"_config": {"scale_rewards": False}}, {**STEP, "scale_rewards": False}, ""),
        (STEP, {"_config": {"ppo": True, "epsilon": 0.1}}, {**STEP, "loss": "grpo", "epsilon": 0.1}, "ppo=True as loss='grpo'"),
        (None, {"loss_fn": "cispo", "normalize_advantages": False}, {"loss": "cispo", "scale_rewards": False}, "'cispo'"),
        (None, {"truncated_importance_sampling": 3.0}, {"importance_cap": 3.0}, "as importance_cap=3.0"),
        (None, {"importance_sampling_level": "sequence", "mask_prob_ratio": False}, {"loss": "gspo"}, "as loss='gspo'"),
        (None, {"kl_penalty_coef": 0.1}, {"kl_coef": 0.1}, "a term of the loss, not of the advantage"),
        (None, {}, {}, ""),
    ],
)  # fmt: skip
def test_the_options_of_a_step_are_converted(
    config: Any, options: Mapping[str, object], expected: Any, says: str, caplog: pytest.LogCaptureFixture
) -> None:
    assert train_config(config, options) == offbook.TrainConfig(**expected)
    assert says in caplog.text and bool(caplog.records) is bool(says)


def test_kl_penalty_coef_of_a_train_config_is_the_loss_term(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.WARNING)
    assert art.TrainConfig(learning_rate=1e-4, kl_penalty_coef=0.05) == offbook.TrainConfig(
        learning_rate=1e-4, kl_coef=0.05
    )
    assert "kl_penalty_coef is taken as kl_coef=0.05" in caplog.text


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"advantage_balance": 0.5}, "train: advantage_balance=0.5 has no equivalent here"),
        ({"importance_sampling_level": "average"}, "importance_sampling_level='average' has no equivalent"),
        ({"_config": {"kimi_k2_tau": 1.0}}, "kimi_k2_tau=1.0 has no equivalent"),
        ({"_config": 8}, "_config: expected a TrainConfig or a dict of its options, got 8"),
        ({"beta": 0.1}, "no option 'beta': use kl_coef"),
    ],
)
def test_an_option_of_a_step_without_an_equivalent_is_refused(options: Mapping[str, object], says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        train_config(None, options)
