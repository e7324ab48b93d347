"""The teacher of distillation on policy: its logprobs of the tokens that the policy sampled, as they were recorded."""

# pyright: reportUnknownMemberType=false
# torch and transformers are only partly typed

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray

from offbook.base.errors import ConfigError

from .. import checkpoint_files
from ..chat_template import PromptError
from .model.policy import Policy
from .targets.batch import TrainBatch
from .update.row_pass import Scores, TeacherScores


def load_teacher(policy: Policy, checkpoint: Path) -> None:
    """Give the policy the adapter of a checkpoint of the same base, of any shape. Raises EngineError, StoreError for a
    damaged or unreadable one."""
    lora = checkpoint_files.read(checkpoint).note.lora
    if policy.lora != lora:
        policy.reset_adapter(lora)
    policy.load_adapter(checkpoint)


def with_hint(batch: TrainBatch, hint: str, policy: Policy) -> TrainBatch:
    """The batch with `hint` as a system message before each prompt. The targets are the same. Raises ConfigError if the
    chat template cannot render such a message alone."""
    template = policy.chat_template
    try:
        text = template.render(({"role": "system", "content": hint},), None)
    except PromptError as error:
        raise ConfigError(
            f"distill.hint: this base's chat template has no place for a system message: {error}"
        ) from error
    ids = np.array(template.encode(text), np.int32)
    start = policy.tokenizer.bos_token_id

    def hinted(prompt: NDArray[np.int32]) -> NDArray[np.int32]:
        twice = len(prompt) > 0 and len(ids) > 0 and ids[0] == prompt[0] == start
        return np.concatenate([ids, prompt[1:] if twice else prompt])

    samples = tuple(replace(sample, prompt_ids=hinted(sample.prompt_ids)) for sample in batch.samples)
    return replace(batch, samples=samples)


def teacher_scores(scores: Scores, batch: TrainBatch, weight: float) -> TeacherScores:
    """The teacher's scores as the step takes them: NaN where its kept set excludes the token and for constrained calls."""
    usable = scores.kept & ~torch.from_numpy(batch.constrained)
    of_calls = np.array([sample.weight for sample in batch.samples], np.float64)
    return TeacherScores(
        torch.where(usable, scores.logprobs, torch.nan), weight * torch.from_numpy(of_calls[batch.call])
    )
