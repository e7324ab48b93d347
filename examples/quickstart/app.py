"""The quickstart's agent as an app of your own: `offbook train app:agent --scenarios train.jsonl`."""

import json
from dataclasses import asdict
from pathlib import Path

from langchain.agents import create_agent
from langchain_openai import ChatOpenAI

import offbook
from offbook.quickstart.desk import Desk, Request, reward
from offbook_langgraph import trainable

desk = Desk(Path("desk.db"))
graph = create_agent(ChatOpenAI(model="gpt-4.1-mini", api_key="unused", max_completion_tokens=48), desk.tools())


@trainable(model=offbook.TrainableModel(name="order-desk", project="examples", base_model="tiny"))
async def agent(scenario: offbook.Scenario) -> dict[str, float]:
    request = Request(**scenario.model_dump(exclude={"prompt"}))
    state = await graph.ainvoke({"messages": [("user", request.question)]})
    return reward(request, state["messages"])


if __name__ == "__main__":
    for name, split, count in (("train.jsonl", "train", 300), ("held_out.jsonl", "test", 120)):
        lines = [json.dumps(asdict(request)) for request in desk.requests(split, count)]
        Path(name).write_text("\n".join(lines) + "\n")
        print(f"{name}: {count} scenarios")
