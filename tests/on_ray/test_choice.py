"""Engines that a server has on a Ray cluster: what is asked of it, and what goes together with it."""

from __future__ import annotations

from pathlib import Path

import pytest

from offbook import tiny
from offbook.base.errors import ConfigError, MissingExtraError
from offbook.base.server_options import EngineOptions
from offbook.server.base_model import BaseModelPath
from offbook.server.sampler.engine_choice import choose
from offbook.server.sampler.pool import SamplerPool
from offbook_ray.actor_process import RayPlacement
from offbook_ray.ray_sampler import RaySampler
from tests.server.sampler.cards import GIB, H100


def test_on_ray_every_replica_is_vllm_with_gpus_that_ray_chooses_and_the_learner_keeps_its_own(
    driver, tmp_path: Path
) -> None:
    driver(H100.format(index=0, free=60 * GIB), H100.format(index=1, free=60 * GIB))
    options = EngineOptions(cluster="ray", replicas=3, tensor_parallel=2, max_batch=7)
    engine = choose(options, "tiny", trains=True)
    assert (engine.name, engine.sharing, engine.options.train_gpus) == ("vllm", None, (0,))
    assert (engine.options.device, engine.quirks.no_seed) == ("cuda", False)
    assert engine.described() == "vLLM, 3 on the Ray cluster auto"
    pool = engine.sampler(BaseModelPath("tiny", tiny.path(), "reference"), tmp_path / "sampler.log")
    assert isinstance(pool, SamplerPool) and [member.shares_gpu for member in pool.members] == [False] * 3
    member = pool.members[1]
    assert isinstance(member, RaySampler)
    assert member._placement == RayPlacement("auto", gpus=2, cpus=1, taken=frozenset({0}))
    remote = member._engine()
    assert (remote.module, remote.base) == ("offbook.engine.inference.vllm.command", "tiny")
    assert remote.words[:4] == ("--model", "{base}", "--served-model-name", "base")
    assert remote.words[10:16] == ("--device", "cuda", "--dtype", "auto", "--max-batch", "7")
    on_cpu = choose(EngineOptions(cluster="ray", device="cpu"), "tiny", trains=True)
    assert on_cpu.quirks.no_seed and on_cpu.options.train_gpus == ()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"inference_gpus": (0,)}, "inference_gpus: the cluster chooses the GPUs"),
        ({"gpus": "auto"}, "gpus: the cluster chooses the GPUs"),
        ({"memory_layout": "offload"}, "memory_layout: the cluster chooses the GPUs"),
        ({"vllm_url": ("http://a:1",)}, "vllm_url: a cluster does not place vLLM servers"),
        ({"engine": "embedded"}, "cluster: it runs replicas of vLLM"),
    ],
)
def test_what_ray_decides_cannot_be_set_beside_it(options: dict[str, object], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        EngineOptions.parse(cluster="ray", **options)


def test_learners_on_ray_leave_the_sampler_where_it_is(driver) -> None:
    driver()
    embedded = choose(EngineOptions(engine="embedded", cluster="ray", cluster_learners=2), "tiny", trains=True)
    assert embedded.described() == "embedded, 2 more learners on the Ray cluster auto"
    running = choose(EngineOptions.parse(vllm_url="http://a:1", cluster="ray", cluster_learners=2), "tiny", trains=True)
    assert running.described() == "vLLM, already running at http://a:1, 2 more learners on the Ray cluster auto"
    both = choose(EngineOptions(cluster="ray", cluster_learners=3, device="cpu"), "tiny", trains=True)
    assert both.described() == "vLLM, 1 on the Ray cluster auto, 3 more learners on the Ray cluster auto"


def test_learners_on_ray_need_a_cluster() -> None:
    with pytest.raises(ConfigError, match=r"cluster_learners: name the cluster with cluster \(got 1\)"):
        EngineOptions.parse(cluster_learners=1)


def test_without_ray_the_option_names_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("offbook_ray.cluster.find_spec", lambda name: None)
    with pytest.raises(MissingExtraError, match="ray"):
        choose(EngineOptions(cluster="ray"), "tiny", trains=True)
