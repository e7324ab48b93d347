"""The tools of a model outside of training: those that `chat` and `serve` let it call."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from offbook import TrainableModel
from offbook.base.errors import ConfigError
from offbook.base.text import one_line
from offbook_mcp.scenarios.explore import withheld_lines
from offbook_mcp.scenarios.files import load_scenarios
from offbook_mcp.tools.toolset import ModelTool, Toolset
from offbook_mcp.training.defaults import defaults_for
from offbook_mcp.training.scenario_source import scenario_file


def served_tools(toolset: Toolset, model: TrainableModel, say: Callable[[str], None]) -> Toolset:
    """The tools that may be called. Says which may not, and which no scenario trained.

    Raises ConfigError if none is left, or for more than the base model can read.
    """
    for line in withheld_lines(toolset.left_out):
        say(line)
    tools = toolset.tools
    if not tools:
        raise ConfigError("no tools: none may be called; permit them with --allow TOOL or --allow-all")
    most = defaults_for(model.base_model).most_tools
    if most is not None and len(tools) > most:
        raise ConfigError(
            f"{model.base_model} reads at most {most} tools, the target offers {len(tools)}: choose some with --only TOOL "
            "(repeat it), or take another --base-model"
        )
    try:
        rest = _untrained(tools, model)
    except ConfigError as error:  # a faulty file of scenarios ends no chat
        rest = []
        say(f"which tools were trained is unknown: {error}")
    if rest:
        say(f"not trained: {', '.join(rest)}: no scenario has such a call, so expect mistakes")
    return toolset


def _untrained(tools: Sequence[ModelTool], model: TrainableModel) -> list[str]:
    """The tools that no scenario of the model's own file trains. Without that file, nothing is known of them."""
    file = scenario_file(model)
    if not file.exists():
        return []
    trained = {name for scenario in load_scenarios(file).train for name in scenario.tools}
    return [one_line(tool.name, 64) for tool in tools if tool.name not in trained]
