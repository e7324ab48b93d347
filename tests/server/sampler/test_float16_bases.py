"""Bases that vLLM refuses in float16, which a T4 computes in, are named before anything is loaded."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path

import pytest

from offbook.base.errors import ConfigError, install_command
from offbook.base.server_options import EngineOptions, ServerOptions
from offbook.server import serving
from offbook.server.sampler.engine_choice import NO_FLOAT16, choose
from tests.server.sampler.cards import GIB, L4, T4


def for_base(model_type: str, **options: object) -> None:
    choose(EngineOptions.parse(engine="vllm", **options), "tiny", trains=True).for_base(model_type, plain_answers=True)


@pytest.mark.parametrize("model_type", sorted(NO_FLOAT16))
def test_such_a_base_is_refused_on_a_t4_with_what_to_do(driver: Callable[..., None], model_type: str) -> None:
    driver(T4.format(index=0, free=15 * GIB))
    refusal = f"--dtype {{}}: vLLM does not sample '{model_type}' in float16, .* use --dtype float32, a newer GPU"
    for dtype in ("auto", "float16"):
        with pytest.raises(ConfigError, match=refusal.format(dtype)):
            for_base(model_type, dtype=dtype)
    for_base(model_type, dtype="float32")
    for_base("qwen2")
    choose(EngineOptions.parse(engine="embedded"), "tiny", trains=True).for_base(model_type, plain_answers=True)
    for_base(model_type, device="cpu")
    driver(L4.format(index=0, free=22 * GIB))
    for_base(model_type)


def test_a_server_ends_with_it_before_it_opens_its_records(driver: Callable[..., None], tmp_path: Path) -> None:
    driver(T4.format(index=0, free=15 * GIB))
    base = tmp_path / "gemma"
    base.mkdir()
    (base / "config.json").write_text(json.dumps({"model_type": "gemma3"}))
    (base / "model.safetensors").touch()
    with pytest.raises(ConfigError, match="vLLM does not sample 'gemma3' in float16"):
        serving.run(ServerOptions(dir=tmp_path / "dir", model=str(base), engine=EngineOptions(engine="vllm")))
    assert not (tmp_path / "dir" / "records.db").exists() and not (tmp_path / "dir" / "logs").exists()


def test_they_are_those_of_the_vllm_that_is_installed(require: Callable[[bool, str], None]) -> None:
    spec = find_spec("vllm")
    require(spec is not None, install_command("vllm"))
    assert spec is not None and spec.origin is not None
    source = (Path(spec.origin).parent / "config" / "model.py").read_text("utf-8")
    [listed] = re.findall(r"^_FLOAT16_NOT_SUPPORTED_MODELS = \{(.*?)^\}", source, re.M | re.S)
    assert set(re.findall(r'^ +"(\w+)":', listed, re.M)) == NO_FLOAT16
