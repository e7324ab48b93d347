"""Which of vLLM's parsers read what a model writes: by its chat template, else by its family.

Names are those of vLLM 0.32's `--tool-call-parser` and `--reasoning-parser`. No torch, no transformers.
"""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from pathlib import Path
from typing import cast

from ....errors import ConfigError
from ....types import Json
from .thoughts import OPEN


@dataclass(frozen=True)
class Parsers:
    """Names of vLLM's parsers; None where the model's chats have no tool calls, or no reasoning apart from the answer."""

    tool_call: str | None
    reasoning: str | None


@dataclass(frozen=True)
class _Format:
    """A parser, the marks that a template which writes its format has (all of them), and whose format it is.

    `families`: beginnings of `model_type`; none: anybody's. `token`: without it in the tokenizer the parser fails.
    """

    parser: str
    marks: tuple[str, ...]
    families: tuple[str, ...] = ()
    token: str | None = None


_BAR = "\uff5c"
_DSML = f"{_BAR}DSML{_BAR}"
_DEEPSEEK_CALLS = f"<{_BAR}tool\u2581calls\u2581begin{_BAR}>"
_TOOL_CALLS = (
    _Format("gemma4", ("<|tool_call>call:",)),
    _Format("functiongemma", ("<start_function_call>",)),
    _Format("deepseek_v4", (_DSML,), ("deepseek_v4",)),
    _Format("deepseek_v32", (_DSML,)),
    _Format("deepseek_v3", (_DEEPSEEK_CALLS, "```json"), token=_DEEPSEEK_CALLS),
    _Format("deepseek_v31", (_DEEPSEEK_CALLS,), token=_DEEPSEEK_CALLS),
    _Format("kimi_k2", ("<|tool_calls_section_begin|>",)),
    _Format("minimax_m2", ("<minimax:tool_call>",)),
    _Format("seed_oss", ("<seed:tool_call>",)),
    _Format("lfm2", ("<|tool_call_start|>",), token="<|tool_call_start|>"),
    _Format("glm45", ("<tool_call>", "<arg_key>")),
    _Format("openai", ("<|channel|>commentary", "<|start|>")),
    _Format("mistral", ("[TOOL_CALLS]",)),
    _Format("qwen3_coder", ("<function=", "<parameter=")),
    _Format("granite", ("<|tool_call|>",), ("granite",)),
    _Format("granite4", ("<tool_call>",), ("granitemoehybrid",)),
    _Format("hermes", ("<tool_call>",)),
    _Format("olmo3", ("<function_calls>",), ("olmo",)),
    _Format("llama4_pythonic", ("[func_name1(",), ("llama4",)),
    _Format("pythonic", ("[func_name1(",)),
    _Format("llama4_json", ('"parameters"',), ("llama4",), "<|python_tag|>"),
    _Format("llama3_json", ("<|start_header_id|>", '"parameters"'), token="<|python_tag|>"),
)
"""The first one that fits is taken."""

_TOOL_CALLS_OF = {
    "gemma4": "gemma4",
    "glm4_moe": "glm45",
    "gpt_oss": "openai",
    "lfm2": "lfm2",
    "ministral": "mistral",
    "mistral": "mistral",
    "mixtral": "mistral",
    "qwen2": "hermes",
    "qwen3": "hermes",
    "qwen3_5": "qwen3_coder",
}
"""By the longest beginning of `model_type`, for a template that names tools and shows no call, or none at all."""

_THINKS = ("<think>",)
_REASONING = (
    _Format("gemma4", ("<|channel>", "enable_thinking")),
    _Format("openai_gptoss", ("<|channel|>analysis", "<|start|>")),
    _Format("mistral", ("[THINK]",)),
    _Format("seed_oss", ("<seed:think>",)),
    _Format("glm45", ("<arg_key>", *_THINKS)),
    _Format("minimax_m2", ("<minimax:tool_call>", *_THINKS)),
    _Format("nemotron_v3", _THINKS, ("nemotron",)),
    _Format("qwen3", _THINKS, ("qwen3",)),
    _Format("deepseek_r1", _THINKS, token="<think>"),
)
OPTIONAL_THOUGHTS = "understudy_optional_thoughts"
"""Our own parser (`vllm/optional_thoughts.py`), for templates that show thoughts and neither open nor switch them."""
_CLOSED_BY_DEFAULT = re.compile(r"else\s*-?%\}\s*\{\{-?\s*['\"][^'\"]*<think>\\n\\n</think>")
"""The template's last word, unless it is asked to think, is a thought that is over."""


def parsers(folder: Path) -> Parsers:
    """The parsers for the model in a folder. Raises ConfigError when its JSON files cannot be read."""
    family = str(_object(folder / "config.json").get("model_type") or "")
    templates = _templates(folder)
    tokens = _Tokens(folder)
    return Parsers(_tool_call(templates, family, tokens), _reasoning(templates, family, tokens))


def thinks(folder: Path) -> bool:
    """Whether the model in a folder may write `<think>...</think>` before its answer."""
    return any(OPEN in text for text in _templates(folder).values())


class _Tokens:
    """The text of tokenizer.json, read when a parser needs one of its tokens."""

    def __init__(self, folder: Path) -> None:
        self._path = folder / "tokenizer.json"

    def has(self, token: str) -> bool:
        """Whether the vocabulary has it; true where the vocabulary is kept in another way."""
        if not self._path.is_file():
            return True
        text = self._path.read_text(encoding="utf-8")
        return json.dumps(token, ensure_ascii=False) in text or json.dumps(token) in text


def _tool_call(templates: dict[str, str], family: str, tokens: _Tokens) -> str | None:
    text = "\n".join(templates.values())
    found = _first(_TOOL_CALLS, text.replace('\\"', '"'), family, tokens)
    if found or (text and not re.search(r"\btools\b", text)):
        return found  # where no tool is ever shown to the model, nothing is to be read
    fitting = [kind for kind in _TOOL_CALLS_OF if family.startswith(kind)]
    return _TOOL_CALLS_OF[max(fitting, key=len)] if fitting else None


def _reasoning(templates: dict[str, str], family: str, tokens: _Tokens) -> str | None:
    text = templates.get("default", "")
    if "<think>" in text:
        ending = text[text.rfind("add_generation_prompt") :]
        switched = "enable_thinking" in text
        if _CLOSED_BY_DEFAULT.search(ending):
            return None
        if not (switched or "<think>" in ending):
            return OPTIONAL_THOUGHTS
    return _first(_REASONING, text, family, tokens)


def _first(formats: tuple[_Format, ...], text: str, family: str, tokens: _Tokens) -> str | None:
    for one in formats:
        if all(mark in text for mark in one.marks) and (not one.families or family.startswith(one.families)):
            return one.parser if one.token is None or tokens.has(one.token) else None
    return None


def _templates(folder: Path) -> dict[str, str]:
    """The model's chat templates by name, from where transformers looks for them; `default` is the plain one."""
    found: dict[str, str] = {}
    own = _object(folder / "tokenizer_config.json", optional=True).get("chat_template")
    if isinstance(own, str):
        found["default"] = own
    elif isinstance(own, list):
        named = [cast(dict[str, Json], entry) for entry in cast(list[Json], own) if isinstance(entry, dict)]
        found |= {str(entry.get("name")): str(entry.get("template") or "") for entry in named}
    for path in sorted((folder / "additional_chat_templates").glob("*.jinja")):
        found[path.stem] = path.read_text(encoding="utf-8")
    if (folder / "chat_template.jinja").is_file():
        found["default"] = (folder / "chat_template.jinja").read_text(encoding="utf-8")
    return found


def _object(path: Path, *, optional: bool = False) -> dict[str, Json]:
    """A JSON object from a file; empty when an optional file is not there."""
    if optional and not path.is_file():
        return {}
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ConfigError(f"{path} cannot be read: {error}; give the folder of a model") from error
    if not isinstance(value, dict):
        raise ConfigError(f"{path} holds no JSON object; give the folder of a model")
    return cast(dict[str, Json], value)
