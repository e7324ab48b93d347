"""Which of vLLM's parsers a model folder gets, over the chat templates that families ship."""

from __future__ import annotations

import ast
import importlib.util
import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from offbook import tiny
from offbook.base.errors import ConfigError
from offbook.engine.inference.chat.families import OPTIONAL_THOUGHTS, Parsers, parsers

# The templates that TRL keeps as the families ship them: model_type, tool calls, reasoning.
SHIPPED = {
    "qwen2_5": ("qwen2", "hermes", None),
    "qwen3": ("qwen3", "hermes", "qwen3"),
    "qwen3_instruct_2507": ("qwen3", "hermes", None),
    "qwen3_5_think": ("qwen3_5", "qwen3_coder", "qwen3"),
    "qwen3_5_nothink": ("qwen3_5", "qwen3_coder", None),
    "qwen3_6": ("qwen3_5_moe", "qwen3_coder", "qwen3"),
    "llama3": ("llama", None, None),
    "llama3_1": ("llama", "llama3_json", None),
    "llama3_2": ("llama", "llama3_json", None),
    "gemma3": ("gemma3_text", None, None),
    "gemma4": ("gemma4", "gemma4", "gemma4"),
    "glm4moe": ("glm4_moe", "glm45", "glm45"),
    "gptoss": ("gpt_oss", "openai", "openai_gptoss"),
    "deepseekv3": ("deepseek_v3", "deepseek_v3", "deepseek_r1"),
    "deepseek_r1_distill": ("qwen2", "deepseek_v3", "deepseek_r1"),
    "nemotron_3_nano": ("nemotron_h", "qwen3_coder", "nemotron_v3"),
    "lfm2": ("lfm2", "lfm2", None),
    "phi3": ("phi3", None, None),
}


def _package(name: str) -> Path | None:
    """Where an installed package lies; it is not imported."""
    found = importlib.util.find_spec(name)
    return Path(found.submodule_search_locations[0]) if found and found.submodule_search_locations else None


def _model(folder: Path, family: str, template: str | None, tokens: list[str] | None = None) -> Path:
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps({"model_type": family}))
    if template is not None:
        (folder / "chat_template.jinja").write_text(template, encoding="utf-8")
    if tokens is not None:
        (folder / "tokenizer.json").write_text(json.dumps({"added_tokens": [{"content": one} for one in tokens]}))
    return folder


@pytest.mark.parametrize("name", SHIPPED)
def test_the_template_that_a_family_ships_names_its_parsers(
    name: str, tmp_path: Path, require: Callable[[bool, str], None]
) -> None:
    trl = _package("trl")
    require(trl is not None, "pip install -r requirements/engines.txt")
    family, tool_call, reasoning = SHIPPED[name]
    assert trl is not None
    template = (trl / f"chat_templates/{name}.jinja").read_text(encoding="utf-8")
    assert parsers(_model(tmp_path, family, template)) == Parsers(tool_call, reasoning)


def test_the_template_outweighs_the_family(tmp_path: Path) -> None:
    hermes = '{{ tools }}<tool_call>\n{"name": <name>, "arguments": <args>}\n</tool_call>'
    assert parsers(_model(tmp_path, "llama", hermes)) == Parsers("hermes", None)
    assert parsers(_model(tmp_path, "mistral", hermes)) == Parsers("hermes", None)


def test_the_family_decides_where_the_template_shows_tools_and_no_call(tmp_path: Path) -> None:
    assert parsers(_model(tmp_path, "qwen3_moe", "{{ tools }}{{ messages }}")) == Parsers("hermes", None)
    assert parsers(_model(tmp_path, "qwen3_5_moe", "{{ tools }}{{ messages }}")) == Parsers("qwen3_coder", None)
    assert parsers(_model(tmp_path, "qwen3", "{{ messages }}")) == Parsers(None, None)
    assert parsers(_model(tmp_path, "unheard_of", "{{ tools }}{{ messages }}")) == Parsers(None, None)


def test_thoughts_that_a_template_shows_and_neither_opens_nor_switches_are_optional(tmp_path: Path) -> None:
    shown = "{{ tools }}<tool_call>{% if thought %}<think>{{ thought }}</think>{% endif %}{% if add_generation_prompt %}{% endif %}"
    assert parsers(_model(tmp_path, "qwen2", shown)) == Parsers("hermes", OPTIONAL_THOUGHTS)


def test_a_folder_without_any_template_gets_its_familys_parsers(tmp_path: Path) -> None:
    assert parsers(_model(tmp_path, "mistral3", None)) == Parsers("mistral", None)


def test_templates_are_read_from_every_place_they_are_kept_in(tmp_path: Path) -> None:
    config = tmp_path / "tokenizer_config.json"
    named = [{"name": "default", "template": "plain"}, {"name": "tool_use", "template": "{{ tools }}[TOOL_CALLS]"}]
    _model(tmp_path, "mistral", None)
    config.write_text(json.dumps({"chat_template": "{{ tools }}<tool_call>"}))
    assert parsers(tmp_path).tool_call == "hermes"
    config.write_text(json.dumps({"chat_template": named}))
    assert parsers(tmp_path).tool_call == "mistral"
    (tmp_path / "additional_chat_templates").mkdir()
    (tmp_path / "additional_chat_templates/tools.jinja").write_text("<function={{ name }}><parameter=")
    assert parsers(tmp_path).tool_call == "mistral", "the first mark in the order of the table"
    config.write_text("{}")
    assert parsers(tmp_path).tool_call == "qwen3_coder"


def test_a_parser_that_fails_without_its_token_is_not_chosen(tmp_path: Path) -> None:
    llama = '{{ tools }}<|start_header_id|>{"name": n, "parameters": p}'
    assert parsers(_model(tmp_path, "llama", llama, ["<|python_tag|>"])).tool_call == "llama3_json"
    assert parsers(_model(tmp_path, "llama", llama, ["<|eot_id|>"])).tool_call is None
    thinking = "{% if add_generation_prompt %}<think>\n{% endif %}"
    assert parsers(_model(tmp_path, "llama", thinking, ["<think>"])).reasoning == "deepseek_r1"
    assert parsers(_model(tmp_path, "llama", thinking, ["<|eot_id|>"])).reasoning is None


def test_the_tiny_policy_writes_hermes_calls_and_no_reasoning() -> None:
    assert parsers(tiny.path()) == Parsers("hermes", None)


def test_a_folder_that_is_no_model_is_refused_by_file(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"config\.json cannot be read.*name the folder of a model"):
        parsers(tmp_path)
    (tmp_path / "config.json").write_text("[]")
    with pytest.raises(ConfigError, match=r"config\.json does not contain a JSON object"):
        parsers(tmp_path)
    _model(tmp_path, "qwen2", None)
    (tmp_path / "tokenizer_config.json").write_text("{")
    with pytest.raises(ConfigError, match=r"tokenizer_config\.json cannot be read"):
        parsers(tmp_path)


def test_every_name_is_one_that_the_installed_vllm_has(require: Callable[[bool, str], None]) -> None:
    vllm = _package("vllm")
    require(vllm is not None, "pip install -r requirements/engines.txt, then --no-deps engines-nodeps.txt")
    assert vllm is not None
    assert _named("_TOOL_CALLS", "_TOOL_CALLS_OF") <= _registered(vllm / "tool_parsers/__init__.py")
    assert _named("_REASONING") <= _registered(vllm / "reasoning/__init__.py")


def test_choosing_parsers_loads_no_torch() -> None:
    code = "import sys, offbook.engine.inference.chat.families; assert not {'torch', 'transformers'} & set(sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)


def _named(*tables: str) -> set[str]:
    """The parsers' names in tables of the module under test: every first argument of a format, and every dict value."""
    source = Path(sys.modules[parsers.__module__].__file__ or "").read_text(encoding="utf-8")
    found: set[str] = set()
    for node in ast.parse(source).body:
        if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name) and node.targets[0].id in tables:
            if isinstance(node.value, ast.Dict):
                found |= {ast.literal_eval(value) for value in node.value.values}
            if isinstance(node.value, ast.Tuple):
                found |= {ast.literal_eval(call.args[0]) for call in node.value.elts if isinstance(call, ast.Call)}
    assert found
    return found


def _registered(path: Path) -> set[str]:
    """The names in vLLM's table of parsers, read from its source: importing it takes many seconds."""
    for node in ast.parse(path.read_text(encoding="utf-8")).body:
        if isinstance(node, ast.Assign) and isinstance(node.value, ast.Dict):
            return {ast.literal_eval(key) for key in node.value.keys if key is not None}
    raise AssertionError(f"{path} has no table of parsers")
