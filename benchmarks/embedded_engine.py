"""The embedded engine against plain batched `generate`, and over HTTP.

    python benchmarks/embedded_engine.py [--model FOLDER] [--calls 64] [--runs 5] [--threads 2] [--json FILE]

At the engine: 64 calls of 100 prompt tokens and 64 new ones, end tokens ignored, beside transformers' `generate` on one
batch of the same prompts; both alternate in one run. "Rollouts" is the same with 8 calls per prompt. "HTTP" is
64 requests at once, logprobs and token ids asked for, through a server in a process of its own; both only with 64 calls.
Figures are seconds:
wall time, and CPU time of the engine's process, which a busy machine disturbs less.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import socket
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import httpx
import psutil
import torch

from offbook.engine.inference.decoding.generation import Generation, Settings, Update
from offbook.engine.inference.decoding.model import ModelRunner, load_model
from offbook.engine.inference.decoding.scheduler import Scheduler
from offbook.tiny import path as tiny_policy

CALLS, PROMPT, NEW, GROUP = 64, 100, 64, 8


class Collector:
    """Runs calls through a scheduler and waits for all of them."""

    def __init__(self, policy: ModelRunner, calls: int) -> None:
        self._policy = policy
        self._left = 0
        self._done = threading.Event()
        self._scheduler = Scheduler(policy, self._deliver, max_batch=calls)
        self._scheduler.start()

    def run(self, prompts: Sequence[Sequence[int]]) -> None:
        settings = Settings(max_tokens=NEW, ignore_eos=True)
        calls = [Generation(tuple(prompt), settings, self._policy.eos) for prompt in prompts]
        self._left = len(calls)
        self._done.clear()
        self._scheduler.submit(calls)
        self._done.wait()

    def close(self) -> None:
        self._scheduler.close()

    def _deliver(self, updates: Sequence[tuple[Generation, Update]]) -> None:
        for _, update in updates:
            if update.failure:
                raise RuntimeError(update.failure.message)
            self._left -= update.finish is not None
        if not self._left:
            self._done.set()


def timed(work: Callable[[], object]) -> tuple[float, float]:
    """Wall and CPU seconds of this process."""
    wall, cpu = time.perf_counter(), time.process_time()
    work()
    return time.perf_counter() - wall, time.process_time() - cpu


def at_the_engine(folder: Path, runs: int, calls: int) -> dict[str, list[tuple[float, float]]]:
    """`generate`, the engine on distinct prompts, and the engine on groups: (wall, CPU) per run, one warm-up each."""
    engine_policy = load_model(folder, device="cpu", dtype="float32", max_model_len=None)
    plain = load_model(folder, device="cpu", dtype="float32", max_model_len=None).model
    plain.set_attn_implementation("sdpa")
    collector = Collector(engine_policy, calls)
    times: dict[str, list[tuple[float, float]]] = {"generate": [], "engine": []} | (
        {"rollouts": []} if calls == CALLS else {}
    )
    for run in range(runs + 1):
        torch.manual_seed(run)
        ids = torch.randint(3, engine_policy.vocabulary, (calls, PROMPT))

        @torch.inference_mode()
        def generate(ids: torch.Tensor = ids) -> None:
            plain.generate(  # type: ignore[operator]  # PEFT hands it on to the model
                ids,
                attention_mask=torch.ones_like(ids),
                do_sample=True,
                top_k=0,
                min_new_tokens=NEW,
                max_new_tokens=NEW,
                pad_token_id=0,
            )

        works: dict[str, Callable[[], None]] = {
            "generate": generate,
            "engine": lambda ids=ids: collector.run(ids.tolist()),
            "rollouts": lambda ids=ids: collector.run(ids.roll(1, 1)[: CALLS // GROUP].repeat(GROUP, 1).tolist()),
        }
        for name, measured in times.items():
            pair = timed(works[name])
            measured += [pair] if run else []
    collector.close()
    return times


async def burst(url: str, run: int) -> None:
    """64 requests at once: 8 conversations, 8 rollouts each."""

    async def one(client: httpx.AsyncClient, at: int) -> None:
        text = f"run {run} order {at // GROUP} please " + "look at it again and tell me " * 3
        body = {
            "model": "base",
            "messages": [{"role": "user", "content": text}],
            "max_tokens": NEW,
            "ignore_eos": True,
            "logprobs": True,
            "return_token_ids": True,
        }
        answer = await client.post(f"{url}/v1/chat/completions", json=body)
        answer.raise_for_status()

    async with httpx.AsyncClient(timeout=600, limits=httpx.Limits(max_connections=CALLS)) as client:
        await asyncio.gather(*(one(client, at) for at in range(CALLS)))


def over_http(folder: Path, runs: int, threads: int) -> list[tuple[float, float]]:
    """(wall, engine CPU) per run of 64 requests at once."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    url = f"http://127.0.0.1:{port}"
    options = ["--model", str(folder), "--served-model-name", "base", "--port", str(port), "--threads", str(threads)]
    process = subprocess.Popen([sys.executable, "-m", "offbook.engine.inference.embedded", *options])
    times: list[tuple[float, float]] = []
    try:
        while True:
            try:
                httpx.get(f"{url}/health")
                break
            except httpx.TransportError:
                if process.poll() is not None:
                    raise RuntimeError("the engine did not start") from None
                time.sleep(0.1)
        used = psutil.Process(process.pid).cpu_times
        for run in range(runs + 1):
            before, wall = sum(used()[:2]), time.perf_counter()
            asyncio.run(burst(url, run))
            times += [(time.perf_counter() - wall, sum(used()[:2]) - before)] if run else []
    finally:
        process.terminate()
        process.wait()
    return times


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, default=tiny_policy())
    parser.add_argument("--calls", type=int, default=CALLS)
    parser.add_argument("--runs", type=int, default=5)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    times = at_the_engine(options.model, options.runs, options.calls)
    if options.calls == CALLS:
        times["http"] = over_http(options.model, options.runs, options.threads)
    medians = {
        name: [statistics.median(column) for column in zip(*pairs, strict=True)] for name, pairs in times.items()
    }
    print(f"{options.calls} calls, {PROMPT} + {NEW} tokens, {options.threads} threads, medians of {options.runs} runs")
    print(f"{'':10s} {'wall s':>8s} {'CPU s':>8s} {'tokens/s':>9s} {'wall ratio':>11s} {'CPU ratio':>10s}")
    for name, (wall, cpu) in medians.items():
        ratios = [mine / reference for mine, reference in zip((wall, cpu), medians["generate"], strict=True)]
        print(
            f"{name:10s} {wall:8.2f} {cpu:8.2f} {options.calls * NEW / wall:9.1f} {ratios[0]:11.2f} {ratios[1]:10.2f}"
        )
    if options.json:
        options.json.write_text(json.dumps({"medians": medians, "runs": times}, indent=1))


if __name__ == "__main__":
    main()
