"""A tiny random model on disk, loaded once, and engines over it."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest
import torch
from peft import PeftModel
from transformers import Qwen2ForCausalLM

from offbook.engine.inference.decoding.adapters import Adapter, load_adapter
from offbook.engine.inference.decoding.model import ModelRunner, load_model
from tests.engine.inference.engines import DEADLINE, Engine, write_adapter, write_model
from tests.engine.inference.served import served


@pytest.fixture(scope="session", autouse=True)
def one_thread() -> Iterator[None]:
    """Tiny matrices gain nothing from threads, and lose much on a busy machine."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="session")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("base")
    write_model(path)
    return path


@pytest.fixture(scope="session")
def adapter_folders(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    paths = [tmp_path_factory.mktemp(f"adapter{seed}") for seed in (1, 2)]
    for seed, path in enumerate(paths):
        write_adapter(folder, path, seed=seed)
    return paths


@pytest.fixture(scope="session")
def policy(folder: Path) -> ModelRunner:
    return load_model(folder, device="cpu", dtype="float32", max_model_len=None)


@pytest.fixture(scope="session")
def adapters(policy: ModelRunner, adapter_folders: list[Path]) -> list[Adapter]:
    return [load_adapter(f"m@{at}", path, policy.layers) for at, path in enumerate(adapter_folders)]


@pytest.fixture
def engine(policy: ModelRunner) -> Iterator[Engine]:
    engine = Engine(policy)
    yield engine
    engine.scheduler.close()


@pytest.fixture(scope="session")
def plain(folder: Path) -> Qwen2ForCausalLM:
    """The base as transformers runs it: the reference."""
    return Qwen2ForCausalLM.from_pretrained(folder, attn_implementation="eager").eval()


@pytest.fixture(scope="session")
def plain_adapted(folder: Path, adapter_folders: list[Path]) -> list[PeftModel]:
    """The base with each adapter as PEFT runs it: the reference."""
    return [
        PeftModel.from_pretrained(Qwen2ForCausalLM.from_pretrained(folder, attn_implementation="eager"), path).eval()
        for path in adapter_folders
    ]


@pytest.fixture(scope="module")
def url(policy: ModelRunner) -> Iterator[str]:
    with served(policy) as address:
        yield address


@pytest.fixture
def http(url: str) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=url, timeout=DEADLINE) as client:
        yield client
