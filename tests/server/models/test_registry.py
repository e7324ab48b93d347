"""Names, steps, leases and checkpoints, over real folders; what the sampler is told is read from a scripted one."""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from offbook.base.config import LoraOptions
from offbook.base.errors import ConfigError
from offbook.base.wire import AdoptRequest, ForkRequest, RegisterRequest
from offbook.server.base_model import BaseModelPath
from offbook.server.errors import ApiError
from offbook.server.models.checkpoint_swaps import ModelServices, open_models
from offbook.server.models.leases import KEPT_LOADED
from offbook.server.models.registry import ModelRoute
from offbook.testing.server import ConnectedSampler
from tests.fakes.scripted_sampler import ScriptedSampler, scripted_sampler


@pytest.fixture
async def scripted() -> AsyncIterator[ScriptedSampler]:
    async with scripted_sampler() as sampler:
        yield sampler


@pytest.fixture
async def client(scripted: ScriptedSampler) -> AsyncIterator[ConnectedSampler]:
    sampler = ConnectedSampler(scripted.url)
    yield sampler
    await sampler.stop()


def opened(root: Path, client: ConnectedSampler, base: str = "tiny") -> ModelServices:
    return open_models(root, BaseModelPath(base, root, base), "default", "default", client.adapters)


def put_checkpoint(root: Path, step: int, name: str = "default", request_id: str | None = None, **fields: Any) -> Path:
    """A checkpoint as the learner leaves it, with weights that only a file's size tells apart: 17 bytes for step 1."""
    folder = root / "default" / "models" / name / "checkpoints" / f"{step:04d}"
    folder.mkdir(parents=True)
    (folder / "adapter_config.json").write_text('{"base_model_name_or_path": "somewhere"}')
    (folder / "adapter_model.safetensors").write_bytes(no_tensors(step))
    (folder / "optimizer.safetensors").write_bytes(no_tensors())
    (folder / "optimizer.json").write_text('{"updates": 1}')
    (folder / "rng.safetensors").write_bytes(no_tensors())
    result = {"model": name, "step": step, "applied": True, "request_id": request_id or ""}
    note = {
        "step": step,
        "model": name,
        "base_model": "tiny",
        "lora": {},
        "config": {},
        "request_id": request_id,
        "metrics": {"a": 1.0},
        "result": result,
        "created_at": 1.0,
    }
    (folder / "offbook.json").write_text(json.dumps(note | fields))
    return folder


def no_tensors(padding: int = 0) -> bytes:
    """A safetensors file that holds none: 16 bytes, and so many more."""
    return (8 + padding).to_bytes(8, "little") + b"{}".ljust(8 + padding)


async def refusal(models: ModelServices, name: str) -> ApiError:
    with pytest.raises(ApiError) as caught:
        models.registry.resolve(name)
    return caught.value


# ---- names


async def test_a_name_means_its_newest_step_and_a_number_a_fixed_one(tmp_path: Path, client: ConnectedSampler) -> None:
    opened(tmp_path, client)
    put_checkpoint(tmp_path, 1)
    put_checkpoint(tmp_path, 3)
    models = opened(tmp_path, client)
    assert models.registry.resolve("default") == ModelRoute("default", 3, "default@3")
    assert models.registry.resolve("default@1") == ModelRoute("default", 1, "default@1")
    assert models.registry.resolve("default@0") == ModelRoute("default", 0, "base")
    assert models.registry.names() == ["default", "default@0", "default@1", "default@3", "tiny"]


@pytest.mark.parametrize(
    "name", ["nobody", "default@2", "default@", "default@x", "default@-1", "", "@1", "default@1@2"]
)
async def test_unknown_names_are_refused(tmp_path: Path, client: ConnectedSampler, name: str) -> None:
    opened(tmp_path, client)
    put_checkpoint(tmp_path, 1)
    assert (await refusal(opened(tmp_path, client), name)).status == 404


async def test_the_bases_own_name_means_the_base_and_no_model(tmp_path: Path, client: ConnectedSampler) -> None:
    opened(tmp_path, client)
    put_checkpoint(tmp_path, 1)
    models = opened(tmp_path, client)
    assert models.registry.resolve("tiny") == ModelRoute("tiny", 0, "base")
    for name in ("tiny@0", "tiny@1"):
        assert "'tiny' can be called, but is never trained" in str(await refusal(models, name))
    with pytest.raises(ApiError, match="never trained"):
        models.registry.model("tiny")


async def test_a_model_that_has_the_bases_name_takes_precedence(tmp_path: Path, client: ConnectedSampler) -> None:
    models = opened(tmp_path, client)
    models.registration.register(RegisterRequest(name="tiny", base_model="tiny"))
    put_checkpoint(tmp_path, 1, name="tiny")
    models = opened(tmp_path, client)
    assert models.registry.resolve("tiny") == ModelRoute("tiny", 1, "tiny@1")
    assert models.registry.names() == ["default", "default@0", "tiny", "tiny@0", "tiny@1"]
    elsewhere = opened(tmp_path, client, base="other")
    assert "--model tiny" in str(await refusal(elsewhere, "tiny"))


# ---- directories


async def test_scratch_and_broken_folders_are_no_checkpoints(
    tmp_path: Path, client: ConnectedSampler, caplog: pytest.LogCaptureFixture
) -> None:
    opened(tmp_path, client)
    good = put_checkpoint(tmp_path, 1)
    (put_checkpoint(tmp_path, 2) / "adapter_model.safetensors").unlink()
    put_checkpoint(tmp_path, 3, sizes={"adapter_model.safetensors": 999})
    (good.parent / ".scratch-0004").mkdir()
    with caplog.at_level(logging.ERROR):
        models = opened(tmp_path, client)
    assert models.registry.names() == ["default", "default@0", "default@1", "tiny"]
    assert "0002 has no adapter_model.safetensors" in caplog.text
    assert "has 19 bytes, 999 were written" in caplog.text
    state = models.registry.model("default").state()
    assert (state.step, [Path(path).name for path in state.damaged]) == (1, ["0002.damaged-0", "0003.damaged-0"])
    put_checkpoint(tmp_path, 2)
    state = opened(tmp_path, client).registry.model("default").state()
    assert (state.step, [Path(path).name for path in state.damaged]) == (2, ["0003.damaged-0"])
    (good.parent / "0002").rename(tmp_path / "elsewhere")
    assert sorted(path.name for path in good.parent.iterdir()) == [
        ".scratch-0004",
        "0001",
        "0002.damaged-0",
        "0003.damaged-0",
    ]


async def test_a_deletion_that_a_crash_cut_short_is_finished_at_the_next_start(
    tmp_path: Path, client: ConnectedSampler
) -> None:
    opened(tmp_path, client)
    put_checkpoint(tmp_path, 2)
    doomed = put_checkpoint(tmp_path, 1)
    doomed.rename(doomed.with_name(".deleting-0001"))
    assert opened(tmp_path, client).registry.names() == ["default", "default@0", "default@2", "tiny"]
    assert [path.name for path in doomed.parent.iterdir()] == ["0002"]


async def test_models_of_another_base_are_known_and_not_served(tmp_path: Path, client: ConnectedSampler) -> None:
    models = opened(tmp_path, client)
    models.registration.register(RegisterRequest(name="mine", base_model="tiny", lora=LoraOptions(r=4)))
    assert opened(tmp_path, client, base="other").registry.names() == ["other"]
    with pytest.raises(ConfigError, match=r"--name mine.*'tiny'"):
        open_models(tmp_path, BaseModelPath("other", tmp_path, "other"), "mine", "default", client.adapters)
    other = open_models(tmp_path, BaseModelPath("other", tmp_path, "other"), "second", "default", client.adapters)
    assert other.registry.names() == ["second", "second@0", "other"]
    assert "--model tiny" in str(await refusal(other, "mine"))
    with pytest.raises(ApiError, match="'tiny'") as caught:
        other.registration.register(RegisterRequest(name="mine", base_model="other"))
    assert caught.value.status == 409


async def test_a_base_may_be_named_by_any_path_to_its_folder(tmp_path: Path, client: ConnectedSampler) -> None:
    base = tmp_path / "base"
    base.mkdir()
    models = open_models(
        tmp_path / "dir", BaseModelPath(str(base), base, str(base)), "default", "default", client.adapters
    )
    state = models.registration.register(RegisterRequest(name="m", base_model=f"{tmp_path}/./base/"))
    assert state.base_model == str(base)


async def test_a_finished_request_is_found_by_its_checkpoint(tmp_path: Path, client: ConnectedSampler) -> None:
    opened(tmp_path, client)
    put_checkpoint(tmp_path, 1, request_id="first")
    models = opened(tmp_path, client)
    put_checkpoint(tmp_path, 2, request_id="saved-not-told")
    assert models.registry.model("default").applied("nobody") is None
    for request_id, step in (("first", 1), ("saved-not-told", 2)):
        checkpoint = models.registry.model("default").applied(request_id)
        assert checkpoint is not None and checkpoint.step == step
        result = checkpoint.result()
        assert result is not None and result.checkpoint == str(checkpoint.path)


# ---- adapters


async def test_a_call_loads_its_step_and_a_second_call_finds_it_loaded(
    tmp_path: Path, client: ConnectedSampler, scripted: ScriptedSampler
) -> None:
    opened(tmp_path, client)
    folder = put_checkpoint(tmp_path, 1)
    models = opened(tmp_path, client)
    async with models.leases.lease("default") as route:
        assert route.adapter == "default@1"
        assert scripted.adapters == {"default@1": str(folder)}
    scripted.adapters.clear()
    async with models.leases.lease("default@1"):
        assert scripted.adapters == {}


async def test_a_new_step_is_loaded_before_the_name_means_it(
    tmp_path: Path, client: ConnectedSampler, scripted: ScriptedSampler
) -> None:
    models = opened(tmp_path, client)
    async with models.leases.lease("default") as before:
        put_checkpoint(tmp_path, 1)
        assert await models.swaps.advance("default", 1) is None
        assert before.step == 0
    assert "default@1" in scripted.adapters
    assert models.registry.resolve("default").step == 1


async def test_old_steps_that_nobody_calls_are_unloaded_and_come_back_on_demand(
    tmp_path: Path, client: ConnectedSampler, scripted: ScriptedSampler
) -> None:
    models = opened(tmp_path, client)
    put_checkpoint(tmp_path, 1)
    await models.swaps.advance("default", 1)
    async with models.leases.lease("default@1"):
        for step in range(2, KEPT_LOADED + 5):
            put_checkpoint(tmp_path, step)
            await models.swaps.advance("default", step)
        assert "default@1" in scripted.adapters  # a call is using it
        assert "default@2" not in scripted.adapters
        assert len(scripted.adapters) == KEPT_LOADED + 2  # the leased and the newest besides
    async with models.leases.lease("default@2"):
        assert "default@2" in scripted.adapters


async def test_a_deletion_waits_for_the_calls_of_its_step(
    tmp_path: Path, client: ConnectedSampler, scripted: ScriptedSampler
) -> None:
    opened(tmp_path, client)
    folder = put_checkpoint(tmp_path, 1)
    put_checkpoint(tmp_path, 2)
    models = opened(tmp_path, client)
    async with models.leases.lease("default@1"):
        deletion = asyncio.create_task(models.swaps.delete("default", 1))
        while "default@1" in models.registry.names():
            await asyncio.sleep(0)
        assert (await refusal(models, "default@1")).status == 404
        assert folder.is_dir() and "default@1" in scripted.adapters and not deletion.done()
    await asyncio.wait_for(deletion, 10)
    assert not folder.exists() and "default@1" not in scripted.adapters


async def test_the_newest_step_and_the_base_are_never_deleted(tmp_path: Path, client: ConnectedSampler) -> None:
    opened(tmp_path, client)
    put_checkpoint(tmp_path, 1)
    models = opened(tmp_path, client)
    for step in (0, 1):
        with pytest.raises(ApiError) as caught:
            await models.swaps.delete("default", step)
        assert caught.value.status == 409
    with pytest.raises(ApiError) as caught:
        await models.swaps.delete("default", 7)
    assert caught.value.status == 404


async def test_a_fork_is_a_model_of_its_own_from_the_step_that_was_asked_for(
    tmp_path: Path, client: ConnectedSampler
) -> None:
    opened(tmp_path, client)
    put_checkpoint(tmp_path, 1, request_id="first")
    put_checkpoint(tmp_path, 2, request_id="second")
    models = opened(tmp_path, client)
    state = await models.registration.fork("default", ForkRequest(name="early", from_step=1))
    assert state.step == 1 and state.checkpoint is not None
    assert (Path(state.checkpoint) / "adapter_model.safetensors").read_bytes() == no_tensors(1)
    note = json.loads((Path(state.checkpoint) / "offbook.json").read_text())
    assert note["model"] == "early" and note["request_id"] is None
    assert note["forked_from"] == {"model": "default", "step": 1}
    assert models.registry.model("early").applied("first") is None
    base = await models.registration.fork("default", ForkRequest(name="fresh", from_step=0))
    assert base.step == 0
    assert opened(tmp_path, client).registry.model("early").step == 1


async def test_a_step_of_a_fork_is_adopted_once_as_the_next_step(tmp_path: Path, client: ConnectedSampler) -> None:
    opened(tmp_path, client)
    put_checkpoint(tmp_path, 1, request_id="first")
    models = opened(tmp_path, client)
    await models.registration.fork("default", ForkRequest(name="learned"))
    put_checkpoint(tmp_path, 2, "learned", request_id="second")
    models = opened(tmp_path, client)
    request = AdoptRequest(model="learned", step=2, after=1)
    state = await models.swaps.adopt("default", request)
    assert (state.step, state.name) == (2, "default") and models.registry.resolve("default").adapter == "default@2"
    assert (await models.swaps.adopt("default", request)).step == 2  # the answer to the first may be lost
    note = json.loads((Path(str(state.checkpoint)) / "offbook.json").read_text())
    assert (note["model"], note["step"], note["request_id"]) == ("default", 2, None)
    assert note["forked_from"] == {"model": "learned", "step": 2}
    assert opened(tmp_path, client).registry.model("default").step == 2
    for wrong, status in ((("learned", 1, 1), 409), (("learned", 9, 2), 404), (("default", 1, 2), 400)):
        with pytest.raises(ApiError) as caught:
            model, step, after = wrong
            await models.swaps.adopt("default", AdoptRequest(model=model, step=step, after=after))
        assert caught.value.status == status
