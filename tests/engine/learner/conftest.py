"""Fixtures of the learner's tests: tiny random models and policies on them."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from offbook.base.config import LoraOptions
from offbook.engine.learner.model.policy import Policy
from tests.engine.learner.jobs import write_toy_base
from tests.engine.learner.tiny_models import exact, warm, write_base


@pytest.fixture(scope="session")
def base(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """The folder of a tiny random base model of a family, `qwen2` or `llama`."""
    made: dict[str, Path] = {}

    def of(family: str) -> Path:
        if family not in made:
            made[family] = write_base(tmp_path_factory.mktemp(family), family)
        return made[family]

    return of


@pytest.fixture(scope="module")
def toy(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of the base on which whole learners are tested."""
    return write_toy_base(tmp_path_factory.mktemp("toy"))


@pytest.fixture(scope="session")
def policies(base: Callable[[str], Path]) -> Callable[[str, torch.dtype], Policy]:
    """A policy with a warm adapter, kept for the session; tests must not change it. float64 is exact throughout."""
    made: dict[tuple[str, torch.dtype], Policy] = {}

    def of(family: str, dtype: torch.dtype) -> Policy:
        if (family, dtype) not in made:
            policy = warm(Policy.load(base(family), LoraOptions(r=2, alpha=4), dtype=dtype))
            made[family, dtype] = exact(policy) if dtype == torch.float64 else policy
        return made[family, dtype]

    return of
