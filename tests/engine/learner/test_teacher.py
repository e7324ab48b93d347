"""Distillation on policy: what a teacher adds to a step, compared with plain autograd, and what it leaves as it was."""

from __future__ import annotations

import shutil
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from types import MappingProxyType

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from offbook.base.config import LoraOptions, TeacherKL, TrainConfig
from offbook.base.errors import ConfigError, EngineError
from offbook.base.types import TrainResult
from offbook.engine.learner.learner import Learner
from offbook.engine.learner.model.policy import Policy
from offbook.engine.protocol import JobTrajectory, Sample
from tests.engine.learner.jobs import LORA, command, random_groups, sample, write_toy_base

Groups = Sequence[Sequence[JobTrajectory]]
WIDE = LoraOptions(r=4, alpha=8)
TAUGHT = TrainConfig(loss="dapo", learning_rate=1e-2, max_grad_norm=1e9, distill=TeacherKL(teacher="teacher@2"))
ALONE = TAUGHT.model_copy(update={"distill": TeacherKL(teacher="teacher@2", alone=True)})


class Class:
    """A learner with a trained model `teacher` at step 2, of a shape of its own, and a `student` at step 1."""

    def __init__(self, root: Path, policy: Policy) -> None:
        self.root = root
        self.learner = Learner(policy, "toy", lambda _: None)

    def train(
        self, groups: Groups, config: TrainConfig = TAUGHT, step: int = 1, teacher: int | None = 2
    ) -> TrainResult:
        asked = command(self.root, groups, step, config, model="student")
        return self.learner.train(asked.model_copy(update={"teacher": teacher and self.checkpoint("teacher", teacher)}))

    def checkpoint(self, model: str, step: int) -> Path:
        return self.root / model / "checkpoints" / f"{step:04d}"

    def gradient(self, step: int = 2) -> dict[str, Tensor]:
        """The gradient of the student's last step, out of AdamW's moving average."""
        before, after = (load_file(self.checkpoint("student", n) / "optimizer.safetensors") for n in (step - 1, step))
        names = [name for name in after if name.endswith("|exp_avg")]
        beta = TrainConfig().betas[0]
        return {name.removesuffix("|exp_avg"): (after[name] - beta * before[name]) / (1 - beta) for name in names}


class Policies:
    """One policy for learners, one for what is compared with them: loading them takes longer than the steps."""

    def __init__(self, base: Path) -> None:
        self.trained = Policy.load(base, LoraOptions(), dtype=torch.float64, threads=1)
        self.reference = Policy.load(base, LoraOptions(), dtype=torch.float64, threads=1)

    def at(self, checkpoint: Path | None, lora: LoraOptions = LORA) -> Policy:
        """The reference with an adapter of a checkpoint; None: a fresh one, which is the base."""
        self.reference.reset_adapter(lora)
        if checkpoint is not None:
            self.reference.load_adapter(checkpoint)
        return self.reference


@pytest.fixture(scope="module")
def policies(tmp_path_factory: pytest.TempPathFactory) -> Policies:
    return Policies(write_toy_base(tmp_path_factory.mktemp("toy")))


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory, policies: Policies) -> Path:
    root = tmp_path_factory.mktemp("models")
    learner = Learner(policies.trained, "toy", lambda _: None)
    for step in range(2):
        asked = command(root, random_groups(step), step, model="teacher", request_id=f"teacher-{step}")
        learner.train(asked.model_copy(update={"lora": WIDE}))
    learner.train(command(root, random_groups(9), 0, model="student"))
    return root


@pytest.fixture
def room(models: Path, policies: Policies, tmp_path: Path) -> Class:
    shutil.copytree(models, tmp_path / "models")
    return Class(tmp_path / "models", policies.trained)


def logprobs(policy: Policy, call: Sample, before: Sequence[int] = ()) -> Tensor:
    """Of the call's completion, by the whole model on one row."""
    ids = torch.tensor([[*before, *call.prompt_ids.tolist(), *call.completion_ids.tolist()]])
    logits = policy.model(input_ids=ids).logits[0, len(before) + len(call.prompt_ids) - 1 : -1]
    scaled = (logits / call.sampling.temperature).log_softmax(-1)
    return scaled.gather(1, ids[0, -len(call.completion_ids) :, None])[:, 0]


def without_records(groups: Groups) -> list[list[JobTrajectory]]:
    """The groups without the sampler's logprobs, so that no importance weight is in the way."""
    return [
        [
            replace(
                t, samples=tuple(replace(s, logprobs=s.logprobs * float("nan"), constrained=None) for s in t.samples)
            )
            for t in group
        ]
        for group in groups
    ]


def is_taught(
    room: Class,
    policies: Policies,
    groups: Groups,
    teacher: tuple[str, int, LoraOptions] | None = ("teacher", 2, WIDE),
    *,
    rewards: Mapping[str, float] = MappingProxyType({}),
    hint: Sequence[int] = (),
) -> bool:
    """Whether the gradient of the student's second step is plain autograd's of -mean over tokens of
    weight x (advantage of the reward + teacher - student) x logprob. `teacher=None`: the base."""
    calls = [(trajectory.id, call) for group in groups for trajectory in group for call in trajectory.samples]
    shape = LORA if teacher is None else teacher[2]
    with torch.no_grad():
        scorer = policies.at(None if teacher is None else room.checkpoint(*teacher[:2]), shape)
        taught = [logprobs(scorer, call, hint) for _, call in calls]
    student = policies.at(room.checkpoint("student", 1))
    terms: list[Tensor] = []
    for (name, call), wanted in zip(calls, taught, strict=True):
        own = logprobs(student, call)
        terms.append(-call.weight * (rewards.get(name, 0.0) + wanted - own.detach()) * own)
    torch.cat(terms).mean().backward()
    expected = {name: value.grad for name, value in student.trainable_parameters().items() if value.grad is not None}
    found = room.gradient()
    assert found.keys() == expected.keys()
    assert max(float(value.abs().max()) for value in expected.values()) > 1e-3
    return max(float((found[name] - expected[name]).abs().max()) for name in found) < 1e-7


# ---- the gradient


@pytest.mark.parametrize("layout", ["tree", "call_rows"])
def test_the_gradient_is_that_of_the_reverse_kl_per_token_over_several_turns(
    room: Class, policies: Policies, layout: str
) -> None:
    """Rollouts of several turns at several temperatures, without rewards, in groups of any size, one call weighted."""
    groups = without_records(random_groups(5, turns=3))
    groups = [[replace(t, reward=None) for t in groups[0]], groups[1][:1]]
    first = groups[0][0]
    groups[0][0] = replace(first, samples=(replace(first.samples[0], weight=2.0), *first.samples[1:]))
    result = room.train(groups, ALONE.model_copy(update={"layout": layout}))
    assert is_taught(room, policies, groups)
    assert result.metrics["kl/teacher"] != 0
    assert result.metrics["tokens/untaught"] == 0


def test_the_advantage_of_the_rewards_is_added_and_groups_without_spread_are_taught_too(
    room: Class, policies: Policies
) -> None:
    groups = without_records(random_groups(6))
    groups[0] = [replace(t, reward=float(i)) for i, t in enumerate(groups[0][:2])]
    groups[1] = [replace(t, reward=1.0, failed=i == 0) for i, t in enumerate(groups[1])]
    room.train(groups, TAUGHT.model_copy(update={"scale_rewards": False}))
    rewards = {groups[0][0].id: -0.5, groups[0][1].id: 0.5}
    assert is_taught(room, policies, [groups[0], groups[1][1:]], rewards=rewards)


def test_a_hint_stands_before_the_teachers_prompts_only(room: Class, policies: Policies) -> None:
    groups = without_records(random_groups(7))
    distill = TeacherKL(teacher="self", hint="Answer in the form of the third example.", alone=True)
    room.train(groups, TAUGHT.model_copy(update={"distill": distill}), teacher=None)
    template = policies.trained.chat_template
    hint = template.encode(template.render(({"role": "system", "content": distill.hint},), None))
    assert len(hint) > 10
    assert is_taught(room, policies, groups, ("student", 1, LORA), hint=hint)


def test_the_base_is_a_teacher(room: Class, policies: Policies) -> None:
    groups = without_records(random_groups(8))
    room.train(groups, ALONE, teacher=None)
    assert is_taught(room, policies, groups, None)


# ---- what it does to a run


def test_the_student_approaches_its_teacher(room: Class, policies: Policies) -> None:
    call = sample("c", [5, 6], list(range(20, 60)))

    def distance(step: int) -> float:
        with torch.no_grad():
            wanted = logprobs(policies.at(room.checkpoint("teacher", 2), WIDE), call)
            return float((logprobs(policies.at(room.checkpoint("student", step)), call) - wanted).abs().mean())

    config = ALONE.model_copy(update={"max_grad_norm": 1.0})
    for step in range(1, 6):
        room.train([[JobTrajectory("t", None, (call,))]], config, step)
    assert distance(6) < distance(1) / 2


def test_a_step_with_a_teacher_leaves_the_student_as_another_learner_finds_it(room: Class, policies: Policies) -> None:
    room.train(random_groups(3))
    shutil.copytree(room.root, room.root.parent / "other")
    other = Class(room.root.parent / "other", policies.trained)
    room.train(random_groups(4), step=2)
    other.train(random_groups(4), step=2)
    for name in ("adapter_model.safetensors", "optimizer.safetensors", "rng.safetensors"):
        one, two = ((place.checkpoint("student", 3) / name).read_bytes() for place in (room, other))
        assert one == two


def test_tokens_that_say_nothing_of_the_teacher_are_counted_and_have_no_advantage(room: Class) -> None:
    grammar = sample("c0", [5, 6], [10, 11], constrained="response_format")
    free = sample("c1", [5, 6], [12, 13, 14])
    result = room.train([[JobTrajectory("t", None, (grammar, free))]], ALONE)
    assert result.metrics["tokens/untaught"] == 2
    alone = room.train([[JobTrajectory("t", None, (grammar,))]], ALONE, 2)
    assert (alone.applied, alone.no_signal) == (False, "no_advantage")


def test_a_teacher_that_is_the_policy_is_said_to_be_the_same(room: Class) -> None:
    config = TAUGHT.model_copy(update={"distill": TeacherKL(teacher="toy", alone=True)})
    job = [[JobTrajectory("t", None, (sample("c", [5, 6], [10, 11]),))]]
    result = room.learner.train(command(room.root, job, 0, config, model="fresh"))
    assert (result.applied, result.no_signal) == (False, "same_as_teacher"), result.why


def test_a_damaged_teacher_is_named_and_changes_nothing(room: Class) -> None:
    adapter = room.checkpoint("teacher", 2) / "adapter_model.safetensors"
    adapter.write_bytes(adapter.read_bytes()[:-8])
    with pytest.raises(EngineError, match="teacher/checkpoints/0002 is damaged"):
        room.train(random_groups(3))
    assert not room.checkpoint("student", 2).exists()
    assert room.train(random_groups(3), TrainConfig()).step == 2


# ---- options


def test_a_teachers_name_alone_is_the_option() -> None:
    config = TrainConfig.parse(distill="agent@12")
    assert config.distill == TeacherKL(teacher="agent@12")
    assert TrainConfig.model_validate_json(config.model_dump_json()) == config
    with pytest.raises(ConfigError, match="teacher='self' needs a hint"):
        TrainConfig.parse(distill="self")
    with pytest.raises(ConfigError, match="weight"):
        TeacherKL(teacher="agent", weight=0)
