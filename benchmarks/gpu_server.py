"""Offbook's server with vLLM on one GPU, in one memory layout: start, steps, sleep and wake, memory against the plan.

    python benchmarks/gpu_server.py --shape 0.5B --memory-layout free_cache --output FOLDER

The base has random weights in Qwen2.5's shape, and the bundled policy's tokenizer with filler tokens. Two steps are made from
random rewards. On a CPU (`--shape micro --device cpu`) vLLM's sleep frees nothing: a test of this script.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import torch
from gpu_cases import SHAPES, Shape
from transformers import AutoModelForCausalLM

from offbook.tiny import path as tiny_policy

READY_SECONDS = 400.0
STEPS = 2
METRICS = (
    "kl/sampler_learner",
    "kl/sampler_learner_max_diff",
    "seconds/total",
    "sampler/swap_seconds",
    "tokens/computed",
    "memory/learner_peak",
    "memory/gpu_peak",
)
TOOK = re.compile(r"It took ([\d.]+) seconds to (fall asleep|discard|wake up)")


def write_base(shape: Shape, folder: Path, device: str) -> None:
    """Random weights in `folder`, beside a tokenizer that knows every token of the shape's vocabulary."""
    if shape.hidden < 32 * shape.heads:  # vLLM has no attention for smaller heads on a CPU
        shape = replace(shape, heads=2, kv_heads=1)
    config = shape.config()
    policy = json.loads((tiny_policy() / "config.json").read_text("utf-8"))
    tokenizer = json.loads((tiny_policy() / "tokenizer.json").read_text("utf-8"))
    vocabulary = max(shape.vocabulary, policy["vocab_size"])
    config.vocab_size, config.max_position_embeddings = vocabulary, 4096
    config.eos_token_id = policy["eos_token_id"]
    torch.manual_seed(0)
    with torch.device(device):
        model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16 if device == "cuda" else torch.float32)
    model.save_pretrained(folder)
    known = set(tokenizer["model"]["vocab"].values()) | {each["id"] for each in tokenizer["added_tokens"]}
    tokenizer["model"]["vocab"] |= {f"filler{number}": number for number in range(vocabulary) if number not in known}
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer), "utf-8")
    for name in ("tokenizer_config.json", "chat_template.jinja"):
        shutil.copy(tiny_policy() / name, folder / name)


def write_rows(rows: list[tuple[str, str]], page: Path) -> None:
    """Write what is known so far as a table: a stage that is ended at its limit shows it."""
    lines = ["| what | value |", "|---|---|", *(f"| {name} | {value} |" for name, value in rows)]
    page.write_text("\n".join(lines) + "\n", "utf-8")


@contextmanager
def server(base: Path, folder: Path, words: list[str]) -> Iterator[tuple[httpx.Client, float]]:
    """A client of the running server, and the seconds until it answered."""
    began = time.monotonic()
    command = [sys.executable, "-m", "offbook.server", "--model", str(base), "--dir", str(folder), "--port", "0"]
    with subprocess.Popen([*command, *words]) as process, httpx.Client(timeout=300, trust_env=False) as client:
        try:
            while True:
                if process.poll() is not None or time.monotonic() - began > READY_SECONDS:
                    raise SystemExit(f"the server did not start: {process.poll()}; see {folder / 'logs'}")
                try:
                    client.base_url = json.loads((folder / "server.json").read_text("utf-8"))["url"]
                    if client.get("/health").json()["status"] == "ok":
                        break
                except (OSError, ValueError, KeyError, httpx.HTTPError):
                    time.sleep(0.2)
            yield client, time.monotonic() - began
        finally:
            process.terminate()
            process.wait(60)


def step(client: httpx.Client, number: int, rollouts: int, tokens: int) -> dict[str, float]:
    """The metrics of one step on one group with random rewards."""

    def rollout(index: int) -> dict[str, Any]:
        name = f"{number}-{index}"
        body = {"model": "default", "messages": [{"role": "user", "content": "Where is order 17? " * 20}]}
        body |= {"max_tokens": tokens, "temperature": 1.0, "ignore_eos": True}
        answer = client.post("/v1/chat/completions", json=body, headers={"x-offbook-trajectory": name})
        answer.raise_for_status()
        return {"id": name, "model": "default", "reward": float(index % 2), "started_at": 1.0, "ended_at": 2.0}

    with ThreadPoolExecutor(rollouts) as threads:
        records = list(threads.map(rollout, range(rollouts)))
    client.post("/api/trajectories", json={"trajectories": records}).raise_for_status()
    group = {"trajectory_ids": [record["id"] for record in records]}
    body = {"id": f"step-{number}", "model": "default", "groups": [group], "config": {"learning_rate": 1e-4}}
    answer = client.post("/api/train", json=body).raise_for_status()
    last = json.loads([line for line in answer.text.split("\n") if line.startswith("data: ")][-1][6:])
    if last["kind"] != "result" or not last["result"]["applied"]:
        raise SystemExit(f"step {number} was not applied: {last}")
    return last["result"]["metrics"]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", choices=SHAPES, required=True)
    parser.add_argument("--memory-layout", choices=("side_by_side", "free_cache", "offload"), required=True)
    parser.add_argument("--loader", choices=("peft", "unsloth"), default="peft")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--output", type=Path, required=True)
    options = parser.parse_args()
    try:
        _measure(options, options.output)
    finally:
        shutil.rmtree(options.output / "base", ignore_errors=True)  # 15 GB at 7B


def _measure(options: argparse.Namespace, folder: Path) -> None:
    on_cpu = options.device == "cpu"
    began = time.monotonic()
    writing = (SHAPES[options.shape], folder / "base", options.device)
    writer = multiprocessing.get_context("spawn").Process(target=write_base, args=writing)  # leaves nothing on the GPU
    writer.start()
    writer.join()
    if writer.exitcode:
        raise SystemExit(f"the weights were not written: exit code {writer.exitcode}")
    rows = [("weights written, s", f"{time.monotonic() - began:.1f}")]
    words = ["--engine", "vllm", "--loader", options.loader, "--memory-layout", options.memory_layout]
    words += ["--max-model-len", "2048", *(["--device", "cpu", "--threads", "1"] if on_cpu else [])]
    with server(folder / "base", folder / "dir", words) as (client, started):
        rows.append(("server ready, s", f"{started:.1f}"))
        write_rows(rows, folder / "server.md")
        for number in range(1, STEPS + 1):
            metrics = step(client, number, 4 if on_cpu else 32, 16 if on_cpu else 256)
            rows += [(f"step {number}: {name}", f"{metrics[name]:.4g}") for name in METRICS if name in metrics]
            write_rows(rows, folder / "server.md")
    log = (folder / "dir" / "logs" / "sampler.log").read_text("utf-8", "replace")
    rows += [(f"vLLM: {what}, s", seconds) for seconds, what in TOOK.findall(log)]
    write_rows(rows, folder / "server.md")


if __name__ == "__main__":
    main()
