"""A small model takes the shop's paid one's place, and goes back twice: `python -m on_the_job.run`, in the folder `examples`."""

from __future__ import annotations

import argparse
import asyncio
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import aclosing, contextmanager, redirect_stdout
from pathlib import Path

import httpx
from measured_training import write_figures
from on_the_job.agent import DOWN
from on_the_job.paid import PRICE, paid
from on_the_job.shop import Shop

from offbook.client.local import running_server
from offbook.commands.main import run
from offbook.testing import scripted_llm
from offbook_production.wire import TakeoverState

HERE = Path(__file__).parent
RULE = ("--share", "0.25", "--threads", "60", "--margin", "0.15", "--answer-seconds", "120")
"""A processor with other work answers late; the default of the last is 30."""
MOST = 3_000
"""Customers that a takeover may take."""


async def offbook(*words: str) -> None:
    """Run a command of Offbook's, and show it. What it prints goes to commands.log."""
    print("$ offbook", *words, flush=True)
    with Path("commands.log").open("a") as log, redirect_stdout(log):
        code = await asyncio.to_thread(run, [*words])
    if code:
        raise SystemExit(code)


@contextmanager
def served(folder: Path, paid_url: str, *more: str) -> Iterator[str]:
    """`offbook serve` before the paid model, with `more` options, until the block ends."""
    upstream = f"openai/gpt-4.1-mini?api_base={paid_url}&{PRICE}"
    words = ["serve", "--model", "tiny", "--name", "order-desk", "--port", "0", "--upstream", upstream]
    words += ["--route", "order-desk", "--record-share", "1", *more]
    print("$ offbook", *words, flush=True)
    words += ["--parent-pid", str(os.getpid())]
    with (folder / "server.log").open("wb") as log:
        server = subprocess.Popen([sys.executable, "-m", "offbook", *words], cwd=folder, stdout=log, stderr=log)
    try:
        while (api := running_server(folder / ".offbook")) is None or not _ready(api.url):
            if server.poll() is not None:
                raise SystemExit(f"the server ended: {folder / 'server.log'} says why")
            time.sleep(0.2)
        yield api.url
    finally:
        server.terminate()
        server.wait()


def _ready(url: str) -> bool:
    return httpx.get(f"{url}/health", trust_env=False).json()["status"] == "ok"


async def told(shop: Shop, recorded: int) -> None:
    async with aclosing(shop):
        await story(shop, recorded)


async def story(shop: Shop, recorded: int) -> None:
    """Training, the takeover, and two ways back from it."""
    if not Path("all.jsonl").exists():  # else the command goes on where it was interrupted
        shop.mark("the paid model alone, recorded")
        await shop.serve(recorded)
        traces = ("traces", "conversations", "--run", "route/order-desk", "--output")
        await offbook(*traces, "good.jsonl", "--min-reward", "1")
        await offbook(*traces, "all.jsonl")
    await train("good.jsonl")
    shop.mark("a small model that learned from the paid one's good threads")
    await start()
    good = (await reached(shop, "taken_over")).model
    shop.mark("a worse step: the newest one is trained on what customers complained about")
    good_lines, all_lines = (Path(name).read_text().split("\n") for name in ("good.jsonl", "all.jsonl"))
    Path("bad.jsonl").write_text("\n".join(line for line in all_lines if line not in good_lines))
    await train("bad.jsonl")
    await offbook("takeover", "stop")
    await start()
    await reached(shop, "left")
    await start("--model", good)
    await reached(shop, "taken_over")
    shop.mark("a broken tool: the system with the carriers is down")
    DOWN.add("carrier")
    await reached(shop, "left")


async def reached(shop: Shop, status: str) -> TakeoverState:
    """Serve customers until the takeover has ended so."""
    state = await shop.serve(MOST, lambda state: state.status in ("left", status))
    if state.status != status:
        raise SystemExit(f"the takeover is {state.status!r} after {shop.threads:,} customers, and not {status!r}")
    return state


async def start(*words: str) -> None:
    await offbook("takeover", "start", *RULE, *words)


async def train(data: str) -> None:
    options = ("--epochs", "6", "--batch-size", "4", "--learning-rate", "3e-3", "--skip-bad")
    await offbook("sft", data, "--base-model", "tiny", "--model", "order-desk", *options)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    parser.add_argument("--seed", type=int, default=0, help="draws the customers")
    parser.add_argument("--recorded", type=int, default=128, help="customers whose threads are recorded and trained on")
    parser.add_argument("--dir", type=Path, default=Path("desk"), help="folder for everything it makes")
    parser.add_argument("--write", action="store_true", help="write the figures that the gallery shows")
    options = parser.parse_args()
    folder = (options.dir / str(options.seed)).absolute()
    folder.mkdir(parents=True, exist_ok=True)
    os.chdir(folder)
    started = time.monotonic()
    with scripted_llm(paid) as provider, served(folder, provider.url) as url:
        os.environ["OFFBOOK_URL"] = url
        shop = Shop(url, options.seed)
        try:
            asyncio.run(told(shop, options.recorded))
        finally:
            [route] = httpx.get(f"{url}/api/routes", trust_env=False).json()
            decisions = httpx.get(f"{url}/api/takeover", trust_env=False).json()["decisions"]
            figures = {"seed": options.seed, "minutes": round((time.monotonic() - started) / 60, 1)}
            figures |= {"paid_calls": route["calls"], "paid_usd": round(route["cost"], 4)}
            figures |= {"marks": shop.marks, "decisions": decisions, "rows": shop.rows}
            write_figures(figures, folder / "figures.json")
    print(f"{figures['minutes']} minutes, {shop.threads:,} customers; {folder / 'figures.json'}")
    if options.write:
        write_figures(figures, HERE / f"results/seed-{options.seed}.json")


if __name__ == "__main__":
    main()
