"""Agents that call a tool and then answer, each as its library's users write it: `python agents.py AGENT ORDER`.

They read where the model is from the environment alone. Each runs twice, with whole answers and with streamed ones; the
last two lines that are printed are the answers of the two. They run in environments of their own: make python-clients.
"""

# pyright: reportMissingImports=false, reportMissingModuleSource=false

from __future__ import annotations

import asyncio
import os
import sys
from typing import Any

MODEL = os.environ["OFFBOOK_MODEL"]


def add(a: int, b: int) -> int:
    """Add two numbers.

    Args:
        a: the first.
        b: the second.
    """
    return a + b


def dspy(api: str) -> Any:
    """DSPy's agent with native tool calls."""

    def run(order: str, streamed: bool) -> str:
        import dspy

        class CallingLM(dspy.LM):
            supports_function_calling = True  # of a model that it does not know, DSPy supposes that it calls no tools

        lm = CallingLM(f"openai/{MODEL}", model_type=api, cache=False, num_retries=0, max_tokens=256)
        dspy.configure(lm=lm, adapter=dspy.ChatAdapter(use_native_function_calling=True))
        agent = dspy.ReActV2("question -> answer", tools=[add])
        if not streamed:
            return agent(question=order).answer
        parts = dspy.streamify(agent, async_streaming=False, include_final_prediction_in_output_stream=True)
        return next(part for part in parts(question=order) if isinstance(part, dspy.Prediction)).answer

    return run


def llama_index(api: str) -> Any:
    """LlamaIndex's agent."""

    def run(order: str, streamed: bool) -> str:
        from llama_index.core.agent.workflow import FunctionAgent
        from llama_index.llms.openai import OpenAIResponses
        from llama_index.llms.openai_like import OpenAILike

        if api == "responses":
            llm: Any = OpenAIResponses(model=MODEL, context_window=4096, max_retries=0)
        else:
            llm = OpenAILike(model=MODEL, is_chat_model=True, is_function_calling_model=True, max_retries=0)
        agent = FunctionAgent(tools=[add], llm=llm, streaming=streamed)

        async def answer() -> str:
            return str(await agent.run(order))

        return asyncio.run(answer())

    return run


def crewai(provider: str) -> Any:
    """A crew of one agent."""

    def run(order: str, streamed: bool) -> str:
        from crewai import LLM, Agent, Crew, Task
        from crewai.tools import tool

        llm = LLM(model=MODEL, provider=provider, stream=streamed, max_tokens=256)
        agent = Agent(role="clerk", goal="Add.", backstory="A clerk.", llm=llm, tools=[tool(add)])
        task = Task(description=order, expected_output="what the tools said", agent=agent)
        return Crew(agents=[agent], tasks=[task]).kickoff().raw

    return run


def autogen(provider: str) -> Any:
    """AutoGen's assistant."""

    def run(order: str, streamed: bool) -> str:
        from autogen_agentchat.agents import AssistantAgent

        info: Any = {
            "vision": False,
            "function_calling": True,
            "json_output": True,
            "family": "unknown",
            "structured_output": True,
        }
        if provider == "anthropic":
            from autogen_ext.models.anthropic import AnthropicChatCompletionClient

            client: Any = AnthropicChatCompletionClient(model=MODEL, model_info=info, max_retries=0)
        else:
            from autogen_ext.models.openai import OpenAIChatCompletionClient

            client = OpenAIChatCompletionClient(model=MODEL, model_info=info, max_retries=0)
        agent = AssistantAgent(
            "clerk", client, tools=[add], model_client_stream=streamed, max_tool_iterations=5, reflect_on_tool_use=False
        )

        async def answer() -> str:
            if not streamed:
                return (await agent.run(task=order)).messages[-1].to_text()
            events = [event async for event in agent.run_stream(task=order)]
            return events[-1].messages[-1].to_text()

        return asyncio.run(answer())

    return run


def smolagents(kind: str) -> Any:
    """An agent of smolagents that writes code, or calls tools."""

    def run(order: str, streamed: bool) -> str:
        from smolagents import CodeAgent, OpenAIModel, ToolCallingAgent, tool

        model = OpenAIModel(MODEL, max_tokens=256)
        agent_class = CodeAgent if kind == "code" else ToolCallingAgent
        agent = agent_class([tool(add)], model, stream_outputs=streamed, max_steps=6)
        return str(agent.run(order))

    return run


def claude_agent_sdk(order: str, streamed: bool) -> str:
    """Claude Agent SDK with a tool in this process. Its own CLI, Claude Code, always streams."""
    from claude_agent_sdk import ClaudeAgentOptions, ResultMessage, create_sdk_mcp_server, query, tool

    @tool("add", "Add two numbers.", {"a": int, "b": int})
    async def added(numbers: dict[str, Any]) -> dict[str, Any]:
        return {"content": [{"type": "text", "text": str(add(**numbers))}]}

    async def answer() -> str:
        said = ""
        server = create_sdk_mcp_server("sums", tools=[added])
        options = ClaudeAgentOptions(
            tools=[], mcp_servers={"sums": server}, allowed_tools=["mcp__sums__add"], include_partial_messages=streamed
        )
        async for message in query(prompt=order, options=options):
            if isinstance(message, ResultMessage):
                said = message.result or ""
        return said

    return asyncio.run(answer())


def pydantic_ai(provider: str) -> Any:
    """Pydantic AI's agent, by the name of its model alone."""

    def run(order: str, streamed: bool) -> str:
        from pydantic_ai import Agent

        agent = Agent(f"{provider}:{MODEL}", tools=[add])
        if not streamed:
            return agent.run_sync(order).output

        async def answer() -> str:
            async with agent.run_stream(order) as result:
                return "".join([piece async for piece in result.stream_text(delta=True, debounce_by=None)])

        return asyncio.run(answer())

    return run


AGENTS = {
    "autogen": autogen("openai"),
    "autogen anthropic": autogen("anthropic"),
    "claude-agent-sdk": claude_agent_sdk,
    "crewai": crewai("openai"),
    "crewai anthropic": crewai("anthropic"),
    "dspy": dspy("chat"),
    "dspy responses": dspy("responses"),
    "llama-index": llama_index("chat"),
    "llama-index responses": llama_index("responses"),
    "pydantic-ai": pydantic_ai("openai-chat"),
    "pydantic-ai anthropic": pydantic_ai("anthropic"),
    "pydantic-ai google": pydantic_ai("google"),
    "pydantic-ai responses": pydantic_ai("openai-responses"),
    "smolagents code": smolagents("code"),
    "smolagents tools": smolagents("tools"),
}

if __name__ == "__main__":
    _, name, told = sys.argv
    answers = [AGENTS[name](told, streamed) for streamed in (False, True)]
    print(*answers, sep="\n")
