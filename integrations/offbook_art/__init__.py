"""Names of OpenPipe ART, for code that was written for it: `import offbook_art as art`.

They are those of `offbook`, and some that only such code needs. For other names of ART, the error says what to use instead.
"""

from __future__ import annotations

import sys
from opcode import opmap
from types import ModuleType
from typing import Any, Final

from openai.types.chat import ChatCompletionMessageParam
from openai.types.chat.chat_completion import Choice

from offbook import *  # noqa: F403
from offbook.base.types import Message, Tool, TrainResult
from offbook.client.backend import Backend as Backend
from offbook.client.rollouts.dataset import DatasetBatch as DatasetBatch
from offbook.rewards import DEFAULT_RUBRIC as DEFAULT_RUBRIC

from .answers import convert_litellm_choice_to_openai as convert_litellm_choice_to_openai
from .answers import get_guided_completion_params as get_guided_completion_params
from .answers import strip_logprobs as strip_logprobs
from .rollouts import capture_yielded_trajectory as capture_yielded_trajectory
from .rollouts import limit_concurrency as limit_concurrency
from .rollouts import retry as retry
from .rollouts import yield_trajectory as yield_trajectory

LocalTrainResult = ServerlessTrainResult = TrainResult
Messages = list[ChatCompletionMessageParam]
MessagesAndChoices = list[Choice | ChatCompletionMessageParam | Message]
Tools = list[Tool]

MODULES: Final = (
    *("auto_trajectory", "backend", "batches", "gather", "guided_completion", "local", "local.backend", "model"),
    *("langgraph.llm_wrapper", "rewards", "rewards.ruler", "trajectories", "types", "utils", "utils.iterate_dataset"),
    *("utils.limit_concurrency", "utils.litellm", "utils.retry", "utils.strip_logprobs", "yield_trajectory"),
)
"""Modules of ART that code imports names from; here each has the names of this package."""
OPTION_SETS: Final = ("EngineArgs", "InitArgs", "InternalModelConfig", "PeftArgs", "TrainConfig", "TrainerArgs")
"""Names of `art.dev`, which are dicts."""
ELSEWHERE: Final = {
    "LoRAConfig": "use LoraOptions(r=..., alpha=...)",
    "PydanticException": "use offbook.base.types.RolloutException",
    "ServerlessBackend": "there is no hosted service: use RemoteBackend(url, api_key) with a server of your own",
    "TinkerBackend": "use LocalBackend, or RemoteBackend(url, api_key)",
    "TrainSFTConfig": "use model.train_sft(conversations, SFTConfig(learning_rate=..., epochs=...)); see docs/supervised.md",
    "TrajectoryGroupResult": "use TrainResult",
    "UnslothBackend": "use LocalBackend(loader='unsloth')",
    "mcp": "use offbook_mcp: `offbook mcp scenarios` writes tasks, and runs each before it is kept",
    "no_capture": "calls outside a capture belong to no rollout; use `with offbook.outside():`",
    "remote_server_url": "use RemoteBackend(url, api_key)",
}
"""What to use instead of a name that does not exist."""


class _Module(ModuleType):
    """A module of ART that has the names of this package."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return getattr(sys.modules[__name__], name)


for _name in MODULES:
    sys.modules[f"{__name__}.{_name}"] = _Module(f"{__name__}.{_name}")
sys.modules[f"{__name__}.dev"] = ModuleType(f"{__name__}.dev")
sys.modules[f"{__name__}.dev"].__dict__.update(dict.fromkeys(OPTION_SETS, dict[str, Any]))


def __getattr__(name: str) -> Any:
    if name in ELSEWHERE:
        # Python discards an AttributeError's text in `from offbook_art import name`
        caller = sys._getframe(1)  # pyright: ignore[reportPrivateUsage]  # no public API tells the two accesses apart
        imports = caller.f_code.co_code[caller.f_lasti] == opmap["IMPORT_FROM"]
        raise (ImportError if imports else AttributeError)(f"{__name__!r} has no {name!r}: {ELSEWHERE[name]}")
    if f"{__name__}.{name}" in sys.modules:
        return sys.modules[f"{__name__}.{name}"]
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
