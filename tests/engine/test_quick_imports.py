"""Imports at the start of an engine's process: quantizers are left out where nothing is quantized, and no later garbage
collection looks at what was imported."""

from __future__ import annotations

import gc
import importlib
import importlib.util
import json
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from offbook.engine import quick_imports as module
from offbook.engine.quick_imports import quick_imports

QUANTIZER = "quantizer_of_the_tests"


@pytest.fixture(autouse=True)
def quantizer(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[None]:
    (tmp_path / f"{QUANTIZER}.py").write_text("")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(module, "QUANTIZERS", (QUANTIZER,))
    yield
    sys.modules.pop(QUANTIZER, None)


def base(tmp_path: Path, text: str) -> Path:
    (tmp_path / "config.json").write_text(text)
    return tmp_path


@pytest.mark.parametrize("text", ['{"model_type": "qwen2"}', "no JSON", "[]"])
def test_a_base_of_plain_weights_imports_no_quantizer(tmp_path: Path, text: str) -> None:
    with quick_imports(base(tmp_path, text)):
        assert importlib.util.find_spec(QUANTIZER) is None  # what transformers and PEFT ask
        with pytest.raises(ModuleNotFoundError):
            importlib.import_module(QUANTIZER)
        assert not gc.isenabled()
        assert "transformers" in sys.modules and len(gc.get_objects()) < gc.get_freeze_count() / 10
    assert gc.isenabled()
    importlib.import_module(QUANTIZER)


@pytest.mark.parametrize("quantized", [True, False])
def test_quantized_weights_and_whoever_asks_get_them(tmp_path: Path, quantized: bool) -> None:
    config = {"quantization_config": {"quant_method": "bitsandbytes"}} if quantized else {}
    with quick_imports(base(tmp_path, json.dumps(config)), quantizers=not quantized):
        importlib.import_module(QUANTIZER)


def test_what_is_imported_already_stays_and_a_failure_inside_restores_all(tmp_path: Path) -> None:
    loaded = importlib.import_module(QUANTIZER)
    with pytest.raises(OSError, match="full"), quick_imports(base(tmp_path, "{}")):
        assert importlib.import_module(QUANTIZER) is loaded
        raise OSError("full")
    assert gc.isenabled() and sys.modules[QUANTIZER] is loaded
