"""Names of OpenPipe ART's that are not Offbook's own: what they stand for, or what to use instead."""

from importlib import import_module

from openai.types.chat import ChatCompletionMessageParam
from openai.types.chat.chat_completion import Choice

from offbook.base.errors import ConfigError, missing_name
from offbook.base.types import Message, Tool

__all__ = [
    "ELSEWHERE",
    "MODULES",
    "NAMES",
    "Messages",
    "MessagesAndChoices",
    "ServerlessBackend",
    "Tools",
    "missing_name",
    "resolve",
]

Messages = list[ChatCompletionMessageParam]
MessagesAndChoices = list[Choice | ChatCompletionMessageParam | Message]
Tools = list[Tool]


class ServerlessBackend:
    """Stands for `art.ServerlessBackend`: its use says what to do instead."""

    def __init__(self, *args: object, **options: object) -> None:
        raise ConfigError("there is no hosted service: use RemoteBackend(url, api_key) with a server of your own")


NAMES = {
    "DEFAULT_RUBRIC": ("rewards", "DEFAULT_RUBRIC"),
    "Backend": ("client.backend", "Backend"),
    "LocalTrainResult": ("base.types", "TrainResult"),
    "Messages": ("compat.art.names", "Messages"),
    "MessagesAndChoices": ("compat.art.names", "MessagesAndChoices"),
    "ServerlessBackend": ("compat.art.names", "ServerlessBackend"),
    "ServerlessTrainResult": ("base.types", "TrainResult"),
    "Tools": ("compat.art.names", "Tools"),
    "dev": ("compat.art.dev", ""),
    "get_guided_completion_params": ("compat.art.utils", "get_guided_completion_params"),
    "limit_concurrency": ("compat.art.utils", "limit_concurrency"),
    "retry": ("compat.art.utils", "retry"),
    "capture_yielded_trajectory": ("compat.art.yielded", "capture_yielded_trajectory"),
    "yield_trajectory": ("compat.art.yielded", "yield_trajectory"),
}
"""Name -> module of ours, and the name there; without one, the module itself. `offbook.Messages` is found here though
`dir(offbook)` hides it."""

_COMPAT = "`import offbook.compat.art as art` has it"
_REMOTE = "use RemoteBackend(url, api_key) with a server of your own"
_ENGINE = "the server is a process of its own: engine options are LocalBackend(max_model_len=..., engine='vllm', ...)"
_LEARNER = "the server builds a step's rows and trains them; its options are TrainConfig(...)"
_DEV = "option sets are dicts here: InternalModelConfig, InitArgs, EngineArgs, PeftArgs, TrainConfig"
_FULL = "full fine-tuning is not here: a LoRA is trained, with LoraOptions(r=..., alpha=...)"
_GRAPH = "use wrap_rollout and init_chat_model, or trainable of offbook_langgraph: the app stays as it is"
_MCP = "use offbook_mcp: `offbook mcp scenarios` writes tasks, and runs each before it is kept"
_SFT = "use model.train_sft(conversations, SFTConfig(learning_rate=..., epochs=...)); see docs/supervised.md"
_FILES = (
    "checkpoints are model.checkpoints(), model.export(folder) and model.fork(name); rollouts `offbook traces export`"
)
_LOGS = "metrics are logged by model.train and model.log; send them on with sinks=['wandb'], see docs/wandb.md"
_DEPLOY = "model.export(folder) writes the LoRA, or the merged model, as a folder; see docs/production.md"
_CHARTS = "see `offbook ui` for curves"
ELSEWHERE = {
    "LoRAConfig": "use LoraOptions(r=..., alpha=...)",
    "PydanticException": "use offbook.base.types.RolloutException",
    "TinkerBackend": "use LocalBackend, or RemoteBackend(url, api_key)",
    "TrainSFTConfig": _SFT,
    "TrajectoryGroupResult": "use TrainResult",
    "UnslothBackend": "use LocalBackend(loader='unsloth')",
    "guided_completion": _COMPAT,
    "langgraph": f"use the package offbook_langgraph; for wrap_rollout and init_chat_model {_COMPAT}",
    "local": f"use LocalBackend; {_COMPAT}",
    "mcp": _MCP,
    "no_capture": "calls outside a capture belong to no rollout; use `with offbook.outside():`",
    "remote_server_url": "use RemoteBackend(url, api_key)",
    "utils": f"use iterate_dataset, limit_concurrency and retry; {_COMPAT}",
}
"""What to use instead of a name that does not exist."""

MODULES = {
    "_backend_training": _LEARNER,
    "api_costs": "costs of other LLMs are counted by offbook.Ruler, and limited by max_cost=",
    "auto_trajectory": "use offbook.capture_auto_trajectory and offbook.auto_trajectory",
    "backend": "use LocalBackend or RemoteBackend",
    "batches": "use offbook.trajectory_group_batches",
    "cli": "use `offbook --help`",
    "client": "use offbook.AsyncClient or RemoteBackend(url, api_key)",
    "costs": _CHARTS,
    "dev": _DEV,
    **dict.fromkeys(("dev.engine", "dev.get_model_config", "dev.model", "dev.train", "dev.validate"), _DEV),
    "dev.openai_server": "options of the server are those of `offbook serve --help`, or of LocalBackend",
    "dev.torchtune": _FULL,
    "errors": "errors are OffbookError and its subclasses in offbook.base.errors",
    "gather": "use offbook.gather_trajectories and offbook.gather_trajectory_groups",
    "guided_completion": "it has get_guided_completion_params",
    "langgraph": _GRAPH,
    **dict.fromkeys(("langgraph.llm_wrapper", "langgraph.logging", "langgraph.message_utils"), _GRAPH),
    "local": _ENGINE,
    **dict.fromkeys(("local.adapter_leases", "local.backend", "local.service", "local.state", "local.vllm"), _ENGINE),
    **dict.fromkeys(("local.pack", "local.tokenize", "local.train"), _LEARNER),
    "local.checkpoints": _FILES,
    "loss": _LEARNER,
    "mcp": _MCP,
    **dict.fromkeys(("mcp.default_tools", "mcp.generate_scenarios", "mcp.types"), _MCP),
    "megatron": "the learner trains LoRAs on one GPU: use LocalBackend(loader='unsloth') or a smaller base",
    "metrics": _LOGS,
    "metrics_taxonomy": _LOGS,
    "model": "use offbook.Model and offbook.TrainableModel",
    "openai": "use model.openai_client(), or offbook.AsyncClient",
    "pipeline_trainer": "use offbook.Trainer(model, rollout, scenarios, config=offbook.TrainConfig(overlap=True, max_staleness=...))",
    "preprocessing": _LEARNER,
    "rewards": "use offbook.ruler, offbook.ruler_score_group or judge=offbook.Ruler(model)",
    "rewards.ruler": "the judge's answer is not a class here",
    "server": "start one with `offbook serve --model MODEL`, and use RemoteBackend(url, api_key)",
    "serverless": _REMOTE,
    "skypilot": "launch a server with SkyPilot (docs/cloud.md), and use RemoteBackend(url, api_key)",
    "test": "use offbook.testing",
    "tinker": "use LocalBackend, or RemoteBackend(url, api_key)",
    "tinker_native": "use LocalBackend, or RemoteBackend(url, api_key)",
    "torchtune": _FULL,
    "trajectories": "use offbook.Trajectory, offbook.TrajectoryGroup and offbook.History",
    "transformers": _LEARNER,
    "types": "use offbook.TrainConfig and offbook.TrainResult; Messages, MessagesAndChoices and Tools are in offbook.compat.art",
    "unsloth": "use LocalBackend(loader='unsloth')",
    "utils": "use iterate_dataset, limit_concurrency, retry, strip_logprobs, or the standard library",
    "utils.benchmark_rollout": _CHARTS,
    "utils.benchmarking": _CHARTS,
    "utils.convert_moe_lora": _DEPLOY,
    "utils.deploy_model": _DEPLOY,
    "utils.deployment": _DEPLOY,
    "utils.format_message": "print trajectory.messages(), or see the rollout with `offbook show TRAJECTORY`",
    "utils.get_repo_root_path": "use pathlib.Path.cwd()",
    "utils.lifecycle": _ENGINE,
    "utils.managed_process": _ENGINE,
    "utils.network": "use port 0, which takes a free one",
    "utils.sft": _SFT,
    "utils.strip_logprobs": "it is in utils",
    "utils.suppress_litellm_serialization_warnings": "leave it out",
    "utils.get_model_step": "use `await model.get_step()`",
    "utils.get_trajectory_messages": "use trajectory.messages()",
    "utils.group_aggregate": _LOGS,
    **dict.fromkeys(("utils.iterate_dataset", "utils.limit_concurrency", "utils.retry"), "it is in utils"),
    "utils.litellm": "use convert_litellm_choice_to_openai",
    "utils.logging": "use the logging module, or print",
    "utils.log_http_errors": "errors of the server are ServerError, with its status, code and message",
    "utils.model_config": "chat templates come with the base model",
    "utils.old_benchmarking": _CHARTS,
    "utils.output_dirs": _FILES,
    "utils.record_provenance": "every step's options are recorded with it: `offbook show RUN`",
    "utils.s3": _FILES,
    "utils.s3_checkpoint_utils": _FILES,
    "utils.trajectory_logging": _FILES,
    "utils.trajectory_migration": _FILES,
    "vllm": _ENGINE,
    "vllm_runtime": _ENGINE,
    "weight_transfer": _ENGINE,
    "yield_trajectory": "use art.yield_trajectory and art.capture_yielded_trajectory",
}
"""What to use instead of a module, and of a name in it that does not exist here. Submodules take their package's entry."""


def resolve(name: str) -> object:
    """What one of the NAMES stands for."""
    module, own = NAMES[name]
    loaded = import_module(f"offbook.{module}")
    return getattr(loaded, own) if own else loaded


def hint(name: str) -> str | None:
    """What to use instead of a name or top-level module; None if it is nobody's."""
    return ELSEWHERE.get(name) or MODULES.get(name)
