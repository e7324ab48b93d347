"""Stands for `art.mcp`: tasks for the tools of an MCP server."""

from openai.types.chat import ChatCompletionToolParam

from ..modules import names_in
from .generate_scenarios import generate_scenarios
from .types import GeneratedScenario, GeneratedScenarioCollection, MCPResource, MCPTool

__all__ = [
    "GeneratedScenario",
    "GeneratedScenarioCollection",
    "MCPResource",
    "MCPTool",
    "complete_task_tool",
    "generate_scenarios",
]

complete_task_tool: ChatCompletionToolParam = {
    "type": "function",
    "function": {
        "name": "complete_task",
        "description": "Ends the task. Call it when nothing is left to do.",
        "parameters": {
            "type": "object",
            "properties": {"summary": {"type": "string", "description": "what was done and found"}},
            "required": ["summary"],
        },
    },
}
"""The tool that an agent of these scenarios ends with."""

__getattr__ = names_in(__name__)
