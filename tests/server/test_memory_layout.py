"""A memory layout that is forced on a CPU: the learner's process is in host memory between steps, and steps are as before."""

from __future__ import annotations

from pathlib import Path

import psutil
import pytest

from tests.server.servers import RunningServer, until


@pytest.mark.slow("two servers")
def test_steps_of_a_learner_that_is_offloaded_between_them_are_those_of_one_that_stays(tmp_path: Path) -> None:
    norms: list[list[float]] = []
    for name, flags in (("stays", ()), ("leaves", ("--memory-layout", "offload"))):
        with RunningServer(tmp_path / name, "--deterministic", *flags) as server:
            found: list[float] = []
            # A call that is batched with those of the check is rounded otherwise.
            until(lambda: server.http.get("/health").json()["learner"].get("logprobs"), "the check of logprobs", 300)
            for step in (1, 2):
                ids = server.rollouts(4, f"{name}-{step}")
                result = server.train(f"{name}-{step}", [ids])[-1]["result"]
                assert result["step"] == step
                found.append(result["metrics"]["grad_norm"])
            norms.append(found)
            assert ("--offload" in server.child("engine.learner").cmdline()) is (name == "leaves")
            assert "memory layout offload" in server.output() or name == "stays"
    assert norms[0] == norms[1]


def test_a_start_that_the_plan_refuses_leaves_no_process_and_nothing_locked(tmp_path: Path) -> None:
    flags = ("--engine", "vllm", "--card", "0.5GB")
    for _ in range(2):
        with RunningServer(tmp_path / "dir", *flags, ready=False) as server:
            assert server.process.wait(60) == 2
            assert not psutil.pid_exists(server.process.pid)
            [line] = [line for line in server.output().splitlines() if line.startswith("offbook: ")][-1:]
            assert "tiny does not fit on 0.5GB with memory layout offload: " in line and ". Take a GPU of 16GB" in line
