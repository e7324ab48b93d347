"""`offbook import`: a LoRA of another tool as step 1 of a model, and what is refused."""

from __future__ import annotations

import json
import struct
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save, save_file

import offbook
from offbook.base.adapter_folders import named_base
from offbook.base.config import LoraOptions
from offbook.base.errors import ConfigError
from offbook.commands.main import run
from offbook.engine import checkpoint_files
from offbook.engine.checkpoint_files import ADAPTER, ADAPTER_CONFIG
from offbook.engine.learner import import_adapter
from offbook.engine.learner.import_adapter import lora_of, write_checkpoint
from offbook.engine.learner.model.policy import Policy
from offbook.tiny import path

SHAPE = LoraOptions(r=4, alpha=12, target_modules=("q_proj", "v_proj"))
ROWS = [{"messages": [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "hello there"}]}]


@pytest.fixture(scope="module")
def policy() -> Policy:
    return Policy.load(path(), SHAPE, threads=1)


@pytest.fixture
def adapter(policy: Policy, tmp_path: Path) -> Path:
    """A LoRA with random weights, as PEFT saves it."""
    folder = tmp_path / "lora"
    policy.save_adapter(folder)
    torch.manual_seed(7)
    file = folder / ADAPTER
    save_file({name: 0.05 * torch.randn_like(value) for name, value in load_file(file).items()}, file)
    return folder


def changed(adapter: Path, **fields: Any) -> None:
    file = adapter / ADAPTER_CONFIG
    file.write_text(json.dumps(json.loads(file.read_text()) | fields))


def test_the_first_checkpoint_is_whole_and_has_the_adapters_weights_and_shape(
    policy: Policy, adapter: Path, tmp_path: Path
) -> None:
    assert lora_of(adapter) == SHAPE
    written = write_checkpoint(policy, adapter, "desk", "tiny", tmp_path / "checkpoints")
    checkpoint = checkpoint_files.read(written)
    assert (checkpoint.step, checkpoint.note.model, checkpoint.note.lora) == (1, "desk", SHAPE)
    given, kept = load_file(adapter / ADAPTER), load_file(written / ADAPTER)
    assert given.keys() == kept.keys() and all(torch.equal(given[name], kept[name]) for name in given)


def test_what_makes_it_no_plain_lora_is_named(adapter: Path, tmp_path: Path) -> None:
    changed(adapter, use_dora=True, rank_pattern={"q_proj": 2}, peft_type="IA3")
    changed(adapter, init_lora_weights="pissa", alora_invocation_tokens=[7], a_field_of_tomorrow=1)
    with pytest.raises(ConfigError) as refused:
        lora_of(adapter)
    for named in (
        "peft_type is 'IA3', not 'LORA'",
        "use_dora is True",
        "rank_pattern is {",
        "init_lora_weights is 'pissa'",
    ):
        assert named in str(refused.value)
    assert "alora_invocation_tokens is [7]" in str(refused.value) and "a_field_of_tomorrow is 1" in str(refused.value)
    with pytest.raises(ConfigError, match=r"has no adapter_config\.json and no adapter_model\.safetensors"):
        lora_of(tmp_path)


HOSTILE: list[Any] = [
    None,
    True,
    -1,
    2**70,
    1e308,
    "",
    "x\x1b]0;",
    "\ud800",
    [],
    [[]],
    [None, "x"],
    {},
    {"x": [1]},
    "9" * 5000,
]


def test_whatever_a_configuration_holds_is_taken_or_refused(adapter: Path) -> None:
    whole = json.loads((adapter / ADAPTER_CONFIG).read_text())
    for name in whole:
        for value in HOSTILE:
            changed(adapter, **(whole | {name: value}))
            try:
                lora_of(adapter)
                assert isinstance(named_base(adapter) or "", str)
            except ConfigError as refused:
                assert str(refused).isprintable(), name


def test_each_tensor_that_does_not_fit_the_base_is_named(policy: Policy, adapter: Path, tmp_path: Path) -> None:
    weights = load_file(adapter / ADAPTER)
    first, second, *_ = weights
    renamed = weights | {second: torch.zeros(3, 5), "elsewhere": weights[first]}
    del renamed[first]
    save_file(renamed, adapter / ADAPTER)
    with pytest.raises(ConfigError) as refused:
        write_checkpoint(policy, adapter, "desk", "tiny", tmp_path / "checkpoints")
    for named in (f"{first} is missing", "elsewhere belongs to no layer", f"{second} is (3, 5), not ("):
        assert named in str(refused.value)
    assert not (tmp_path / "checkpoints").exists()


def headed(header: Any, tensors: bytes) -> bytes:
    """A safetensors file with this header."""
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return struct.pack("<Q", len(text)) + text + tensors


def lying(adapter: Path) -> dict[str, bytes]:
    """Files of tensors whose header lies, or that hold what no LoRA does."""
    whole = (adapter / ADAPTER).read_bytes()
    (length,) = struct.unpack("<Q", whole[:8])
    header, tensors, weights = json.loads(whole[8 : 8 + length]), whole[8 + length :], load_file(adapter / ADAPTER)
    first = next(iter(weights))

    def other(tensor: torch.Tensor) -> bytes:
        return save(weights | {first: tensor})

    def told(**fields: Any) -> bytes:
        return headed(header | {first: header[first] | fields}, tensors)

    return {
        "no bytes": b"",
        "a length beyond the file": struct.pack("<Q", 2**63) + whole[8:],
        "no header": headed(b"", tensors),
        "nesting": headed(b"[" * 5_000, tensors),
        "no object": headed([], tensors),
        "a huge shape": told(shape=[2**40, 2**40]),
        "a negative size": told(shape=[-1, 4]),
        "offsets beyond the file": told(data_offsets=[0, 2**62]),
        "offsets backwards": told(data_offsets=[100, 0]),
        "an unknown type": told(dtype="X9"),
        "cut": whole[:-10],
        "foreign bytes at the end": whole + b"x" * 100,
        "a name with escapes": headed(
            {name.replace(first, "\x1b]0;x"): each for name, each in header.items()}, tensors
        ),
        "nan": other(torch.full_like(weights[first], float("nan"))),
        "infinite": other(torch.full_like(weights[first], float("inf"))),
        "infinite in float32": other(torch.full_like(weights[first], 1e300, dtype=torch.float64)),
        "integers": other(torch.ones_like(weights[first], dtype=torch.int64)),
        "truth values": other(torch.ones_like(weights[first], dtype=torch.bool)),
        "complex": other(weights[first].to(torch.complex64)),
    }


def test_tensors_that_lie_or_are_no_loras_make_no_model(
    policy: Policy, adapter: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(Policy, "load", lambda *_, **__: policy)
    monkeypatch.setattr(import_adapter, "original_stdout", lambda: sys.stdout)
    places = {"--base": path(), "--adapter": adapter, "--checkpoints": tmp_path / "checkpoints"}
    words = ["--name", "tiny", "--model", "desk", *(str(word) for pair in places.items() for word in pair)]
    for lie, content in lying(adapter).items():
        (adapter / ADAPTER).write_bytes(content)
        assert import_adapter.main(words) == 1, lie
        told = capsys.readouterr().out
        assert told and (told.isprintable() or lie == "a name with escapes"), (lie, told)
        assert not (tmp_path / "checkpoints").exists(), lie


@pytest.mark.slow("an import and a server")
async def test_an_imported_model_is_at_step_1_and_trains_on(
    adapter: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["import", str(adapter), "--model", "desk", "--dir", str(tmp_path / "server")]
    changed(adapter, r=2)
    assert run([*words, "--base", "tiny"]) == 2
    assert "is (4, " in capsys.readouterr().err and not (tmp_path / "server/default/models/desk").exists()
    changed(adapter, r=4)
    assert run(words) == 0
    assert capsys.readouterr().out.strip().endswith("desk/checkpoints/0001")
    assert run(words) == 2
    assert "there is a model 'desk'" in capsys.readouterr().err
    with offbook.LocalBackend(dir=tmp_path / "server", engine="embedded", threads=1) as backend:
        model = offbook.TrainableModel(name="desk", project="default", base_model="tiny", backend=backend)
        assert await model.get_step() == 1
        result = await model.train_sft(ROWS, epochs=2, batch_size=1, learning_rate=5e-3, schedule="constant", warmup=0)
        assert result.step == 3 and result.updates[1].loss < result.updates[0].loss
