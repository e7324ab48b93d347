"""vLLM answers 200 to an adapter none of whose modules it has, and then ignores it: the check at start finds that."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.server.servers import READY_SECONDS, RunningServer

pytestmark = pytest.mark.slow("real vLLM")


def test_a_server_whose_vllm_ignores_adapters_ends_with_a_sentence(real_engines: None, tmp_path: Path) -> None:
    flags = ("--engine", "vllm", "--loader", "peft", "--max-model-len", "256")
    with RunningServer(tmp_path / "dir", *flags, module="tests.server.misapplying_server", ready=False) as server:
        assert server.process.wait(READY_SECONDS) == 1
        assert "The sampler ignores adapters, so training would never change what it samples" in server.output()
        assert "ok, sampler and learner differ by " in server.output()
