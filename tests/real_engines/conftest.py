"""One server with vLLM and Unsloth for all tests of a file: a start takes half a minute and more."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from importlib.util import find_spec

import psutil
import pytest

import offbook
from tests.server.servers import RunningServer


@pytest.fixture(scope="session")
def real_engines(require: Callable[[bool, str], None]) -> None:
    """Skips where vLLM or Unsloth is not installed."""
    if sys.platform != "linux":
        pytest.skip("vLLM and Unsloth run on Linux")
    require(find_spec("vllm") is not None and find_spec("unsloth") is not None, "scripts/bootstrap test")


@pytest.fixture(scope="module")
def server(real_engines: None, tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningServer]:
    folder = tmp_path_factory.mktemp("real") / "dir"
    with RunningServer(folder, "--engine", "vllm", "--loader", "unsloth", "--max-batch", "32") as running:
        yield running
        family = psutil.Process(running.process.pid).children(recursive=True)
        running.process.kill()
        _, alive = psutil.wait_procs(family, timeout=20)
        assert len(family) >= 4 and not alive, f"a killed server left {alive} of {family}"


@pytest.fixture(scope="module")
def backend(server: RunningServer) -> offbook.RemoteBackend:
    return offbook.RemoteBackend(server.url)
