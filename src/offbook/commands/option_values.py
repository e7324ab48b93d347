"""What options that several commands share stand for: the learner's options, a judge, a model, trace sinks."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from offbook.base.config import TrainConfig
from offbook.base.errors import ConfigError
from offbook.client.model import TrainableModel
from offbook.rewards.judge_prompt import DEFAULT_RUBRIC
from offbook.rewards.ruler_judge import Ruler
from offbook.tracing.sink_registry import named_sinks, resolve_sinks

from .generated_options import options_of
from .options import JudgeOptions, ModelOptions


def train_config(options: Mapping[str, Any]) -> TrainConfig:
    """The learner's options among those of a command; `min_reward` chooses the loss that imitates. Raises ConfigError."""
    imitating = {"loss": "cross_entropy"} if options.get("min_reward") is not None else {}
    return TrainConfig.parse(**options_of(TrainConfig, options) | imitating)


def judge_option(options: Mapping[str, Any]) -> dict[str, Any]:
    """The option `judge=`, empty without `--judge`. Raises ConfigError for the judge's other options without it."""
    judge = JudgeOptions(**options_of(JudgeOptions, options))
    if judge.judge is not None:
        return {"judge": Ruler(judge.judge, rubric=_rubric(judge.rubric), api_base=judge.judge_api_base)}
    if (judge.judge_api_base, judge.rubric) != (None, None):
        raise ConfigError("judge_api_base and rubric need --judge too, as in --judge openai/o3")
    return {}


def _rubric(file: Path | None) -> str:
    if file is None:
        return DEFAULT_RUBRIC
    try:
        text = file.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"--rubric: {file} cannot be read: {error}") from error
    if not text.strip():
        raise ConfigError(f"--rubric: {file} is empty")
    return text


def model_option(options: Mapping[str, Any]) -> dict[str, Any]:
    """The option `model=`, empty without `--model` and `--base-model`. Raises ConfigError for one without the other."""
    model = ModelOptions(**options_of(ModelOptions, options))
    if model.model is None and model.base_model is None:
        return {}
    if model.model is None or model.base_model is None:
        option, missing = ("--base-model", "--model") if model.model is None else ("--model", "--base-model")
        raise ConfigError(
            f"{option} needs {missing} too, as in --model email-agent --base-model Qwen/Qwen2.5-7B-Instruct"
        )
    return {"model": TrainableModel(model.model, base_model=model.base_model)}


def sinks_option(trace: str | None) -> dict[str, Any]:
    """The option `sinks=`, empty without `--trace`. Raises ConfigError for an unknown sink."""
    return {} if trace is None else {"sinks": resolve_sinks(named_sinks(trace, "--trace"))}
