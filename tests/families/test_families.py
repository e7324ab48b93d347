"""Each model family through the real server: load, sample, train, swap, export, on random weights of a few layers."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import AutoPeftModelForCausalLM
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedTokenizerBase

import offbook
from tests.families.builders import ATTENTION, GEMMA3, QWEN2_5, Family, build

ORDER = {"type": "object", "properties": {"order": {"type": "string", "enum": ["4821", "5913"]}}, "required": ["order"]}
TOOL: dict[str, Any] = {
    "type": "function",
    "function": {"name": "find_order", "description": "Where it is.", "parameters": ORDER, "strict": True},
}
"""Strict, since vLLM holds the arguments of a forced call to the schema of a strict tool only."""
FREE: dict[str, Any] = {"type": "function", "function": {**TOOL["function"], "strict": False}}
"""Not strict, since vLLM puts a grammar on all answers that may call a strict tool."""
SHORT = [{"role": "user", "content": "Where is order 4821?"}]
LONG = [
    {"role": "user", "content": "Where is order 4821? " * 12},
    {"role": "assistant", "content": "It left on Monday."},
    {"role": "user", "content": "And order 5913?"},
]
ASKED: list[tuple[list[dict[str, Any]], list[dict[str, Any]] | None]] = [
    (SHORT, None),
    (SHORT, [FREE]),
    (LONG, None),
    (LONG, [FREE]),
]
FORCED: dict[str, Any] = {
    "tools": [TOOL],
    "tool_choice": "required",
    "parallel_tool_calls": False,
    "max_tokens": 200,
    "options": {"enable_thinking": False},  # vLLM lets a model think first, and random weights do not end
}
ENGINES = "pip install -r requirements/engines.txt, then --no-deps -r requirements/engines-nodeps.txt"
VLLM = (GEMMA3,)
"""Run on vLLM; full attention is run there by `real_engines`. `test_prompts` compares the prompts of all, `test_tool_calls` their
calls."""
EXACT = 1e-3
"""Largest difference of logprobs, in float32, that is still the same policy."""


@dataclass(frozen=True)
class Sampled:
    """One recorded call: the prompt's and the answer's tokens, and the logprobs of these."""

    asked: int
    step: int
    prompt: list[int]
    answer: list[int]
    logprobs: list[float]
    finish: str
    choice: Any


@dataclass(frozen=True)
class Life:
    """What a family's model went through. `forced`: a call that had to be of the tool."""

    family: Family
    engine: str
    folder: Path
    base: list[Sampled]
    forced: Sampled
    trained: list[Sampled]
    kept: list[Sampled]
    result: offbook.TrainResult
    lora: Path
    merged: Path


async def call(
    model: offbook.TrainableModel,
    at: int,
    step: int | None = None,
    options: dict[str, Any] | None = None,
    **fields: Any,
) -> Sampled:
    messages, tools = ASKED[at]
    completions: Any = model.openai_client().chat.completions
    answer = await completions.create(
        model=model.inference_name(step),
        messages=messages,
        logprobs=True,
        extra_body={"return_token_ids": True, "chat_template_kwargs": options or {}},
        **{"max_tokens": 12, "temperature": 1.0, **({"tools": tools} if tools else {}), **fields},
    )
    raw: dict[str, Any] = answer.model_dump()
    choice = raw["choices"][0]
    logprobs = [each["logprob"] for each in choice["logprobs"]["content"]]
    mark = choice["offbook"]
    return Sampled(
        at,
        mark["step"],
        raw["prompt_token_ids"],
        choice["token_ids"],
        logprobs,
        choice["finish_reason"],
        answer.choices[0],
    )


async def live(family: Family, engine: str, folder: Path, backend: offbook.LocalBackend, exports: Path) -> Life:
    model = offbook.TrainableModel(family.name, base_model=str(folder), backend=backend)
    asked = range(len(ASKED))
    base = await asyncio.gather(*(call(model, at) for at in asked for _ in range(3)))
    forced = await call(model, 1, **FORCED)
    for _ in range(4):  # vLLM's grammar lets random weights write white space up to the limit
        forced = forced if forced.finish != "length" else await call(model, 1, **FORCED)
    groups = [
        offbook.TrajectoryGroup(
            offbook.Trajectory(messages_and_choices=[*ASKED[place][0], one.choice], reward=float(reward))
            for reward, one in enumerate(base[3 * at : 3 * at + 3])
        )
        for at, place in enumerate(asked)
    ]
    result = await model.train(groups, learning_rate=1e-2, pbar_desc=None)
    trained = await asyncio.gather(*(call(model, at) for at in asked))
    kept = await asyncio.gather(*(call(model, at, step=0) for at in asked))
    lora = Path(await model.export(exports / "lora"))
    merged = Path(await model.export(exports / "merged", format="merged"))
    return Life(family, engine, folder, list(base), forced, list(trained), list(kept), result, lora, merged)


def lives() -> Iterator[Any]:
    for family in ATTENTION:
        if family is QWEN2_5:
            continue  # the bundled policy has its architecture
        yield pytest.param(
            (family, "embedded"), marks=pytest.mark.slow("more model families"), id=f"{family.name}-embedded"
        )
    for family in VLLM:
        yield pytest.param((family, "vllm"), marks=pytest.mark.slow("real vLLM"), id=f"{family.name}-vllm")


@pytest.fixture(scope="module", params=lives())
def life(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory, require: Callable[[bool, str], None]
) -> Iterator[Life]:
    family, engine = request.param
    if engine == "vllm":
        require(find_spec("vllm") is not None, ENGINES)
    root = tmp_path_factory.mktemp(family.name)
    backend = offbook.LocalBackend(root / "dir", threads=1, engine=engine)
    try:
        yield asyncio.run(live(family, engine, build(family, root / "base"), backend, root))
    finally:
        backend.close()


def largest_difference(model: Any, calls: list[Sampled]) -> float:
    """Between the recorded logprobs and those that `model` gives the same tokens, one call at a time."""
    return max(float((given(model, one) - torch.tensor(one.logprobs)).abs().max()) for one in calls)


def given(model: Any, one: Sampled) -> torch.Tensor:
    with torch.inference_mode():
        logits = model(torch.tensor([one.prompt + one.answer])).logits[0, len(one.prompt) - 1 : -1].float()
    return torch.log_softmax(logits, -1)[range(len(one.answer)), one.answer]


def ends(life: Life, tokenizer: PreTrainedTokenizerBase) -> set[int]:
    return {tokenizer.get_vocab()[end] for end in life.family.ends}


@pytest.mark.slow("seconds each: processes, trainings, deadlines")
def test_prompts_are_the_familys_own_and_every_sampled_token_has_its_logprob(life: Life) -> None:
    tokenizer = AutoTokenizer.from_pretrained(life.folder)
    for one in life.base:
        messages, tools = ASKED[one.asked]
        rendered = tokenizer.apply_chat_template(messages, tools=tools, add_generation_prompt=True, return_dict=True)[
            "input_ids"
        ]
        assert one.prompt == rendered
        assert len(one.answer) == len(one.logprobs) > 0
        assert (one.finish == "length") == (one.answer[-1] not in ends(life, tokenizer))
        assert not ends(life, tokenizer) & set(one.answer[:-1])


def test_calls_of_several_lengths_sampled_together_have_the_logprobs_of_the_plain_model(life: Life) -> None:
    base = AutoModelForCausalLM.from_pretrained(life.folder, dtype=torch.float32)
    assert {one.step for one in life.base} == {0}
    assert largest_difference(base, life.base) < EXACT


def test_a_forced_tool_call_is_read_as_one_also_where_the_template_shows_no_tools(life: Life) -> None:
    [made] = life.forced.choice.message.tool_calls or []
    assert made.function.name == "find_order"
    assert json.loads(made.function.arguments)["order"] in ("4821", "5913")


def test_the_step_is_applied_and_the_next_calls_use_it(life: Life) -> None:
    assert life.result.applied and life.result.step == 1
    assert {one.step for one in life.trained} == {1}
    assert {one.step for one in life.kept} == {0}
    merged = AutoModelForCausalLM.from_pretrained(life.merged, dtype=torch.float32)
    base = AutoModelForCausalLM.from_pretrained(life.folder, dtype=torch.float32)
    assert largest_difference(merged, life.trained) < EXACT
    assert largest_difference(base, life.trained) > 10 * EXACT
    assert largest_difference(base, life.kept) < EXACT


def test_the_learner_finds_the_samplers_logprobs_and_follows_trees_also_where_windows_slide(life: Life) -> None:
    metrics = life.result.metrics
    assert metrics["kl/sampler_learner_max_diff"] < EXACT
    assert metrics["calls/trained"] == len(life.base)
    assert metrics["layout/tree_refused"] == 0.0
    assert metrics["layout/probe_difference"] < EXACT


def test_the_exported_lora_is_the_policy_that_answered(life: Life) -> None:
    lora = AutoPeftModelForCausalLM.from_pretrained(life.lora, dtype=torch.float32)
    assert largest_difference(lora, life.trained) < EXACT
    with lora.disable_adapter():
        assert largest_difference(lora, life.kept) < EXACT
