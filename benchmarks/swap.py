"""What a LoRA swap does to running streams: the longest gap between two tokens, with swaps and without.

    python benchmarks/swap.py [--runs 5] [--json FILE]

16 streams of 400 tokens each on one LoRA, in Offbook's server in front of vLLM. In every second run, forks of the model
become callable meanwhile, one after the other: each is a new adapter that is loaded and called at once, as a new step is. Five swaps
in a run; training itself is left out, which on a CPU takes cores from the sampler. The goal: at most 250 ms more.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import statistics
import time
from pathlib import Path

import httpx
from vllm_and_gateway import both

import offbook
from offbook.base.server_sent_events import EventReader
from offbook.tiny import path as tiny_policy

STREAMS, TOKENS, SWAPS = 16, 400, 5
GOAL_MS = 250
QUESTION = [{"role": "user", "content": "Tell me all that you know."}]


async def make_step(url: str, base: Path) -> None:
    """Step 1 of the model `swap`, from random rewards."""
    model = offbook.TrainableModel(name="swap", base_model=str(base), backend=offbook.RemoteBackend(url))
    await model.register()

    async def rollout(reward: float) -> offbook.Trajectory:
        trajectory = offbook.Trajectory(messages_and_choices=list(QUESTION), reward=reward)
        answer = await model.openai_client().chat.completions.create(
            model=model.name, messages=trajectory.messages(), max_tokens=16, temperature=2.0
        )
        trajectory.messages_and_choices.append(answer.choices[0])
        return trajectory

    groups = await offbook.gather_trajectory_groups(
        [offbook.TrajectoryGroup(rollout(float(place)) for place in range(4))]
    )
    result = await model.train(groups)
    if result.step != 1:
        raise SystemExit(f"no step was made: {result.reason}")


async def longest_gap(client: httpx.AsyncClient) -> float:
    """Seconds between two events of one stream. Ids are asked for: without them vLLM sends nothing for a token that adds
    no text, and what the policy writes after its end is mostly special tokens."""
    body = {"model": "swap", "messages": QUESTION, "max_tokens": TOKENS, "ignore_eos": True, "stream": True}
    gaps: list[float] = []
    tokens, last = 0, time.perf_counter()
    async with client.stream("POST", "/v1/chat/completions", json=body | {"return_token_ids": True}) as answer:
        reader = EventReader()
        async for piece in answer.aiter_bytes():
            for data in reader.push(piece):
                choices = [] if data == b"[DONE]" else json.loads(data).get("choices", [])
                now = time.perf_counter()
                ids = [token for choice in choices for token in choice.get("token_ids") or ()]
                if tokens and ids:
                    gaps.append(now - last)
                tokens, last = tokens + len(ids), now
    if tokens != TOKENS:
        raise SystemExit(f"status {answer.status_code}: a stream of {TOKENS} tokens had {tokens}")
    return max(gaps)


async def swap(client: httpx.AsyncClient, name: str) -> float:
    """Fork the model and call the fork: seconds until its first token."""
    (await client.post("/api/models/swap/fork", json={"name": name})).raise_for_status()
    began = time.perf_counter()
    body = {"model": name, "messages": QUESTION, "max_tokens": 1}
    (await client.post("/v1/chat/completions", json=body)).raise_for_status()
    return time.perf_counter() - began


async def run(url: str, names: list[str]) -> tuple[float, list[float]]:
    """The longest gap of all streams, and the seconds of each swap."""
    async with httpx.AsyncClient(base_url=url, timeout=600, trust_env=False) as client:
        streams = [asyncio.create_task(longest_gap(client)) for _ in range(STREAMS)]
        await asyncio.sleep(1.0)
        swaps: list[float] = []
        for name in names:
            swaps.append(await swap(client, name))
            await asyncio.sleep(0.3)
        done = sum(stream.done() for stream in streams)
        if done:
            raise SystemExit(f"{done} streams ended before the swaps did")
        return max(await asyncio.gather(*streams)), swaps


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, default=tiny_policy())
    parser.add_argument("--runs", type=int, default=5)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    gaps, swaps = {"without": list[float](), "with": list[float]()}, list[float]()
    with both(options.model, train=True) as servers:
        asyncio.run(make_step(servers.gateway, options.model))
        asyncio.run(run(servers.gateway, []))  # warm-up
        for run_number in range(options.runs):
            gaps["without"].append(1e3 * asyncio.run(run(servers.gateway, []))[0])
            gap, took = asyncio.run(run(servers.gateway, [f"fork-{run_number}-{number}" for number in range(SWAPS)]))
            gaps["with"].append(1e3 * gap)
            swaps += [1e3 * each for each in took]
    print("| longest gap between tokens, ms | median | of the runs |\n|---|---|---|")
    for name, values in gaps.items():
        print(f"| {name} swaps | {statistics.median(values):.0f} | {', '.join(f'{value:.0f}' for value in values)} |")
    added = statistics.median(gaps["with"]) - statistics.median(gaps["without"])
    print(f"\nadded: {added:.0f} ms (goal: at most {GOAL_MS}); a swap until its first token: median ", end="")
    print(f"{statistics.median(swaps):.0f} ms, most {max(swaps):.0f} ms")
    if options.json:
        options.json.write_text(json.dumps({"gaps_ms": gaps, "swaps_ms": swaps}, indent=1) + "\n")


if __name__ == "__main__":
    main()
