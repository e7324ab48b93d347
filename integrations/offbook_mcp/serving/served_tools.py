"""The tools of a model outside of training: those that `chat` and `serve` let it call."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from offbook.base.errors import ConfigError
from offbook_mcp.scenarios.explore import withheld, withheld_lines
from offbook_mcp.tools.toolset import Toolset
from offbook_mcp.training.defaults import defaults_for


def served_tools(toolset: Toolset, base_model: str, allow_writes: bool, say: Callable[[str], None]) -> Toolset:
    """The tools without those that training withholds too, which are said.

    Raises ConfigError if none is left, or for more than the base model can read.
    """
    unused = withheld(toolset, allow_writes=allow_writes)
    for line in withheld_lines(unused):
        say(line)
    tools = tuple(tool for tool in toolset.tools if tool.name not in unused)
    if not tools:
        raise ConfigError("no tools: none may be called; permit them with --allow TOOL or --allow-writes")
    most = defaults_for(base_model).most_tools
    if most is not None and len(tools) > most:
        raise ConfigError(
            f"{base_model} reads at most {most} tools, the target offers {len(tools)}: choose some with --only TOOL "
            "(repeat it), or take another --base-model"
        )
    return replace(toolset, tools=tools)
