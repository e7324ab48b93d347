"""A program whose rollouts are Weave's ops, in the two styles: a rollout function for a Trainer, and a wrapped function.

python weave_app.py URL_OF_THE_SERVER FILE_FOR_THE_RESULT
"""

from __future__ import annotations

import asyncio
import json
import sys
from pathlib import Path
from typing import Any

import weave  # type: ignore[import-not-found]
from langchain_openai import ChatOpenAI

import offbook
from offbook_langgraph import trainable

SCENARIOS = [{"id": word, "prompt": f"say {word}"} for word in ("blue", "teal")]
backend = offbook.RemoteBackend(sys.argv[1])


@weave.op
async def rollout(model: offbook.TrainableModel, scenario: dict[str, str]) -> offbook.Trajectory:
    messages: list[Any] = [{"role": "user", "content": scenario["prompt"]}]
    answer = await model.openai_client().chat.completions.create(model=model.inference_name(), messages=messages)
    return offbook.Trajectory(messages_and_choices=[*messages, answer.choices[0]], reward=1.0)


@trainable(model=offbook.TrainableModel(name="wrapped", base_model="tiny", backend=backend))
@weave.op
async def agent(scenario: dict[str, str]) -> float:
    answer = await ChatOpenAI(model="gpt-4.1").ainvoke(scenario["prompt"])
    return float(scenario["id"] in answer.text)


async def main() -> None:
    model = offbook.TrainableModel(name="plain", base_model="tiny", backend=backend)
    plain = await offbook.Trainer(model, rollout, SCENARIOS).aevaluate(SCENARIOS)
    wrapped = await agent.aevaluate(SCENARIOS)
    found = {each: (await own.get_step(), evaluation.reward, evaluation.failed, [kind.message for kind in evaluation.failures])
             for each, own, evaluation in (("plain", model, plain), ("wrapped", agent.own_models()[0], wrapped))}  # fmt: skip
    Path(sys.argv[2]).write_text(json.dumps(found))


if __name__ == "__main__":
    weave.init("me/agents")
    asyncio.run(main())
    weave.finish()
