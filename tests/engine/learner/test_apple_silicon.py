"""What a Mac's mps does not have: float64, pinned memory, 4 bits. No test here ran on a Mac."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from offbook.base.errors import ConfigError
from offbook.engine.learner.model import loaders, unsloth_loader
from offbook.engine.learner.model.policy import Policy
from offbook.engine.learner.model.probes import base_logprobs, eager_probe, mask_probe
from offbook.engine.learner.service import HostMemory
from offbook.engine.precision import device_name, dtype_of
from tests.engine.learner.jobs import random_groups, write_toy_base
from tests.engine.learner.test_learner import Lab


class OnMps(torch.Tensor):
    """A tensor that refuses float64, as on mps, until `.cpu()` takes it away."""

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = getattr(func, "__name__", "")
        result: Any = super().__torch_function__(func, types, args, kwargs or {})
        if name == "cpu":
            return result.as_subclass(torch.Tensor)
        if isinstance(result, torch.Tensor) and result.dtype == torch.float64:
            raise TypeError(
                "Cannot convert a MPS Tensor to float64 dtype as the MPS framework doesn't support float64."
            )
        return result


@pytest.fixture
def on_mps(monkeypatch: pytest.MonkeyPatch) -> None:
    """What a row computes stays on such a device until it is fetched."""
    computed = Policy.row_logprobs

    def row_logprobs(*args: Any, **options: Any) -> tuple[torch.Tensor, ...]:
        return tuple(value.as_subclass(OnMps) for value in computed(*args, **options))

    monkeypatch.setattr(Policy, "row_logprobs", row_logprobs)


def test_the_probes_and_a_step_make_nothing_of_float64_on_the_device(tmp_path: Path, on_mps: None) -> None:
    with pytest.raises(TypeError, match="float64"):
        torch.ones(2).as_subclass(OnMps).double()
    lab = Lab(write_toy_base(tmp_path / "toy"), tmp_path)
    assert mask_probe(lab.policy) is None and eager_probe(lab.policy) is not None
    assert base_logprobs(lab.policy, [1, 2], [3, 4], 2.0).dtype == torch.float64
    groups = random_groups(1, groups=2, rollouts=3, turns=2)
    assert lab.train(groups, 0).applied


def test_mps_is_taken_only_if_it_is_asked_for_in_float32_and_without_what_it_lacks(tmp_path: Path) -> None:
    assert device_name("mps") == "mps" and device_name("auto") != "mps"
    assert dtype_of("auto", "mps") == torch.float32
    with pytest.raises(ConfigError, match="unsloth does not run on device 'mps': use --loader peft"):
        unsloth_loader.choose("unsloth", "mps")
    assert unsloth_loader.choose("auto", "mps") == "peft"
    with pytest.raises(ConfigError, match=r"load_in_4bit: .* device 'mps'"):
        loaders.load_base(tmp_path, "peft", "mps", torch.float32, four_bit=True)
    assert not HostMemory(torch.nn.Module, lambda: None, torch.device("mps"))._pinned
