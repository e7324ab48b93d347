"""Names of OpenPipe ART's that are not Understudy's own, and what to use instead."""

from openai.types.chat import ChatCompletionMessageParam

from understudy.types import MessageOrChoice, Tool

TYPES = {
    "Messages": list[ChatCompletionMessageParam],
    "MessagesAndChoices": list[MessageOrChoice],
    "Tools": list[Tool],
}
"""Names that annotations of rollouts use."""

ELSEWHERE = {
    "PydanticException": "use understudy.types.RolloutException",
    "ServerlessBackend": "use RemoteBackend(url, api_key) with a server of your own",
    "SkyPilotBackend": "use RemoteBackend(url, api_key) with a server of your own",
    "TrajectoryGroupResult": "use TrainResult",
    "UnslothBackend": "use LocalBackend",
    "dev": "engine and adapter options are LocalBackend(max_model_len=..., device=...) and TrainableModel(lora=LoraOptions(...))",
    "langgraph": "use the package understudy_langgraph",
    "local": "use LocalBackend, or `from understudy.compat.art.local import LocalBackend`",
    "mcp": "tools of MCP servers are not supported by this version",
    "rewards": "judging by an LLM (ruler_score_group) is not in this version",
    "ruler_score_group": "judging by an LLM is not in this version: set trajectory.reward yourself",
    "serverless": "use RemoteBackend(url, api_key) with a server of your own",
    "skypilot": "use RemoteBackend(url, api_key) with a server of your own",
    "trajectories": "Trajectory, TrajectoryGroup and History are names of understudy itself",
    "utils": "use iterate_dataset, limit_concurrency and retry, or `from understudy.compat.art.utils import ...`",
}
