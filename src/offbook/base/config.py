"""The options of a step and of a LoRA: name, default, range and meaning, defined once.

Options are pydantic models with `extra="forbid"`: an unknown option is an error that names the right one.
Losses, advantages and layouts never take these objects: their callers pass scalars.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar, Literal, Self
from urllib.parse import parse_qsl, urlsplit

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, FiniteFloat, ValidationError, model_validator

from .errors import ConfigError
from .option_names import unknown_option
from .options import Headline

_MARK = "?api_base="


@dataclass(frozen=True)
class TeacherEndpoint:
    """`model` as the server names it; `root`: the server's URL without /v1, since vLLM's /tokenize lies beside it."""

    model: str
    root: str


def teacher_endpoint(teacher: str) -> TeacherEndpoint | None:
    """The endpoint that a teacher's name means; None for a model of the server that trains. Raises ConfigError.

    >>> teacher_endpoint("openai/big?api_base=http://gpu:8000/v1")
    TeacherEndpoint(model='big', root='http://gpu:8000')
    >>> teacher_endpoint("expert@12") is None
    True
    """
    if _MARK not in teacher:
        return None
    name, _, query = teacher.partition("?")
    provider, _, model = name.partition("/")
    options = dict(parse_qsl(query, keep_blank_values=True))
    root = options.pop("api_base", "").rstrip("/")
    try:
        valid = urlsplit(root).scheme in ("http", "https") and bool(urlsplit(root).hostname)
    except ValueError:  # such as an IPv6 address that does not end
        valid = False
    if provider != "openai" or not model or options or not valid:
        raise ConfigError(
            f"teacher {teacher!r:.300}: write openai/NAME?api_base=URL, with the http URL of a vLLM server"
        )
    return TeacherEndpoint(model, root.removesuffix("/v1"))


RewardLossName = Literal["grpo", "dapo", "dr_grpo", "gspo", "cispo"]
LossName = Literal[RewardLossName, "cross_entropy"]
LayoutName = Literal["auto", "tree", "leaf_rows", "call_rows"]
Decay = Annotated[float, Field(ge=0, lt=1)]
Name = Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]{0,127}$")]
"""Names become folders. They may hold letters, digits, dot, dash and underscore, and start with a letter or digit."""


GROUPS_AT_ONCE = 10_000
"""Limit of groups in one train request."""
MAX_TEMPERATURE = 100.0
"""Upper bound of a temperature: at 100 sampling is practically uniform, so a higher value is a mistake."""


class Options(BaseModel):
    """Base of all option sets. They are immutable.

    Raises ConfigError, which names every invalid field, its value and what is allowed, and for an unknown option the right
    one."""

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)
    heading: ClassVar[str] = "Options"
    """The heading of a class's options in help texts."""

    def __init__(self, **values: Any) -> None:
        try:
            super().__init__(**values)
        except ValidationError as error:
            raise ConfigError(describe(error, type(self).__name__, type(self).model_fields)) from error

    # pydantic then validates a nested set as one of its own models, and its faults keep their place.
    __init__.__pydantic_base_init__ = True  # type: ignore[attr-defined]

    @classmethod
    def parse(cls, **values: Any) -> Self:
        """The constructor, for values whose types are unknown."""
        return cls(**values)


def describe(error: ValidationError, where: str, options: Iterable[str] = ()) -> str:
    """One line per fault of a pydantic error, such as `TrainConfig.loss: Input should be ... (got 'x')`. `options`: the
    names of an option set, for unknown ones."""
    lines: list[str] = []
    for fault in error.errors(include_url=False):
        field = ".".join(str(part) for part in fault["loc"]) or "(whole)"
        if options and fault["type"] == "extra_forbidden" and len(fault["loc"]) == 1:
            lines.append(unknown_option(where, field, options))
        else:
            lines.append(f"{where}.{field}: {fault['msg']} (got {fault['input']!r})")
    return "\n".join(lines)


MAX_RANK = 512
"""Largest LoRA rank. vLLM's own limit is lower."""


class LoraOptions(Options):
    """The LoRA adapter of a model. Its shape is fixed by the model's first step."""

    heading = "LoRA"

    r: Headline[int] = Field(default=8, ge=1, le=MAX_RANK, description="rank of the LoRA matrices")
    alpha: float = Field(default=16.0, gt=0, description="scale: the weight update is alpha / r * B @ A")
    dropout: float = Field(
        default=0.0,
        ge=0,
        lt=1,
        description="dropout on the adapter's input; above 0, the learner's logprobs differ from the sampler's",
    )
    target_modules: str | tuple[str, ...] = Field(
        default="all-linear", description="layers that get an adapter, as PEFT names them"
    )
    seed: int = Field(default=0, ge=0, lt=2**63, description="seed of the adapter's initial weights")


SELF = "self"
"""The teacher that is the trained model itself, at its current step and with a hint."""


class TeacherKL(Options):
    """On-policy distillation: a teacher scores each token that the policy sampled. It adds the advantage weight x
    (teacher's logprob - policy's logprob), the negative reverse KL of one sample. Sources (arXiv): GKD 2306.13649,
    MiniLLM 2306.08543."""

    teacher: str = Field(
        min_length=1,
        max_length=400,
        description="a model of the same server, such as agent@12; the base, by its name; self (needs a hint); or "
        "openai/NAME?api_base=URL, a vLLM server with the same tokenizer",
    )
    weight: float = Field(default=1.0, gt=0, le=1000, description="weight of its advantage")
    alone: bool = Field(default=False, description="learn from the teacher alone; rewards are neither needed nor used")
    hint: str | None = Field(
        default=None,
        min_length=1,
        max_length=20_000,
        description="system message before each prompt that only the teacher reads",
    )

    @model_validator(mode="after")
    def _different_from_the_policy(self) -> Self:
        if self.teacher == SELF and self.hint is None:
            raise ValueError(
                "teacher='self' needs a hint: without one, teacher and policy are the same. Say in hint= what would "
                "help"
            )
        try:
            teacher_endpoint(self.teacher)
        except ConfigError as error:
            raise ValueError(str(error)) from error
        return self

    @property
    def endpoint(self) -> TeacherEndpoint | None:
        """The vLLM server of the teacher; None for a teacher on the server that trains."""
        return teacher_endpoint(self.teacher)


def _named_teacher(value: Any) -> Any:
    return {"teacher": value} if isinstance(value, str) else value


class UpdateOptions(Options):
    """What the updates of all losses have in common."""

    heading = "Learner"

    kl_coef: float = Field(
        default=0.0, ge=0, le=100, description="weight of the KL divergence to the base model (k3 estimate)"
    )
    max_grad_norm: float = Field(default=1.0, gt=0, description="gradients are clipped to this global norm")
    betas: tuple[Decay, Decay] = Field(default=(0.9, 0.99), description="AdamW's moment decay rates")
    weight_decay: float = Field(default=0.0, ge=0, le=1, description="AdamW's weight decay")
    layout: LayoutName = Field(
        default="auto", description="how calls become rows; auto: the layout with the lowest estimated cost"
    )
    row_tokens: int = Field(
        default=16_384,
        ge=64,
        lt=2**31,
        description="most tokens in one forward and backward pass; larger trees are split",
    )


class TrainConfig(UpdateOptions):
    """Options of one train request. Sources (arXiv): PPO 1707.06347, GRPO 2402.03300, DAPO 2503.14476,
    Dr. GRPO 2503.20783, GSPO 2507.18071, CISPO 2506.13585."""

    heading = "Learner"

    learning_rate: Headline[float] = Field(default=1e-5, gt=0, le=1, description="learning rate of AdamW after warm-up")
    loss: LossName = Field(
        default="grpo", description="policy-gradient loss; cross_entropy imitates; it compares no rewards"
    )
    epsilon: float = Field(default=0.2, ge=0, le=10, description="lower clip range of the ratio: 1 - epsilon")
    epsilon_high: float | None = Field(
        default=None, ge=0, le=1000, description="upper clip range; None: 0.28 for dapo, 4.0 for cispo, else epsilon"
    )
    scale_rewards: bool = Field(
        default=True, description="divide advantages by the group's standard deviation (never in dr_grpo)"
    )
    call_rewards: bool = Field(
        default=False,
        description="one advantage per call, from the rewards that log_reward added after it (2402.03300, section "
        "4.1.3)",
    )
    sequence: Literal["trajectory", "call"] = Field(
        default="trajectory", description="what gspo's ratio covers: the whole trajectory or one call"
    )
    distill: Annotated[TeacherKL | None, BeforeValidator(_named_teacher)] = Field(
        default=None,
        description="teacher whose logprobs of the sampled tokens are learned: a TeacherKL, or the teacher's name",
    )
    importance_cap: float | None = Field(
        default=2.0,
        gt=0,
        description="C in min(old / sampler, C), the truncated importance weight; None: no importance weight",
    )
    max_tokens: int = Field(
        default=2048, ge=1, lt=2**31, description="dr_grpo's constant divisor per trajectory, in tokens"
    )
    divisor: Literal["tokens", "messages", "trajectories"] | Annotated[float, Field(gt=0)] | None = Field(
        default=None,
        description="with cross_entropy: tokens (mean over the step's tokens), messages or trajectories (mean over each "
        "one's tokens, then over all), or a number to divide by; None: trajectories with min_reward, else tokens",
    )
    mask_truncated_completions: bool = Field(
        default=False,
        description="leave rollouts out of the loss if a call ended at the limit of tokens; their rewards stay in the "
        "group's mean (DAPO's overlong filtering)",
    )
    turns: Literal["all", "last"] = Field(
        default="all", description="with cross_entropy: which assistant turns of a trajectory are trained"
    )
    skip_bad: bool = Field(
        default=False,
        description="with cross_entropy: skip and count messages that are too long or that the chat template rejects",
    )
    min_reward: FiniteFloat | None = Field(
        default=None, description="with cross_entropy: imitate only rollouts with at least this reward; None: all"
    )
    epochs: int = Field(default=1, ge=1, le=64, description="passes over the step's samples")
    minibatches: int = Field(
        default=1, ge=1, le=1024, description="optimizer updates per epoch; trajectories are assigned round robin"
    )
    warmup_updates: int = Field(
        default=0, ge=0, description="optimizer updates of linear warm-up, counted from the model's first step"
    )
    min_group_size: int = Field(
        default=2, ge=2, description="groups with fewer scored rollouts are dropped and counted"
    )
    logits_chunk: int = Field(default=512, ge=1, lt=2**31, description="targets whose logits are in memory at once")
    overlap: bool = Field(
        default=False, description="run rollouts of the next step during the update (Trainer; needs importance_cap)"
    )
    max_staleness: int = Field(
        default=1,
        ge=0,
        le=62,
        description="with overlap: greatest age of a trained rollout, in steps; at least 1",
    )
    kl_warn: float = Field(
        default=0.02, gt=0, description="the step warns if the KL between sampler and learner is above this, per token"
    )
    rendered_warn: float = Field(
        default=0.0,
        ge=0,
        le=1,
        description="the step warns if more than this share of its calls was rendered from messages instead of "
        "recorded; 1: never",
    )
    seed: int = Field(default=0, ge=0, lt=2**63, description="seed of the step's random numbers: the adapter's dropout")

    @model_validator(mode="after")
    def _without_teacher(self) -> Self:
        if self.supervised and self.distill is not None:
            raise ValueError("distill changes advantages, and loss='cross_entropy' has none: use one of the two")
        return self

    @model_validator(mode="after")
    def _imitating(self) -> Self:
        if self.min_reward is not None and not self.supervised:
            raise ValueError("min_reward chooses what loss='cross_entropy' imitates: leave it out, or set that loss")
        if self.min_reward is not None and self.overlap:
            raise ValueError("overlap=True needs a policy-gradient loss: min_reward= imitates rollouts of any step")
        return self

    @model_validator(mode="after")
    def _corrected_overlap(self) -> Self:
        if self.overlap and self.importance_cap is None:
            raise ValueError(
                "overlap=True needs importance_cap, which corrects for rollouts of earlier steps: set it to a "
                "number such as 2.0, not None"
            )
        if self.overlap and self.max_staleness == 0:
            raise ValueError(
                "overlap=True with max_staleness=0 leaves nothing to overlap: allow 1 step or more, or overlap=False"
            )
        return self

    @property
    def supervised(self) -> bool:
        """Whether the step imitates its trajectories. It then computes no advantages."""
        return self.loss == "cross_entropy"

    @property
    def imitates_the_good(self) -> bool:
        """Whether the step imitates those of its rollouts that have a high reward."""
        return self.min_reward is not None

    @property
    def imitation_divisor(self) -> Literal["tokens", "messages", "trajectories"] | float:
        """`divisor`, or its default."""
        if self.divisor is not None:
            return self.divisor
        return "trajectories" if self.imitates_the_good else "tokens"

    @property
    def upper_clip(self) -> float:
        """`epsilon_high`, or its default for the loss."""
        if self.epsilon_high is not None:
            return self.epsilon_high
        return {"dapo": 0.28, "cispo": 4.0}.get(self.loss, self.epsilon)


class SFTConfig(UpdateOptions):
    """Options of supervised training (`train_sft`). Each batch is one train request with loss="cross_entropy"."""

    heading = "Training"

    epochs: Headline[int] = Field(default=1, ge=1, le=1000, description="passes over the examples")
    batch_size: Headline[int] = Field(default=8, ge=1, le=GROUPS_AT_ONCE, description="examples per update")
    learning_rate: Headline[float | tuple[float, ...]] = Field(
        default=2e-4,
        description="learning rate of AdamW after warm-up; in Python also a tuple of rates, one per update, the last "
        "for all that follow",
    )
    schedule: Literal["cosine", "linear", "constant"] = Field(
        default="cosine", description="learning rate after warm-up: cosine and linear fall to 0"
    )
    warmup: float = Field(default=0.05, ge=0, lt=1, description="share of the updates in which the rate rises linearly")
    turns: Literal["all", "last"] = Field(default="all", description="assistant turns to train")
    divisor: Literal["tokens", "messages"] | Annotated[float, Field(gt=0)] = Field(
        default="tokens",
        description="mean over the tokens of a batch, mean over its messages, or a number to divide by",
    )
    held_out: float = Field(
        default=0.0, ge=0, lt=1, description="share of the examples to hold out: they are measured, not trained"
    )
    evaluate_every: int | None = Field(
        default=None, ge=1, description="updates between measurements of the held-out loss; None: an epoch"
    )
    patience: int | None = Field(
        default=None, ge=1, description="stop after this many measurements without a lower held-out loss; None: never"
    )
    skip_bad: bool = Field(default=False, description="skip and count examples and messages that cannot be trained")
    shuffle: bool = Field(default=True, description="shuffle the examples in each epoch")
    seed: int = Field(
        default=0, ge=0, lt=2**63, description="random seed for the order, the held-out examples and dropout"
    )

    @model_validator(mode="after")
    def _checked(self) -> Self:
        rates = self.learning_rate if isinstance(self.learning_rate, tuple) else (self.learning_rate,)
        if not rates or not all(0 < rate <= 1 for rate in rates):
            raise ValueError(f"learning_rate: rates above 0 and up to 1 are needed, got {self.learning_rate!r}")
        if self.patience is not None and not self.held_out:
            raise ValueError("patience counts measurements of held-out examples: give a held_out share, such as 0.1")
        return self
