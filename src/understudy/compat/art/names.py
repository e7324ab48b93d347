"""Names of OpenPipe ART's that are not Understudy's own, and what to use instead."""

from importlib import import_module

from openai.types.chat import ChatCompletionMessageParam

from understudy.errors import missing_name
from understudy.types import MessageOrChoice, Tool

__all__ = ["ELSEWHERE", "NAMES", "Messages", "MessagesAndChoices", "Tools", "missing_name", "resolve"]

Messages = list[ChatCompletionMessageParam]
MessagesAndChoices = list[MessageOrChoice]
Tools = list[Tool]

NAMES = {
    "Backend": ("client.backend", "Backend"),
    "LocalTrainResult": ("types", "TrainResult"),
    "Messages": ("compat.art.names", "Messages"),
    "MessagesAndChoices": ("compat.art.names", "MessagesAndChoices"),
    "ServerlessBackend": ("compat.art.absent", "ServerlessBackend"),
    "ServerlessTrainResult": ("types", "TrainResult"),
    "Tools": ("compat.art.names", "Tools"),
    "TrainSFTConfig": ("compat.art.absent", "TrainSFTConfig"),
    "capture_yielded_trajectory": ("compat.art.yielded", "capture_yielded_trajectory"),
    "yield_trajectory": ("compat.art.yielded", "yield_trajectory"),
}
"""Name -> module of ours, and the name there: `understudy.Messages` is found here though `dir(understudy)` hides it."""

_COMPAT = "`import understudy.compat.art as art` has it"
ELSEWHERE = {
    "LoRAConfig": "use LoraOptions(r=..., alpha=...)",
    "PydanticException": "use understudy.types.RolloutException",
    "SkyPilotBackend": "use RemoteBackend(url, api_key) with a server of your own",
    "TinkerBackend": "use LocalBackend, or RemoteBackend(url, api_key)",
    "TrajectoryGroupResult": "use TrainResult",
    "UnslothBackend": "use LocalBackend(loader='unsloth')",
    "dev": "engine and adapter options are LocalBackend(max_model_len=..., device=...) and TrainableModel(lora=LoraOptions(...))",
    "guided_completion": _COMPAT,
    "langgraph": f"use the package understudy_langgraph; for wrap_rollout and init_chat_model {_COMPAT}",
    "local": f"use LocalBackend; {_COMPAT}",
    "mcp": f"use the package understudy_mcp; for MCPTool, GeneratedScenario and generate_scenarios {_COMPAT}",
    "no_capture": "calls outside a capture belong to no rollout; inside a LangGraph app use understudy_langgraph.uncaptured",
    "remote_server_url": "use RemoteBackend(url, api_key)",
    "server": "start one with `understudy serve --base-model ...`, and use RemoteBackend(url, api_key)",
    "serverless": "use RemoteBackend(url, api_key) with a server of your own",
    "skypilot": "use RemoteBackend(url, api_key) with a server of your own",
    "trajectories": "Trajectory, TrajectoryGroup and History are names of understudy itself",
    "utils": f"use iterate_dataset, limit_concurrency and retry; {_COMPAT}",
}
"""What to use instead of a name that does not exist."""


def resolve(name: str) -> object:
    """What one of the NAMES stands for."""
    module, own = NAMES[name]
    return getattr(import_module(f"understudy.{module}"), own)
