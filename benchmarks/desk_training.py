"""GRPO on the order desk in one process: the embedded engine's scheduler samples, the learner trains.

`sample_efficiency.py` and `distillation.py` run this many times. Prompts, tool calls, rewards and steps are those of the server; HTTP and
LangGraph are left out, since only the number of rollouts counts here.
"""

from __future__ import annotations

import json
import random
import shutil
import tempfile
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from statistics import fmean, pstdev
from typing import Any, Literal

import numpy as np
import torch
from langchain_core.messages import AIMessage, BaseMessage, HumanMessage
from langchain_core.utils.function_calling import convert_to_openai_tool

from offbook import LoraOptions, TrainConfig
from offbook.base.types import Sampling
from offbook.engine.inference.chat.requests import read_chat
from offbook.engine.inference.chat.tool_calls import HermesParser, ToolCall
from offbook.engine.inference.decoding.adapters import Adapter, load_adapter
from offbook.engine.inference.decoding.generation import Decoder, Generation, Settings, Update
from offbook.engine.inference.decoding.model import load_model
from offbook.engine.inference.decoding.scheduler import Scheduler
from offbook.engine.inference.service import ChatRenderer
from offbook.engine.learner.learner import Learner
from offbook.engine.learner.model.policy import Policy
from offbook.engine.protocol import JobTrajectory, Sample, TrainCommand, TrainJob, write_job
from offbook.quickstart.desk import Desk, Request, reward
from offbook.tiny import path as tiny_path
from offbook.trainer.imitation import ScoredRollout, draw
from offbook.trainer.run import batch

TRAIN_REQUESTS, TEST_REQUESTS = 600, 120
MAX_TOKENS = 48
MAX_CALLS = 6
"""Model calls of one rollout. A desk's request takes two or three."""


@dataclass(frozen=True)
class Training:
    """How a policy is trained. `config`: step 1, 2, ... -> its options. `batch_scale`: divide advantages by the standard deviation of
    the whole batch instead of the group's. `probes`: first sample so many rollouts of each of twice the scenarios, then spend
    the rest of the step's on the half whose success is nearest to 1/2. `revisits`: so many of a step's scenarios are those seen before
    whose success was nearest to 1/2, neither 0 nor 1. `replayed`: so many good rollouts of earlier steps are imitated beside a step's own,
    if its options have `min_reward`. `replayed_groups`: so many groups of earlier steps, in which some but at most half were right, are trained
    again, with the logprobs that were recorded. `first` and `stopped`: sample so many rollouts of each request first, and no more if
    all of these are `"equal"`, or all `"right"`. `entropy`: add so much of its surprisal, in nats, to the reward of a rollout whose group
    differs. `a_scale`: multiplies the LoRA's initial A. `teacher`: the
    checkpoint of the teacher that the options name; a supervised step trains on its rollouts."""

    config: Callable[[int], TrainConfig]
    lora: LoraOptions = field(default_factory=LoraOptions)
    group_size: int = 8
    scenarios: int = 12
    temperature: float = 1.0
    batch_scale: bool = False
    probes: int = 0
    revisits: int = 0
    replayed: int = 0
    replayed_groups: int = 0
    first: int = 0
    stopped: Literal["equal", "right"] = "equal"
    entropy: float = 0.0
    a_scale: float = 1.0
    teacher: Path | None = None


@dataclass
class Rollout:
    """An attempt at a request: its messages so far as OpenAI has them, and its sampled calls."""

    request: Request
    messages: list[dict[str, Any]]
    samples: list[Sample] = field(default_factory=list[Sample])
    over: bool = False
    reward: float = 0.0
    success: float = 0.0


class ScaledPolicy(Policy):
    """A policy whose fresh adapter has its A multiplied by `a_scale`, which is that of all policies of the process."""

    a_scale = 1.0

    def reset_adapter(self, lora: LoraOptions) -> None:
        """As `Policy.reset_adapter`."""
        super().reset_adapter(lora)
        with torch.no_grad():
            for name, value in self.trainable_parameters().items():
                if ".lora_A." in name:
                    value.mul_(self.a_scale)


class Sampler:
    """Samples many completions at once. `adapter`: the newest checkpoint's; None: the base."""

    def __init__(self, base: Path, tools: Sequence[object]) -> None:
        self._runner = load_model(base, device="cpu", dtype="float32", max_model_len=None)
        self._renderer = ChatRenderer(self._runner.tokenizer, self._runner.max_model_len)
        self._decoder = Decoder(self._runner.tokenizer, kept=("<tool_call>", "</tool_call>"))
        self._tools = [convert_to_openai_tool(tool) for tool in tools]  # pyright: ignore[reportArgumentType]
        self._scheduler = Scheduler(self._runner, self._deliver, max_batch=128)
        self._scheduler.start()
        self._prompts: dict[str, tuple[int, ...]] = {}
        self._updates: dict[Generation, Update] = {}
        self._waiting, self._done = 0, threading.Event()
        self._failure: str | None = None
        self.adapter: Adapter | None = None

    def load(self, name: str, folder: Path) -> None:
        """Use the checkpoint in `folder` from now on."""
        if self.adapter is not None:
            self._scheduler.forget(self.adapter)
        self.adapter = load_adapter(name, folder, self._runner.layers)

    def prompt(self, messages: Sequence[dict[str, Any]]) -> tuple[int, ...]:
        """The token ids of a prompt, rendered as the server does."""
        body = json.dumps({"model": "tiny", "messages": messages, "tools": self._tools})
        if body not in self._prompts:
            self._prompts[body] = self._renderer.prompt_ids(read_chat(body.encode()))
        return self._prompts[body]

    def sample(self, prompts: Sequence[tuple[int, ...]], temperature: float) -> list[Update]:
        """One completion of each prompt."""
        settings = Settings(max_tokens=MAX_TOKENS, sampling=Sampling(temperature=temperature))
        generations = [Generation(prompt, settings, self._runner.eos, self.adapter) for prompt in prompts]
        self._updates, self._waiting = {}, len(generations)
        self._done.clear()
        self._scheduler.submit(generations)
        self._done.wait()
        if self._failure is not None:
            raise RuntimeError(f"sampling failed: {self._failure}")
        return [self._updates[generation] for generation in generations]

    def read(self, update: Update) -> list[str | ToolCall]:
        """Text and tool calls of a completion."""
        parser = HermesParser()
        pieces = parser.push(self._decoder.decode(update.token_ids))
        return [*pieces, *parser.finish(truncated=update.finish == "length")]

    def close(self) -> None:
        """End the scheduler's thread."""
        self._scheduler.close()

    def _deliver(self, updates: Sequence[tuple[Generation, Update]]) -> None:
        for generation, update in updates:
            if update.failure is not None:
                self._failure = update.failure.message
            if update.failure is not None or update.finish is not None:
                self._updates[generation] = update
                self._waiting -= 1
        if not self._waiting:
            self._done.set()


class DeskTraining:
    """One policy and the desk's requests. `first_call`: a rollout is its first model call, with the reward 1 or 0; otherwise
    it is the quickstart's whole rollout with its reward."""

    def __init__(self, training: Training, seed: int, folder: Path, *, first_call: bool) -> None:
        self._training, self._seed, self._first_call = training, seed, first_call
        self._desk, self._folder = Desk(folder / "desk.db"), folder
        self._tools = {tool.name: tool for tool in self._desk.tools()}
        self._train = self._desk.requests("train", TRAIN_REQUESTS, seed)
        self._test = self._desk.requests("test", TEST_REQUESTS)
        self._lora = training.lora.model_copy(update={"seed": seed})
        self._sampler = Sampler(tiny_path(), list(self._tools.values()))
        ScaledPolicy.a_scale = training.a_scale
        policy = ScaledPolicy.load(tiny_path(), self._lora)
        self._learner = Learner(policy, "tiny", emit=lambda event: None)
        self._step = self._iterations = self.rollouts = 0
        self.taught: list[float] = []
        """For each step, the share of rollouts whose advantage is not zero."""
        self._earlier: dict[str, Rollout] = {}  # by a name of its own
        self._scored: list[ScoredRollout] = []
        self._rare: list[list[Rollout]] = []
        self._draws = random.Random(seed)
        self._seen: dict[Request, float] = {}  # its success when it was sampled last
        self.metrics: dict[str, float] = {}
        """What the learner measured in the newest update."""

    @property
    def newest(self) -> Path:
        """The checkpoint of the newest step."""
        return self._folder / "checkpoints" / f"{self._step:04d}"

    def held_out(self, temperature: float) -> float:
        """Success of the newest step on the held-out requests."""
        return fmean(rollout.success for rollout in self._rollouts(self._test, temperature))

    def step(self) -> float:
        """One iteration of rollouts and their update; the mean success of the rollouts."""
        teacher = self._training.teacher
        if teacher is not None and self._training.config(self._step + 1).supervised:
            self._sampler.load("teacher", teacher)
        groups = self._groups()
        self._iterations += 1
        self.rollouts += sum(map(len, groups))
        self.taught.append(fmean(len({r.reward for r in group}) > 1 for group in groups for _ in group))
        imitates = self._training.config(self._step + 1).min_reward is not None
        if teacher is not None or imitates or any(len({rollout.reward for rollout in group}) > 1 for group in groups):
            self._update(groups)
        return fmean(rollout.success for group in groups for rollout in group)

    def close(self) -> None:
        """End the sampler."""
        self._sampler.close()

    def _groups(self) -> list[list[Rollout]]:
        how = self._training
        count = how.scenarios * (2 if how.probes else 1)
        again = sorted(
            (each for each, rate in self._seen.items() if 0 < rate < 1), key=lambda each: abs(self._seen[each] - 0.5)
        )
        again = again[: how.revisits]
        chosen = [*again, *batch(self._train, count, self._iterations, self._seed)[len(again) :]]
        size = how.probes or how.first or how.group_size
        rolled = self._rollouts([request for request in chosen for _ in range(size)], how.temperature)
        groups = [rolled[start : start + size] for start in range(0, len(rolled), size)]
        if how.probes:
            groups.sort(key=lambda group: abs(fmean(rollout.success for rollout in group) - 0.5))
            more = how.group_size - 2 * how.probes
            asked = [group[0].request for group in groups[: how.scenarios] for _ in range(more)]
            finished = self._rollouts(asked, how.temperature)
            for number in range(how.scenarios):
                groups[number].extend(finished[number * more : (number + 1) * more])
        if how.first:
            going = [group for group in groups if not self._decided(group)]
            more = how.group_size - how.first
            finished = self._rollouts([group[0].request for group in going for _ in range(more)], how.temperature)
            for number, group in enumerate(going):
                group.extend(finished[number * more : (number + 1) * more])
        self._seen |= {group[0].request: fmean(rollout.success for rollout in group) for group in groups}
        return groups

    def _decided(self, group: Sequence[Rollout]) -> bool:
        """Whether a request gets no more rollouts."""
        rates = {rollout.success for rollout in group}
        return rates == {1.0} if self._training.stopped == "right" else len(rates) == 1

    def _rollouts(self, requests: Sequence[Request], temperature: float) -> list[Rollout]:
        rollouts = [Rollout(request, [{"role": "user", "content": request.question}]) for request in requests]
        for _ in range(1 if self._first_call else MAX_CALLS):
            running = [rollout for rollout in rollouts if not rollout.over]
            if not running:
                break
            prompts = [self._sampler.prompt(rollout.messages) for rollout in running]
            updates = self._sampler.sample(prompts, temperature)
            for rollout, prompt, update in zip(running, prompts, updates, strict=True):
                self._add(rollout, prompt, update, temperature)
        for rollout in rollouts:
            if self._first_call:
                rollout.reward = rollout.success = float(first_call(rollout) == right_call(rollout.request))
            else:
                scores = reward(rollout.request, [as_langchain(message) for message in rollout.messages])
                rollout.reward, rollout.success = scores["reward"], scores["success"]
        return rollouts

    def _add(self, rollout: Rollout, prompt: tuple[int, ...], update: Update, temperature: float) -> None:
        """Append an answer, and the results of its tool calls."""
        ids, logprobs = np.array(update.token_ids, np.int32), np.array(update.logprobs, np.float32)
        number = len(rollout.samples)
        sampling = Sampling(temperature=temperature)
        rollout.samples.append(
            Sample(f"call-{number}", 0, np.array(prompt, np.int32), ids, logprobs, sampling, self._step)
        )
        pieces = self._sampler.read(update)
        text = "".join(piece for piece in pieces if isinstance(piece, str))
        calls = [piece for piece in pieces if isinstance(piece, ToolCall)]
        message: dict[str, Any] = {"role": "assistant", "content": text}
        if calls:
            message["tool_calls"] = [
                {
                    "id": f"call-{number}-{place}",
                    "type": "function",
                    "function": {"name": call.name, "arguments": call.arguments},
                }
                for place, call in enumerate(calls)
            ]
        rollout.messages.append(message)
        if self._first_call:
            return
        rollout.over = not calls
        for place, call in enumerate(calls):
            content = self._result(call)
            rollout.messages.append({"role": "tool", "content": content, "tool_call_id": f"call-{number}-{place}"})

    def _result(self, call: ToolCall) -> str:
        """What a tool answers. The model sees an error as the tool's result."""
        tool = self._tools.get(call.name)
        if tool is None:
            return f"Error: {call.name} is not a valid tool, try one of [{', '.join(self._tools)}]."
        try:
            return json.dumps(tool.invoke(json.loads(call.arguments)))
        except (ValueError, TypeError) as error:
            return f"Error: {error!r}\n Please fix your mistakes."

    def _update(self, groups: Sequence[Sequence[Rollout]]) -> None:
        config = self._training.config(self._step + 1)
        weight = 1.0
        if self._training.batch_scale:
            deviations = [r.reward - fmean(other.reward for other in group) for group in groups for r in group]
            weight = 1 / (pstdev(deviations) + 1e-6)
            config = config.model_copy(update={"scale_rewards": False})
        job = Path(tempfile.mkdtemp(dir=self._folder)) / "job"
        trained = [*groups, *self._again(groups)]
        trajectories = tuple(
            tuple(
                JobTrajectory(
                    f"{g}-{i}",
                    self._scored_with(r, group),
                    tuple(replace(sample, weight=weight) for sample in r.samples),
                )
                for i, r in enumerate(group)
            )
            for g, group in enumerate(trained)
        )
        if config.min_reward is not None:
            names = draw(self._scored, config.min_reward, self._training.replayed, self._draws)
            again = [(name, self._earlier[name]) for name in names]
            trajectories += tuple((JobTrajectory(n, r.reward, tuple(r.samples), replayed=True),) for n, r in again)
            self._remember(groups)
        request = f"step-{self._step + 1}"
        write_job(job, TrainJob(request, "desk", trajectories, config))
        command = TrainCommand(
            request_id=request,
            model="desk",
            job=job,
            checkpoints=self._folder / "checkpoints",
            step=self._step,
            lora=self._lora,
            teacher=None if config.supervised else self._training.teacher,
        )
        result = self._learner.train(command)
        shutil.rmtree(job.parent)
        if result.applied:
            old, self._step, self.metrics = self.newest, result.step, result.metrics
            self._sampler.load(f"desk@{result.step}", self.newest)
            shutil.rmtree(old, ignore_errors=True)

    def _again(self, groups: Sequence[Sequence[Rollout]]) -> list[list[Rollout]]:
        """Groups of earlier steps that are trained again, drawn at random; this step's are remembered."""
        again = self._draws.sample(self._rare, min(self._training.replayed_groups, len(self._rare)))
        self._rare += [list(group) for group in groups if 0 < fmean(r.success for r in group) <= 0.5]
        return again

    def _scored_with(self, rollout: Rollout, group: Sequence[Rollout]) -> float:
        """Its reward, with the bonus for entropy."""
        if not self._training.entropy or len({other.reward for other in group}) == 1:
            return rollout.reward
        surprisal = -sum(float(sample.logprobs.sum()) for sample in rollout.samples)
        return rollout.reward + self._training.entropy * surprisal

    def _remember(self, groups: Sequence[Sequence[Rollout]]) -> None:
        for group in groups:
            first = len(self._earlier)
            for rollout in group:
                name = f"earlier-{len(self._earlier)}"
                self._earlier[name] = rollout
                self._scored.append(ScoredRollout(name, str(first), rollout.reward))


def right_call(request: Request) -> tuple[str, dict[str, Any]]:
    """The tool and the arguments of a request's first call."""
    return "order_customer" if request.tool.startswith("customer_") else request.tool, {"order": request.order}


def first_call(rollout: Rollout) -> tuple[str, dict[str, Any]] | None:
    """The tool and the arguments of the first call of a rollout's first answer. None if it calls nothing."""
    calls = rollout.messages[1].get("tool_calls")
    return (calls[0]["function"]["name"], arguments(calls[0]["function"]["arguments"])) if calls else None


def trl_job(seed: int, steps: int, folder: Path) -> dict[str, Any]:
    """What another trainer needs for the first call: the requests of all steps in order, and the held-out ones. Each has its prompt
    as token ids, and the tool and the arguments of the right call."""
    desk, training = Desk(folder / "desk.db"), Training(lambda step: TrainConfig())
    sampler = Sampler(tiny_path(), desk.tools())
    train = desk.requests("train", TRAIN_REQUESTS, seed)
    chosen = [request for step in range(steps) for request in batch(train, training.scenarios, step, seed)]
    rows = {
        split: [
            {
                "prompt_ids": sampler.prompt([{"role": "user", "content": request.question}]),
                **dict(zip(("tool", "arguments"), right_call(request), strict=True)),
            }
            for request in requests
        ]
        for split, requests in (("train", chosen), ("test", desk.requests("test", TEST_REQUESTS)))
    }
    sampler.close()
    sizes = {"group_size": training.group_size, "scenarios": training.scenarios, "max_tokens": MAX_TOKENS}
    return {"base": str(tiny_path()), "seed": seed, "steps": steps, **sizes, **rows}


def as_langchain(message: dict[str, Any]) -> BaseMessage:
    """A message as the quickstart's reward reads it."""
    if message["role"] != "assistant":
        return HumanMessage(message["content"])
    calls = [(call["id"], call["function"]) for call in message.get("tool_calls", ())]
    made = [{"id": name, "name": call["name"], "args": arguments(call["arguments"])} for name, call in calls]
    return AIMessage(message["content"], tool_calls=made)


def arguments(text: str) -> dict[str, Any]:
    """The arguments of a call; empty if they are no JSON object."""
    try:
        parsed = json.loads(text)
    except ValueError:
        return {}
    return parsed if isinstance(parsed, dict) else {}
