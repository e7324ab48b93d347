"""Code that comes with a base's files is never run, whatever stands on stdin: transformers would ask there."""

from __future__ import annotations

import ast
import io
import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from transformers import AutoTokenizer

import offbook
from offbook.base.config import LoraOptions
from offbook.engine.base_model import check_weights
from offbook.engine.inference.decoding.model import load_model
from offbook.engine.learner.model.loaders import load_base, tree_refused
from offbook.engine.learner.model.merge import merge
from offbook.engine.learner.model.policy import Policy
from tests.engine.learner.tiny_models import write_base

SOURCES = Path(offbook.__file__).parent
LOADERS = frozenset({"from_pretrained", "from_config", "load_dataset"})


def test_every_load_in_the_package_says_that_the_folders_code_is_not_trusted() -> None:
    calls = [
        (f"{file.relative_to(SOURCES)}:{node.lineno}", ast.unparse(node.func.value), node.keywords)
        for file in SOURCES.rglob("*.py")
        if any(loader in (text := file.read_text("utf-8")) for loader in LOADERS)
        for node in ast.walk(ast.parse(text))
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr in LOADERS
    ]
    refusing = ("trust_remote_code", "False")
    open_doors = [
        place
        for place, loader, keywords in calls
        if not loader.startswith("Peft")  # PEFT has no such option, and imports nothing from an adapter's folder
        and refusing not in [(keyword.arg, ast.unparse(keyword.value)) for keyword in keywords]
    ]
    assert calls and not open_doors


def own_architecture(folder: Path) -> Path:
    """A base of a type that transformers does not know, with the code for all of it."""
    write_base(folder, "llama")
    return with_code(folder, "config.json", model_type="own")


def own_tokenizer(folder: Path) -> Path:
    """A Llama with a tokenizer of its own class: transformers names no tokenizer for the type."""
    write_base(folder, "llama")
    (folder / "tokenizer_config.json").write_text("{}")
    return with_code(folder, "tokenizer_config.json", tokenizer_class="OwnTokenizer")


def with_code(folder: Path, file: str, **values: str) -> Path:
    """Let `file` name a module of the folder, which leaves a mark when it is imported."""
    kinds = ("AutoConfig", "AutoModelForCausalLM", "AutoTokenizer")
    names = {kind: [f"own.{kind}", None] if kind == "AutoTokenizer" else f"own.{kind}" for kind in kinds}
    content = json.loads((folder / file).read_text()) | values | {"auto_map": names}
    (folder / file).write_text(json.dumps(content))
    (folder / "own.py").write_text(f"open({str(folder / 'ran')!r}, 'w').close()\n")
    return folder


def sampler(base: Path) -> object:
    return load_model(base, device="cpu", dtype="float32", max_model_len=None)


def learner(base: Path) -> object:
    return load_base(base, "peft", "cpu", torch.float32, four_bit=False)


def trainer_tokenizer(base: Path) -> object:
    return Policy.load(base, LoraOptions(), loader="peft", device="cpu", dtype=torch.float32).tokenizer


def export(base: Path) -> object:
    return merge(base, base / "adapter", base.with_name("merged"), torch.float32)


@pytest.mark.parametrize(
    ("write", "load"),
    [
        *[(own_architecture, door) for door in (check_weights, tree_refused, sampler, learner, export)],
        *[(own_tokenizer, door) for door in (sampler, trainer_tokenizer)],
    ],
)
def test_a_y_on_stdin_runs_no_code_of_a_folder(
    write: Callable[[Path], Path], load: Callable[[Path], object], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    base = write(tmp_path / "base")
    answers = io.StringIO("y\n" * 20)
    monkeypatch.setattr("sys.stdin", answers)
    with pytest.raises((ValueError, OSError)):
        load(base)
    assert not (base / "ran").exists()
    assert answers.tell() == 0, "it was asked"


def test_the_folder_would_run_its_code_for_transformers_defaults(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    base = own_tokenizer(tmp_path / "base")
    monkeypatch.setattr("sys.stdin", io.StringIO("y\n"))
    monkeypatch.setattr("transformers.dynamic_module_utils.HF_MODULES_CACHE", str(tmp_path / "modules"))
    with pytest.raises(AttributeError, match="AutoTokenizer"):
        AutoTokenizer.from_pretrained(base)
    assert (base / "ran").exists()
