"""A server that is told to follow the memory plan of a GPU that is not here: real vLLM and the real learner on a CPU."""

from __future__ import annotations

from pathlib import Path

import pytest

from offbook.memory_plan.parts import Workload, find_shape, parse_card
from offbook.memory_plan.plan import make_plan, plan_lines
from tests.server.servers import RunningServer, until

pytestmark = pytest.mark.slow("real vLLM")

GIB = 2**30


def after(flag: str, words: list[str]) -> str:
    return words[words.index(flag) + 1]


def test_what_the_plan_says_is_logged_started_and_slept_through(real_engines: None, tmp_path: Path) -> None:
    work = Workload(max_model_len=256)
    plan = make_plan("tiny", find_shape("tiny"), parse_card("4GiB"), work, "offload")
    flags = ("--engine", "vllm", "--loader", "peft", "--max-model-len", "256")
    forced = ("--card", "4GiB", "--memory-layout", "offload")
    with RunningServer(tmp_path / "dir", *flags, *forced, module="tests.real_engines.measured_server") as server:
        sampler, learner = server.child("vllm.command").cmdline(), server.child("measured_learner").cmdline()
        assert float(after("--memory-share", sampler)) == pytest.approx(plan.sampler / plan.card.memory, abs=1e-3)
        assert after("--max-batch", sampler) == str(plan.decoded_calls) and "--shares-gpu" in sampler
        assert "--offload" in learner and after("--row-limit", learner) == str(plan.row_limit)
        found = until(
            lambda: server.http.get("/health").json()["learner"].get("logprobs"), "the check of logprobs", 300
        )
        assert found.startswith("ok, ")
        before = sleeps(server)
        assert before == 1  # the learner is in host memory otherwise
        results = [server.train(f"step-{step}", [server.rollouts(4, f"step-{step}")])[-1]["result"] for step in (1, 2)]
        assert [result["step"] for result in results] == [1, 2]
        assert sleeps(server) == before + 2  # level 1, which a CPU takes note of and no more
        for result in results:
            metrics = result["metrics"]
            assert (metrics["memory/learner_peak"], metrics["memory/gpu_peak"]) == (3, 4 + 3)
        log = server.output()
    for line in plan_lines(plan):
        assert line in log


def sleeps(server: RunningServer) -> int:
    return (server.folder / "logs" / "sampler.log").read_text("utf-8").count("seconds to fall asleep")
