"""Arguments of OpenPipe ART's: what is taken, and what the others are answered with."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

import offbook
from offbook.base.errors import ConfigError

art: Any = offbook  # names of another library have no static type


async def test_a_local_backend_ends_with_its_block_and_its_close_may_be_awaited(tmp_path: Path) -> None:
    with offbook.LocalBackend(tmp_path) as backend:
        assert backend.dir == tmp_path
    async with offbook.LocalBackend(tmp_path) as backend:
        await backend.close()


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"path": ".art"}, "no option 'path': use dir="),
        ({"in_process": True}, "no option 'in_process': use nothing: the server is always a process of its own"),
    ],
)
def test_options_of_a_local_backend_are_answered_with_ours(options: Any, says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        offbook.LocalBackend(**options)


def test_an_internal_config_is_answered_with_the_places_of_its_options() -> None:
    with pytest.raises(ConfigError, match=r"no option '_internal_config': use TrainableModel\(lora=LoraOptions"):
        art.TrainableModel("agent", base_model="tiny", _internal_config={"init_args": {"max_seq_length": 64}})


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"advantage_balance": 0.5}, "no option 'advantage_balance', and it has no counterpart here"),
        ({"importance_sampling_level": "sequence"}, "no option 'importance_sampling_level': use loss=\"gspo\""),
        ({"normalize_advantages": False}, "no option 'normalize_advantages': use scale_rewards="),
        ({"_config": {"kimi_k2_tau": 1.0}}, "no option '_config'"),
        ({"beta": 0.1}, "no option 'beta': use kl_coef"),
        ({"config": 8}, "config: expected a TrainConfig or a dict of its options, got 8"),
    ],
)
async def test_options_of_a_step_are_answered_with_ours(options: dict[str, Any], says: str) -> None:
    model = art.TrainableModel("agent", base_model="tiny", backend=art.RemoteBackend("http://127.0.0.1:9"))
    with pytest.raises(ConfigError, match=says):
        await model.train([], **options)
