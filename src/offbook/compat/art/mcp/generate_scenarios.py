"""Stands for `art.mcp.generate_scenarios`: `offbook_mcp` writes the tasks, from the tools' descriptions alone.

`offbook_mcp.generate_scenarios` does more: it looks at what the server holds, and runs each task's solution.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from offbook.base.errors import ConfigError
from offbook.llms.llm import Llm

from .types import GeneratedScenario, GeneratedScenarioCollection, MCPResource, MCPTool

OPENROUTER_URL = "https://openrouter.ai/api/v1"


def preview_scenarios(scenarios: Sequence[Mapping[str, Any]], n: int = 5) -> None:
    """Print the first `n` tasks."""
    GeneratedScenarioCollection.from_dicts(scenarios).preview(n)


async def generate_scenarios(
    tools: Sequence[MCPTool] | Sequence[dict[str, Any]],
    resources: Sequence[MCPResource] | Sequence[dict[str, Any]] | None = None,
    num_scenarios: int = 24,
    show_preview: bool = True,
    custom_instructions: str | None = None,
    generator_model: str = "openai/gpt-4.1-mini",
    generator_api_key: str | None = None,
    generator_base_url: str = OPENROUTER_URL,
) -> GeneratedScenarioCollection:
    """Exactly `num_scenarios` different tasks. The model is asked through `offbook.llms`, with purpose "generator".

    Raises ValueError without tools and resources, ConfigError, LlmError where the model gives no more tasks, and
    MissingExtraError without the extra `mcp`.
    """
    if not tools and not resources:
        raise ValueError("generate_scenarios: at least one tool or resource is needed")
    if num_scenarios < 1:
        raise ConfigError(f"num_scenarios: at least 1 is needed, got {num_scenarios}")
    # The other names of `art.mcp` need no extra.
    from offbook_mcp.scenarios.from_llm import from_descriptions
    from offbook_mcp.tools.tool import ServerTool
    from offbook_mcp.tools.toolset import ModelTool

    if generator_base_url == OPENROUTER_URL:
        generator_model, generator_base_url = f"openrouter/{generator_model.removeprefix('openrouter/')}", ""
    options = {"api_key": generator_api_key, "api_base": generator_base_url or None}
    llm = Llm(generator_model, **{name: value for name, value in options.items() if value is not None})
    listed = [tool if isinstance(tool, MCPTool) else MCPTool.from_dict(tool) for tool in tools]
    read = [item if isinstance(item, MCPResource) else MCPResource.from_dict(item) for item in resources or ()]
    written = await from_descriptions(
        [
            ModelTool(one.name, ServerTool("", one.name, one.description, one.parameters), one.parameters)
            for one in listed
        ],
        {one.uri: f"{one.name}: {one.description}" for one in read},
        num_scenarios,
        llm,
        custom_instructions or "",
    )
    collection = GeneratedScenarioCollection([GeneratedScenario(one.task, one.difficulty) for one in written])
    if show_preview:
        collection.print_difficulty_distribution()
        collection.preview()
    return collection
