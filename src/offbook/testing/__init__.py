"""Stand-ins for tests of code that uses Offbook: no GPU, no model, no key, no network beyond loopback.

- An LLM: `scripted_llm` is an OpenAI-compatible endpoint. Point a judge, a generator or an app at it. `says`,
  `calls_tool`, `fails` and others are its replies; `judges` is the reply of a RULER judge.
- The model that is trained: `scripted_server` is Offbook's own server, whose policy is a Python function. It records
  every call as in production. Needs the extra `server`.
- A trace sink: `check_sink` is the conformance suite that every sink of Offbook passes.

It works with every test framework and imports none. Importing it loads nothing; each name is loaded when it is first used.
"""

from importlib import import_module
from typing import TYPE_CHECKING

from offbook.base.errors import MissingExtraError

if TYPE_CHECKING:
    from .llm_endpoint import (
        LlmReply,
        LlmRequest,
        ScriptedLlm,
        ShownConversation,
        attempts_shown,
        calls_tool,
        chooses_nothing,
        cuts,
        fails,
        filters,
        hangs,
        judges,
        refuses,
        resets,
        says,
        scripted_llm,
        sends,
    )
    from .policy_sampler import Action, PolicySampler
    from .server import ScriptedServer, scripted_server
    from .sinks import check_sink, sample_events, sample_rollout

__all__ = [
    "Action",
    "LlmReply",
    "LlmRequest",
    "PolicySampler",
    "ScriptedLlm",
    "ScriptedServer",
    "ShownConversation",
    "attempts_shown",
    "calls_tool",
    "check_sink",
    "chooses_nothing",
    "cuts",
    "fails",
    "filters",
    "hangs",
    "judges",
    "refuses",
    "resets",
    "sample_events",
    "sample_rollout",
    "says",
    "scripted_llm",
    "scripted_server",
    "sends",
]

_MODULE_OF = {
    **dict.fromkeys(("Action", "PolicySampler"), ".policy_sampler"),
    **dict.fromkeys(("ScriptedServer", "scripted_server"), ".server"),
    **dict.fromkeys(("check_sink", "sample_events", "sample_rollout"), ".sinks"),
}
"""Name -> its module, if that is not `.llm_endpoint`."""


def __getattr__(name: str) -> object:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    try:
        module = import_module(_MODULE_OF.get(name, ".llm_endpoint"), __name__)
    except ModuleNotFoundError as error:
        raise MissingExtraError(str(error.name).partition(".")[0], "server") from error
    value: object = getattr(module, name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return list(__all__)
