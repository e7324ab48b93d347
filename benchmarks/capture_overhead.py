"""What a capture adds to a chat model call, beside the unwrapped call and beside OpenPipe ART's LangGraph wrapper.

    python benchmarks/capture_overhead.py [--art-python DIR/bin/python] [--rounds 31] [--calls 20] [--clock cpu|wall]
                                          [--json FILE]

The network is replaced for all alike at its lowest seam (httpcore's connection pools answer at once, with the same bytes),
so what is timed is the client's own work. Each contender has a process, which waits while another one is timed; the order
turns from round to round. A process whose patches are installed cannot be unpatched, and importing ART patches httpx.
ART's Python needs `openpipe-art[langgraph]==0.5.18` and this environment's versions of the libraries in TIMED_TOGETHER.
Figures are microseconds per call; a round's figure is the median of its calls.
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import importlib.metadata
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from statistics import median, quantiles
from typing import Any

import httpcore
from langchain_core.messages import AIMessage, AnyMessage, HumanMessage, SystemMessage, ToolMessage
from langchain_core.runnables import Runnable
from langchain_core.tools import tool
from langchain_openai import ChatOpenAI
from langgraph.graph import END, START, MessagesState, StateGraph
from pydantic import SecretStr

Seconds = dict[str, list[float]]
"""Clock -> seconds of each call."""

URL, NAME = "http://127.0.0.1:9", "agent"
WARM_UP = 5
TIMED_TOGETHER = ("langchain-core", "langchain-openai", "langgraph", "openai", "httpx", "pydantic")
CONTENDERS = {
    "unwrapped": "ChatOpenAI, as its author wrote it",
    "again": "the same once more, in a second process: what a difference of nothing looks like",
    "patched": "the same, patches installed, no capture active",
    "direct": "`ChatOffbook` made by hand, no capture: captured less direct is what the capture itself costs",
    "captured": "inside `capture(model)`: answered by the policy's endpoint",
    "left": "inside `capture(model, exclude=...)`, left on the app's own model",
    "observed": "inside `observe()`, on the app's own model and recorded",
    "art_import": "unwrapped ChatOpenAI where `art` is imported",
    "art": "inside `wrap_rollout`, made by ART's `init_chat_model`",
}


@dataclass(frozen=True)
class Case:
    """`shape`: `plain` is 2 messages, `tools` the same with two bound tools, `history` 20 messages with them."""

    way: str
    shape: str
    place: str

    def __str__(self) -> str:
        return f"{self.way}, {self.shape}, {self.place}"


CASES = [Case(*each) for each in product(("invoke", "ainvoke"), ("plain", "tools", "history"), ("model", "graph"))]


class Network:
    """Every connection of the process; keeps the newest request's headers and counts the chat calls."""

    def __init__(self) -> None:
        self.chats = 0
        self.headers: dict[bytes, bytes] = {}
        self._answers = {each: completion(each) for each in (False, True)}
        lora = {"r": 8, "alpha": 16}
        state = {"name": NAME, "project": "default", "base_model": "tiny", "step": 0, "lora": lora, "checkpoint": None}
        self._state = json.dumps(state).encode()
        self.with_tools = False

    def answer(self, request: httpcore.Request) -> httpcore.Response:
        content = self._state
        if request.url.target.endswith(b"/chat/completions"):
            self.chats += 1
            self.headers = {name.lower(): value for name, value in request.headers}
            content = self._answers[self.with_tools]
        headers = [(b"content-type", b"application/json"), (b"content-length", str(len(content)).encode())]
        return httpcore.Response(200, headers=headers, content=content)

    def install(self) -> None:
        async def answer_async(_: object, request: httpcore.Request) -> httpcore.Response:
            return self.answer(request)

        httpcore.ConnectionPool.handle_request = lambda _, request: self.answer(request)  # type: ignore[assignment]
        httpcore.AsyncConnectionPool.handle_async_request = answer_async  # type: ignore[assignment]


def completion(calls_a_tool: bool) -> bytes:
    """A chat completion as Offbook's server sends it."""
    function = {"name": "search_inbox", "arguments": '{"keywords": "invoice march", "limit": 5}'}
    message: dict[str, Any] = {"role": "assistant", "content": "The invoice of March is 120 euros.", "refusal": None}
    if calls_a_tool:
        message |= {"content": None, "tool_calls": [{"id": "call-0", "type": "function", "function": function}]}
    mark = {"trajectory_id": "trajectory-1", "call_id": "call-1", "index": 0, "step": 0}
    choice = {"index": 0, "message": message, "logprobs": None, "offbook": mark}
    choice["finish_reason"] = "tool_calls" if calls_a_tool else "stop"
    usage = {"prompt_tokens": 210, "completion_tokens": 24, "total_tokens": 234}
    answer = {"id": "chatcmpl-1", "object": "chat.completion", "created": 1, "model": NAME, "usage": usage}
    return json.dumps(answer | {"choices": [choice]}).encode()


@tool
def search_inbox(keywords: str, limit: int = 10) -> str:
    """Search the inbox for messages that contain all keywords."""
    return f"{keywords}: {limit}"


@tool
def read_message(message_id: str) -> str:
    """Read one message of the inbox."""
    return message_id


def conversation(shape: str) -> list[AnyMessage]:
    system = "You are an e-mail assistant. Search the inbox, read what you find, and answer in one sentence."
    messages: list[AnyMessage] = [SystemMessage(system), HumanMessage("How much was the invoice of March?")]
    for turn in range(9 if shape == "history" else 0):
        arguments = {"keywords": f"invoice {turn}", "limit": 5}
        call = {"name": "search_inbox", "args": arguments, "id": f"call-{turn}", "type": "tool_call"}
        messages.append(AIMessage("", tool_calls=[call]))
        messages.append(ToolMessage("3 messages: " + "invoice, reminder, receipt; " * 5, tool_call_id=f"call-{turn}"))
    return messages


def make_callable(case: Case, model: Any) -> tuple[Runnable[Any, Any], Any]:
    """What is invoked, and with what."""
    bound = model if case.shape == "plain" else model.bind_tools([search_inbox, read_message])
    messages = conversation(case.shape)
    if case.place == "model":
        return bound, messages

    def node(state: MessagesState) -> dict[str, Any]:
        return {"messages": [bound.invoke(state["messages"])]}

    async def async_node(state: MessagesState) -> dict[str, Any]:
        return {"messages": [await bound.ainvoke(state["messages"])]}

    graph = StateGraph(MessagesState)
    graph.add_node("agent", node if case.way == "invoke" else async_node)
    graph.add_edge(START, "agent")
    graph.add_edge("agent", END)
    return graph.compile(), {"messages": messages}


async def timed(case: Case, model: Any, calls: int) -> Seconds:
    """Each call's seconds on both clocks, after a warm-up. Sync calls are made inside the running loop, for all alike."""
    target, given = make_callable(case, model)
    seconds: Seconds = {"wall": [], "cpu": []}
    for number in range(WARM_UP + calls):
        if number == WARM_UP:
            gc.collect()
        wall, cpu = time.perf_counter(), time.process_time()
        if case.way == "invoke":
            target.invoke(given)
        else:
            await target.ainvoke(given)
        seconds["cpu"].append(time.process_time() - cpu)
        seconds["wall"].append(time.perf_counter() - wall)
    return {clock: each[WARM_UP:] for clock, each in seconds.items()}


Timer = Callable[[Any], Awaitable[Seconds]]
Contender = Callable[[Timer], Awaitable[Seconds]]


def app_model() -> ChatOpenAI:
    """The app's own model."""
    return ChatOpenAI(model="gpt-4.1-mini", base_url=f"{URL}/v1", api_key=SecretStr("unused"), temperature=1.0)


async def unwrapped(timer: Timer) -> Seconds:
    return await timer(app_model())


def plain_contenders() -> dict[str, Contender]:
    return {"unwrapped": unwrapped, "again": unwrapped}


def offbook_contenders() -> dict[str, Contender]:
    import offbook_langgraph as adapter
    from offbook import RemoteBackend, TrainableModel

    model = TrainableModel(name=NAME, base_model="tiny", backend=RemoteBackend(URL))

    def inside(block: Callable[[], Any]) -> Contender:
        async def contender(timer: Timer) -> Seconds:
            async with block():
                return await timer(app_model())

        return contender

    async def patched(timer: Timer) -> Seconds:
        async with adapter.capture(model):
            pass  # installs the patches
        return await timer(app_model())

    async def direct(timer: Timer) -> Seconds:
        return await timer(adapter.ChatOffbook(model=NAME, base_url=f"{URL}/v1", api_key=SecretStr("unused")))

    return {
        "patched": patched,
        "direct": direct,
        "captured": inside(lambda: adapter.capture(model)),
        "left": inside(lambda: adapter.capture(model, exclude=lambda origin: True)),
        "observed": inside(lambda: adapter.observe()),
    }


def art_contenders() -> dict[str, Contender]:
    import art  # pyright: ignore[reportMissingImports]  # in an environment of its own
    from art.langgraph import init_chat_model, wrap_rollout  # pyright: ignore[reportMissingImports]

    model = art.Model(
        name=NAME,
        project="benchmark",
        inference_base_url=f"{URL}/v1",
        inference_api_key="unused",
        inference_model_name=NAME,
    )

    async def wrapped(timer: Timer) -> Seconds:
        taken: Seconds = {}

        async def rollout() -> art.Trajectory:
            taken.update(await timer(init_chat_model()))
            return art.Trajectory(messages_and_choices=[], reward=0.0)

        await wrap_rollout(model, rollout)()
        return taken

    return {"art_import": unwrapped, "art": wrapped}


def check(contender: str, network: Network, calls: int) -> None:
    """A contender that did not take the way it is named after must not be in the table."""
    label = b"x-offbook-trajectory" in network.headers
    if label != (contender == "captured") or network.chats != calls + WARM_UP:
        raise RuntimeError(f"{contender}: {network.chats} requests for {calls + WARM_UP} calls, labelled: {label}")
    logs = list(Path(".art/langgraph").glob("*")) if Path(".art/langgraph").exists() else []
    if bool(logs) != (contender == "art"):
        raise RuntimeError(f"{contender}: ART's logs here: {logs}")
    for log in logs:
        log.unlink()


async def work(kind: str, answers: Any) -> None:
    """Answer each line of stdin, {contender, case, calls}, with the seconds of each call."""
    network = Network()
    network.install()
    made = {"plain": plain_contenders, "offbook": offbook_contenders, "art": art_contenders}
    contenders = made[kind]()
    versions = {name: importlib.metadata.version(name) for name in TIMED_TOGETHER}
    print(json.dumps({"contenders": list(contenders), "versions": versions}), file=answers, flush=True)
    gc.collect()
    gc.freeze()  # the modules that another contender imports are not searched for garbage
    for line in iter(sys.stdin.readline, ""):
        asked = json.loads(line)
        case, name, calls = Case(*asked["case"]), asked["contender"], asked["calls"]
        network.chats, network.headers, network.with_tools = 0, {}, case.shape != "plain"

        def timer(model: Any, case: Case = case, calls: int = calls) -> Awaitable[Seconds]:
            return timed(case, model, calls)

        seconds = await contenders[name](timer)
        check(name, network, calls)
        print(json.dumps(seconds), file=answers, flush=True)


class Worker:
    """A process with one kind of contenders; `contenders` are those that it has."""

    def __init__(self, kind: str, python: str, folder: Path) -> None:
        argv = [python, str(Path(__file__).absolute()), "--worker", kind]
        folder.mkdir()
        hidden = ("LANGSMITH_TRACING", "LANGCHAIN_TRACING_V2", "OPENAI_PROXY", "HTTP_PROXY", "HTTPS_PROXY", "ALL_PROXY")
        environment = {name: value for name, value in os.environ.items() if name.upper() not in hidden}
        self._process = subprocess.Popen(
            argv, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, cwd=folder, env=environment
        )
        hello = self._read()
        self.contenders: list[str] = hello["contenders"]
        self.versions: dict[str, str] = hello["versions"]

    def time(self, contender: str, case: Case, calls: int) -> Seconds:
        asked = {"contender": contender, "case": [case.way, case.shape, case.place], "calls": calls}
        assert self._process.stdin is not None
        print(json.dumps(asked), file=self._process.stdin, flush=True)
        return self._read()

    def close(self) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait()

    def _read(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise RuntimeError(f"{self._process.args} ended; its error is above")
        return json.loads(line)


def start(folder: Path, art_python: str | None) -> dict[str, Worker]:
    """Contender -> the process that has it."""
    workers = {name: Worker("plain", sys.executable, folder / name) for name in ("unwrapped", "again")}
    others = [Worker("offbook", sys.executable, folder / "offbook")]
    if art_python:
        others.append(Worker("art", art_python, folder / "art"))
    for worker in others:
        if worker.versions != workers["unwrapped"].versions:
            raise SystemExit(f"versions differ: {worker.versions} and {workers['unwrapped'].versions}")
        workers |= dict.fromkeys(worker.contenders, worker)
    return workers


Times = dict[str, dict[str, list[Seconds]]]


def run_rounds(workers: dict[str, Worker], rounds: int, calls: int) -> Times:
    """case -> contender -> the seconds of each round. The order turns from round to round; the first round is a warm-up."""
    names = list(workers)
    times: Times = {str(case): {name: [] for name in names} for case in CASES}
    for number in range(rounds + 1):
        first = number % len(names)
        for case in CASES:
            for name in names[first:] + names[:first]:
                seconds = workers[name].time(name, case, calls)
                times[str(case)][name] += [seconds] if number else []
        print(f"round {number} of {rounds}", file=sys.stderr)
    return times


def spread(mine: list[float], base: list[float]) -> str:
    """The difference of the medians, and the middle half of the rounds' own differences."""
    low, _, high = quantiles([one - other for one, other in zip(mine, base, strict=True)], n=4)
    return f"{median(mine) - median(base):+.0f} ({low:+.0f} to {high:+.0f})"


def tables(times: Times, names: list[str], clock: str) -> str:
    """Microseconds: medians of the rounds, then the least rounds; what each contender adds to the unwrapped call."""
    others = [name for name in names if name != "unwrapped"]
    header = "| | unwrapped | " + " | ".join(others) + " |\n" + "|---" * (len(others) + 2) + "|"
    medians, least = [header.replace("| |", "| median |", 1)], [header.replace("| |", "| least |", 1)]
    for case, of_case in times.items():
        micro = {name: [1e6 * median(each[clock]) for each in rounds] for name, rounds in of_case.items()}
        base = micro["unwrapped"]
        added = " | ".join(spread(micro[name], base) for name in others)
        medians.append(f"| {case} | {median(base):.0f} | {added} |")
        added = " | ".join(f"{min(micro[name]) - min(base):+.0f}" for name in others)
        least.append(f"| {case} | {min(base):.0f} | {added} |")
    return "\n".join([*medians, "", *least])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--art-python", help="a Python with openpipe-art[langgraph]==0.5.18")
    parser.add_argument("--rounds", type=int, default=31)
    parser.add_argument("--calls", type=int, default=20, help="per case, contender and round")
    parser.add_argument("--clock", choices=["wall", "cpu"], default="cpu")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--worker", choices=["plain", "offbook", "art"], help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.worker:
        answers = os.fdopen(os.dup(1), "w")
        os.dup2(2, 1)  # what the libraries print is no answer
        asyncio.run(work(options.worker, answers))
        return
    with tempfile.TemporaryDirectory() as folder:
        workers = start(Path(folder), options.art_python)
        times = run_rounds(workers, options.rounds, options.calls)
        for worker in set(workers.values()):
            worker.close()
    print(", ".join(f"{name} {version}" for name, version in workers["unwrapped"].versions.items()))
    print(f"{options.clock} clock, {options.rounds} rounds of {options.calls} calls\n")
    print("\n".join(f"{name}: {CONTENDERS[name]}" for name in workers) + "\n")
    print(tables(times, list(workers), options.clock))
    if options.json:
        options.json.write_text(json.dumps(times))


if __name__ == "__main__":
    main()
