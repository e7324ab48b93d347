"""Selects vLLM's parsers for a model's tool calls and reasoning, by its chat template or else its family.

The names are those of vLLM 0.32's `--tool-call-parser` and `--reasoning-parser`. Imports neither torch nor transformers.
"""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from pathlib import Path
from typing import cast

from offbook.base.errors import ConfigError
from offbook.base.types import Json

from .thoughts import OPEN


@dataclass(frozen=True)
class Parsers:
    """Names of vLLM's parsers. None if the model's chat template has no tool calls, or no separate reasoning."""

    tool_call: str | None
    reasoning: str | None


@dataclass(frozen=True)
class _Format:
    """A parser, and how to recognise a chat template that writes its format."""

    parser: str
    marks: tuple[str, ...]  # the template contains all of them
    families: tuple[str, ...] = ()  # prefixes of `model_type`; empty: any family
    token: str | None = None  # the parser needs this token in the vocabulary


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
"""The first match is used."""

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
"""Prefix of `model_type` -> parser. The longest match is used if the template shows no call, or there is no template."""

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
HERMES_CALLS = "offbook_hermes"
"""Offbook's tool parser (`vllm/hermes_calls.py`), for models whose calls have hermes' format."""
OPTIONAL_THOUGHTS = "offbook_optional_thoughts"
"""Offbook's parser (`vllm/optional_thoughts.py`), for templates that show thoughts but never open or disable them."""
_CLOSED_BY_DEFAULT = re.compile(r"else\s*-?%\}\s*\{\{-?\s*['\"][^'\"]*<think>\\n\\n</think>")
"""Matches a template that ends the prompt with a closed thought by default."""


def parsers(folder: Path) -> Parsers:
    """The parsers for the model in a folder. Raises ConfigError if its JSON files cannot be read."""
    family = str(_object(folder / "config.json").get("model_type") or "")
    templates = _templates(folder)
    return Parsers(_tool_call(templates, family, folder), _reasoning(templates, family, folder))


def thinks(folder: Path) -> bool:
    """Whether the model in a folder can write `<think>...</think>` before its answer."""
    return any(OPEN in text for text in _templates(folder).values())


def has_template(folder: Path) -> bool:
    """Whether the model in a folder has a chat template of transformers. vLLM would prefer Mistral's own tokenizer."""
    return bool(_templates(folder))


def _has_token(folder: Path, token: str) -> bool:
    """Whether the vocabulary of tokenizer.json has a token; true if there is no such file."""
    path = folder / "tokenizer.json"
    if not path.is_file():
        return True
    text = path.read_text(encoding="utf-8")
    return json.dumps(token, ensure_ascii=False) in text or json.dumps(token) in text


def _tool_call(templates: dict[str, str], family: str, folder: Path) -> str | None:
    text = "\n".join(templates.values())
    parser = _first(_TOOL_CALLS, text.replace('\\"', '"'), family, folder)
    if parser or (text and not re.search(r"\btools\b", text)):
        return parser  # a template without tools has no calls to parse
    matching = [kind for kind in _TOOL_CALLS_OF if family.startswith(kind)]
    return _TOOL_CALLS_OF[max(matching, key=len)] if matching else None


def _reasoning(templates: dict[str, str], family: str, folder: Path) -> str | None:
    text = templates.get("default", "")
    if "<think>" in text:
        ending = text[text.rfind("add_generation_prompt") :]
        switched = "enable_thinking" in text
        if _CLOSED_BY_DEFAULT.search(ending):
            return None
        if not (switched or "<think>" in ending):
            return OPTIONAL_THOUGHTS
    return _first(_REASONING, text, family, folder)


def _first(formats: tuple[_Format, ...], text: str, family: str, folder: Path) -> str | None:
    for candidate in formats:
        if all(mark in text for mark in candidate.marks) and (
            not candidate.families or family.startswith(candidate.families)
        ):
            return candidate.parser if candidate.token is None or _has_token(folder, candidate.token) else None
    return None


def _templates(folder: Path) -> dict[str, str]:
    """The model's chat templates by name, from the files that transformers reads; `default` is the unnamed one."""
    templates: dict[str, str] = {}
    own = _object(folder / "tokenizer_config.json", optional=True).get("chat_template")
    if isinstance(own, str):
        templates["default"] = own
    elif isinstance(own, list):
        named = [cast(dict[str, Json], entry) for entry in cast(list[Json], own) if isinstance(entry, dict)]
        templates |= {str(entry.get("name")): str(entry.get("template") or "") for entry in named}
    for path in sorted((folder / "additional_chat_templates").glob("*.jinja")):
        templates[path.stem] = path.read_text(encoding="utf-8")
    if (folder / "chat_template.jinja").is_file():
        templates["default"] = (folder / "chat_template.jinja").read_text(encoding="utf-8")
    return templates


def _object(path: Path, *, optional: bool = False) -> dict[str, Json]:
    """Read a JSON object from a file; empty if an optional file does not exist. Raises ConfigError."""
    if optional and not path.is_file():
        return {}
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ConfigError(f"{path} cannot be read: {error}; name the folder of a model") from error
    if not isinstance(value, dict):
        raise ConfigError(f"{path} does not contain a JSON object: name the folder of a model")
    return cast(dict[str, Json], value)
