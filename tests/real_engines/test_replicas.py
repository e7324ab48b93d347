"""Two replicas of real vLLM on a CPU: killed, slept around a step that shares their device, ended with their server."""

from __future__ import annotations

import os
import signal
import threading
from collections import Counter
from pathlib import Path

import psutil
import pytest

from tests.server.servers import RunningServer, until

pytestmark = pytest.mark.slow("real vLLM")

FLAGS = ("--engine", "vllm", "--loader", "peft", "--max-model-len", "256", "--max-batch", "8", "--replicas", "2")
SHARED = ("--card", "8GiB", "--memory-layout", "offload")


def test_replicas_sleep_together_and_come_back_alone_and_end_with_the_server(
    real_engines: None, tmp_path: Path
) -> None:
    with RunningServer(tmp_path / "dir", *FLAGS, *SHARED) as server:
        until(lambda: server.http.get("/health").json()["learner"].get("logprobs"), "the check of logprobs", 300)
        before = [sleeps(server, number) for number in range(2)]
        result = server.train("step-1", [server.rollouts(4, "step-1")])[-1]["result"]
        assert result["step"] == 1
        assert [sleeps(server, number) for number in range(2)] == [count + 1 for count in before]

        victim, other = (engine(server, number) for number in range(2))
        ends: list[int] = []
        calls = [threading.Thread(target=lambda n=n: ends.append(long_call(server, n))) for n in range(12)]
        for call in calls:
            call.start()
        until(lambda: server.http.get("/health").json()["in_flight"] == len(calls), "all calls are in flight")
        os.kill(victim.pid, signal.SIGKILL)
        for call in calls:
            call.join()
        assert Counter(ends) == {200: 12}
        until(lambda: [loads(server, number) for number in range(2)] == [2, 1], "the adapter on the new replica", 300)
        assert engine(server, 0).pid != victim.pid and engine(server, 1).pid == other.pid
        assert server.http.get("/health").json()["restarts"] == 1
        server.rollouts(8, "after")

        family = psutil.Process(server.process.pid).children(recursive=True)
        server.process.kill()
        _, alive = psutil.wait_procs(family, timeout=20)
        assert len(family) >= 5 and not alive


def engine(server: RunningServer, number: int) -> psutil.Process:
    """The web server of a replica's vLLM."""

    def found() -> psutil.Process | None:
        for process in psutil.Process(server.process.pid).children(recursive=True):
            words = process.cmdline()
            if "vllm.entrypoints" in " ".join(words) and logs_to(process, server.folder / f"logs/sampler-{number}.log"):
                return process
        return None

    return until(found, f"replica {number}", 300)


def logs_to(process: psutil.Process, log: Path) -> bool:
    return os.readlink(f"/proc/{process.pid}/fd/2") == str(log)


def log_of(server: RunningServer, number: int) -> str:
    return (server.folder / "logs" / f"sampler-{number}.log").read_text("utf-8")


def sleeps(server: RunningServer, number: int) -> int:
    return log_of(server, number).count("seconds to fall asleep")


def loads(server: RunningServer, number: int) -> int:
    return log_of(server, number).count("Loaded new LoRA adapter: name 'default@1'")


def long_call(server: RunningServer, number: int) -> int:
    return server.chat(f"Scenario {number}.", f"long-{number}", max_tokens=150, ignore_eos=True).status_code
