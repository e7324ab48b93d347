"""Who loads the base: transformers or Unsloth, whole or in 4 bits. Unsloth is the real one, in processes of its own."""

from __future__ import annotations

import importlib.util
import os
import re
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from offbook import tiny
from offbook.base.config import LoraOptions
from offbook.base.errors import ConfigError, install_command
from offbook.base.server_options import EngineOptions
from offbook.engine.learner.learner import Learner
from offbook.engine.learner.model import loaders
from offbook.engine.learner.model.policy import Policy
from offbook.engine.learner.model.probes import mask_probe
from offbook.engine.learner.model.unsloth_loader import choose
from offbook.engine.protocol import MergeCommand, Merged, TrainCommand, Trained
from offbook.server.base_model import find
from offbook.server.training.learner_client import LearnerClient
from tests.engine.learner.jobs import LORA, command, random_groups
from tests.engine.learner.loader_answers import answers, logprobs
from tests.paths import ROOT

SECONDS = 300
BASE = Path(tiny.path())


@pytest.mark.parametrize(("device", "place"), [("cuda:1", {"": "cuda:1"}), ("cpu", None)])
def test_on_a_gpu_the_base_is_loaded_straight_onto_it(
    monkeypatch: pytest.MonkeyPatch, device: str, place: dict[str, str] | None
) -> None:
    asked: list[dict[str, object]] = []

    def from_pretrained(base: Path, **options: object) -> None:
        asked.append(options)
        raise OSError("enough")

    architecture = SimpleNamespace(from_pretrained=from_pretrained, _supports_sdpa=True)
    monkeypatch.setattr(loaders, "architecture_of", lambda _: architecture)
    with pytest.raises(OSError, match="enough"):
        loaders.load_base(BASE, "peft", device, torch.bfloat16, four_bit=False)
    assert asked[0].get("device_map") == place


@pytest.fixture
def unsloth(require) -> None:
    require(importlib.util.find_spec("unsloth") is not None, install_command("unsloth"))


@pytest.fixture
def bitsandbytes(require) -> None:
    require(importlib.util.find_spec("bitsandbytes") is not None, "pip install bitsandbytes")


def without(monkeypatch: pytest.MonkeyPatch, package: str) -> None:
    """Make a package look as if it were not installed."""
    found = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name, *rest: None if name == package else found(name, *rest)
    )


@pytest.mark.slow("real Unsloth")
@pytest.mark.usefixtures("unsloth")
def test_unsloth_and_peft_give_the_same_first_weights_logprobs_and_gradients(tmp_path: Path) -> None:
    output, scratch = tmp_path / "answers", tmp_path / "scratch"
    scratch.mkdir()
    done = subprocess.run(
        [sys.executable, "-m", "tests.engine.learner.loader_answers", "unsloth", str(BASE), str(output)],
        capture_output=True,
        text=True,
        timeout=SECONDS,
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(ROOT), "TMPDIR": str(scratch)},
    )
    assert done.returncode == 0, done.stderr
    found, expected = load_file(output), answers("peft", BASE)
    assert int(found.pop("recomputed")) > 0  # its gradient checkpointing was at work
    assert int(expected.pop("recomputed")) == 0
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        exactness = 0.0 if name.startswith("first") else 1e-4 * float(value.abs().max())
        torch.testing.assert_close(found[name], value, rtol=0, atol=exactness, msg=name)
    assert sum(name.startswith("grad|tree|") for name in expected) > 60
    assert not (tmp_path / "unsloth_compiled_cache").exists()
    assert list(scratch.glob("offbook-unsloth.*")) == []


async def ask(client: LearnerClient, sent: TrainCommand | MergeCommand) -> Trained | Merged:
    last = [event async for event in client.run(sent)][-1]
    assert isinstance(last, Trained | Merged), last
    return last


@pytest.mark.slow("real Unsloth")
@pytest.mark.usefixtures("unsloth")
async def test_the_learners_process_trains_with_unsloth_and_its_checkpoint_loads_with_peft(tmp_path: Path) -> None:
    options = EngineOptions(loader="unsloth", device="cpu", threads=1, train_gpus=(3,))
    client = LearnerClient(find("tiny"), options, tmp_path / "logs" / "learner.log")
    try:
        trained = await ask(client, command(tmp_path, random_groups(0), 0))
        variables = Path(f"/proc/{client.pid}/environ").read_text().split("\0") if sys.platform == "linux" else []
        facts = client.facts
        again = await ask(client, command(tmp_path, random_groups(1), 1))
        checkpoint = tmp_path / "agent/checkpoints/0002"
        merged = await ask(client, MergeCommand(request_id="m", adapter=checkpoint, output=tmp_path / "merged"))
    finally:
        await client.stop()
    assert isinstance(trained, Trained) and trained.result.applied
    assert isinstance(again, Trained) and isinstance(merged, Merged)
    assert facts["loader"].startswith("unsloth 20")
    assert facts["attention"] == "flash_pieces"
    assert facts["dtype"] == "float32"
    assert facts["mask_probe"].startswith("ok, differs by")
    assert trained.result.metrics["layout/probe_difference"] < 1e-3
    if variables:
        assert "CUDA_VISIBLE_DEVICES=3" in variables
        assert f"UNSLOTH_COMPILE_LOCATION={tmp_path / 'logs/unsloth_compiled_cache'}" in variables

    policy = Policy.load(BASE, LORA, threads=1)
    policy.load_adapter(checkpoint)
    plain = AutoModelForCausalLM.from_pretrained(tmp_path / "merged", dtype=torch.float32)
    ids = torch.arange(5, 40)[None]
    with torch.no_grad():
        expected, found = plain(input_ids=ids).logits, policy.model(input_ids=ids).logits
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-3)
    third = Learner(policy, "tiny", lambda _: None).train(command(tmp_path, random_groups(2), 2))
    assert third.step == 3  # weights and optimizer go on under the other loader


@pytest.mark.parametrize("device", ["cpu", "mps"])
def test_auto_takes_peft_away_from_cuda(device: str) -> None:
    assert choose("auto", device) == "peft"


def test_auto_takes_unsloth_beside_cuda_where_it_is_installed(monkeypatch: pytest.MonkeyPatch, unsloth) -> None:
    assert choose("auto", "cuda") == "unsloth"
    without(monkeypatch, "unsloth")
    assert choose("auto", "cuda") == "peft"


def test_unsloth_that_is_not_installed_is_refused_with_the_command(monkeypatch: pytest.MonkeyPatch) -> None:
    without(monkeypatch, "unsloth")
    with pytest.raises(ConfigError, match=re.escape(install_command("unsloth"))):
        Policy.load(BASE, LORA, loader="unsloth")
    with pytest.raises(ConfigError, match="allowed: auto, peft, unsloth"):
        Policy.load(BASE, LORA, loader="fast")  # type: ignore[arg-type]


def test_four_bits_without_bitsandbytes_or_a_device_for_it_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ConfigError, match=r"load_in_4bit.*'mps'"):
        Policy.load(BASE, LORA, "mps", load_in_4bit=True)
    without(monkeypatch, "bitsandbytes")
    with pytest.raises(ConfigError, match="bitsandbytes is not installed"):
        Policy.load(BASE, LORA, load_in_4bit=True)


@pytest.mark.usefixtures("bitsandbytes")
def test_a_step_far_from_the_sampler_names_the_precision_of_the_base(tmp_path: Path) -> None:
    for packed, words in ((True, r"load_in_4bit.*dtype float32"), (False, r"same dtype \(the learner has float32\)")):
        policy = Policy.load(BASE, LORA, threads=1, load_in_4bit=packed)
        result = Learner(policy, "tiny", lambda _: None).train(command(tmp_path / str(packed), random_groups(0), 0))
        [warning] = [text for text in result.warnings if "kl_warn" in text]
        assert re.search(words, warning), warning


@pytest.mark.usefixtures("bitsandbytes")
def test_a_base_in_four_bits_counts_its_weights_trains_and_stays_as_it_is_after_a_pass_without_gradients() -> None:
    policy, whole = (Policy.load(BASE, LoraOptions(), threads=1, load_in_4bit=packed) for packed in (True, False))
    assert (policy.four_bit, whole.four_bit) == (True, False)
    assert policy.base_parameters == whole.base_parameters
    assert policy.shape == whole.shape
    gradients: list[torch.Tensor] = []
    for _ in range(2):
        values = logprobs(policy, "tree")
        parameters = list(policy.trainable_parameters().values())
        gradients.append(torch.cat([grad.flatten() for grad in torch.autograd.grad(values.sum(), parameters)]))
        assert mask_probe(policy) is None  # passes without gradients, after which a repacked weight would be wrong
    assert float(gradients[0].abs().max()) > 0
    torch.testing.assert_close(gradients[1], gradients[0], rtol=0, atol=0)
    assert float((values - logprobs(whole, "tree")).detach().abs().mean()) > 0.01  # 4 bits are not 32
