"""Arguments of other trainers: those with an equivalent here are converted, with a warning; the others name what to use."""

from __future__ import annotations

import logging
import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, cast

from offbook.base.config import SFTConfig
from offbook.base.errors import ConfigError
from offbook.base.types import TrajectoryGroup

logger = logging.getLogger("offbook")

_SERIALISED = (
    "`model.name`, `model.project` and `model.config` describe it; as a field of a pydantic model it is written by name"
)
_COSTS = "costs of other LLMs are counted by offbook.Ruler and offbook.compare; log others with `await model.log(metrics={...})`"
MODEL_ATTRIBUTES = {
    **dict.fromkeys(("model_dump", "model_dump_json", "safe_model_dump", "model_copy"), _SERIALISED),
    **dict.fromkeys(("metrics_builder", "activate_metrics_context", "cost_calculator", "set_cost_calculator"), _COSTS),
    "backend": "only a TrainableModel has one",
    "base_path": "the folder is LocalBackend(dir=...)'s",
    "entity": "there is only `model.project`",
    "id": "its identity is `model.name`",
    "report_metrics": "pass sinks=['wandb'] to the Trainer, see docs/wandb.md",
    "run_id": "its identity is `model.name`",
    "update_wandb_config": "pass sinks=['wandb'] to the Trainer, see docs/wandb.md",
    "write_state": "use `await model.overwrite_state(state)`",
}
"""Attribute of OpenPipe ART's models that ours do not have -> what to use."""
_CONVERTED = {
    "init_args": {"max_seq_length": "max_model_len", "load_in_4bit": "load_in_4bit", "dtype": "dtype"},
    "engine_args": {
        "dtype": "dtype",
        "max_loras": "max_loras",
        "max_lora_rank": "max_lora_rank",
        "max_model_len": "max_model_len",
        "max_num_seqs": "max_batch",
    },
    "peft_args": {
        "lora_alpha": "alpha",
        "lora_dropout": "dropout",
        "r": "r",
        "random_state": "seed",
        "target_modules": "target_modules",
    },
    "": {"inference_gpu_ids": "inference_gpus", "trainer_gpu_ids": "train_gpus"},
}
"""Part of OpenPipe ART's `dev.InternalModelConfig` -> its option -> the option of EngineOptions, or for `peft_args` of
LoraOptions. "" is the top level."""
_NO_EFFECT = {
    "init_args": "device_map disable_log_stats enable_prefix_caching fast_inference float8_kv_cache gpu_memory_utilization "
    "max_lora_rank random_state token use_async use_gradient_checkpointing",
    "engine_args": "disable_log_requests disable_log_stats enable_lora enable_sleep_mode generation_config model seed",
    "peft_args": "bias init_lora_weights max_seq_length temporary_location use_gradient_checkpointing",
    "": "allow_unvalidated_arch rollout_weights_mode",
}
"""Options of the same parts that change no result here: the memory plan, the server or the environment decides."""
_STEP_CONVERTED: dict[str, dict[object, str]] = {
    "loss_fn": {"cispo": "cispo", "ppo": "grpo"},
    "ppo": {True: "grpo", False: "cispo"},
    "importance_sampling_level": {"sequence": "gspo"},
}
"""Option of a step in ART -> its value -> the `loss` here."""
_STEP_RENAMED = {"normalize_advantages": "scale_rewards", "truncated_importance_sampling": "importance_cap"}
_STEP_NO_EFFECT = (
    "allow_training_without_logprobs",
    "logprob_calculation_chunk_size",
    "moe_routing_replay_path",
    "packed_sequence_length",
    "plot_tensors",
    "precalculate_logprobs",
    "save_checkpoint",
)
_STEP_DEFAULTS = {
    "adam_params": None,
    "advantage_balance": 0.0,
    "importance_sampling_level": "token",
    "kimi_k2_tau": None,
    "kl_penalty_reference_step": None,
    "kl_ref_adapter_path": None,
    "loss_fn_config": None,
    "mask_prob_ratio": False,
    "max_negative_advantage_importance_sampling_weight": None,
    "num_trajectories_learning_rate_multiplier_power": 0.0,
    "scale_learning_rate_by_reward_std_dev": False,
}
"""Options of a step in ART without an equivalent here, with the value that changes nothing."""
STEP_OPTIONS = {*_STEP_CONVERTED, *_STEP_RENAMED, *_STEP_NO_EFFECT, *_STEP_DEFAULTS}


@dataclass
class InternalConfig:
    """ART's `dev.InternalModelConfig` in this package's options. `unused`: options without effect here, by their path."""

    lora: dict[str, object] = field(default_factory=dict[str, object])
    engine: dict[str, object] = field(default_factory=dict[str, object])
    unused: list[str] = field(default_factory=list[str])

    def __str__(self) -> str:
        engine = ", ".join(f"{name}={value!r}" for name, value in self.engine.items())
        lora = ", ".join(f"{name}={value!r}" for name, value in self.lora.items())
        taken = [f"LocalBackend({engine})"] * bool(engine) + [f"lora=LoraOptions({lora})"] * bool(lora)
        unused = f"; no effect here: {', '.join(self.unused)}" if self.unused else ""
        return (" and ".join(taken) or "nothing") + unused


def internal_config(config: object) -> InternalConfig:
    """Convert ART's `_internal_config`. Raises ConfigError for an option that has no equivalent and would change results."""
    taken, parts = InternalConfig(), _mapping(config, "_internal_config")
    top = {name: value for name, value in parts.items() if name not in _CONVERTED}
    for part, options in {**{name: parts[name] for name in _CONVERTED if name in parts}, "": top}.items():
        for name, value in _mapping(options or {}, part).items():
            path = f"{part}.{name}".lstrip(".")
            if own := _CONVERTED[part].get(name):
                if value is not None:
                    (taken.lora if part == "peft_args" else taken.engine)[own] = value
            elif name in _NO_EFFECT[part].split():
                taken.unused.append(path)
            elif part == "engine_args":
                cast(dict[str, object], taken.engine.setdefault("engine_args", {}))[name] = value
            elif value:
                hint = "pass its options to train(), as TrainConfig(...)" if name == "trainer_args" else "leave it out"
                raise ConfigError(f"_internal_config: {path} has no equivalent here (got {value!r:.80}): {hint}")
    return taken


def step_options(options: Mapping[str, object], where: str) -> dict[str, object]:
    """Convert a step's options of ART to those of TrainConfig, and log what is used instead. Names of TrainConfig stay.

    Raises ConfigError for an option that has no equivalent and would change results.
    """
    taken: dict[str, object] = {}
    converted: list[str] = []
    unused: list[str] = []
    for name, value in options.items():
        if name in _STEP_CONVERTED and value in _STEP_CONVERTED[name]:
            taken["loss"] = _STEP_CONVERTED[name][value]
            converted.append(f"{name}={value!r} as loss={taken['loss']!r}")
        elif name in _STEP_RENAMED:
            taken[_STEP_RENAMED[name]] = value
            converted.append(f"{name} as {_STEP_RENAMED[name]}={value!r}")
        elif name in _STEP_NO_EFFECT:
            unused.append(name)
        elif name not in STEP_OPTIONS:
            taken[name] = value
        elif name not in _STEP_DEFAULTS or value != _STEP_DEFAULTS[name]:
            raise ConfigError(f"{where}: {name}={value!r} has no equivalent here: leave it out")
    used = converted + ([f"without effect here: {', '.join(unused)}"] if unused else [])
    if used:
        logger.warning("%s: OpenPipe ART's options are taken %s", where, "; ".join(used))
    return taken


def sft_config(config: SFTConfig | Mapping[str, object] | None, options: Mapping[str, object]) -> SFTConfig:
    """Build one SFTConfig from `config` or `options`. OpenPipe ART's `verbose`, `log_metrics` and an empty `_config` have no
    effect. Raises ConfigError for both, and for an invalid or unknown option."""
    own = {name: value for name, value in options.items() if name not in ("verbose", "log_metrics")}
    if own.get("_config") in (None, {}):
        own.pop("_config", None)
    if config is not None and own:
        SFTConfig.parse(**own)
        raise ConfigError(f"give either config= or single options, not both (got config and {sorted(own)})")
    if isinstance(config, SFTConfig):
        return config
    return SFTConfig.parse(**(own if config is None else _mapping(config, "config")))


def _mapping(value: object, where: str) -> Mapping[str, Any]:
    if not isinstance(value, Mapping):
        raise ConfigError(f"{where}: a dict of options is needed, got {value!r:.80}")
    return cast(Mapping[str, Any], value)


def local_folder(dir: str | os.PathLike[str] | None, options: dict[str, object]) -> str | os.PathLike[str] | None:
    """The directory of a LocalBackend, also from OpenPipe ART's `path`.

    Removes `path` and `in_process` from `options`, and logs what is used instead. Raises ConfigError for two directories.
    """
    path = cast("str | os.PathLike[str] | None", options.pop("path", None))
    in_process = options.pop("in_process", False)
    if path is not None and dir is not None:
        raise ConfigError(f"LocalBackend: give the directory once, as dir= or as path= (got {dir!r} and {path!r})")
    used = [f"path={path!r} is dir= here"] if path is not None else []
    used += ["in_process=True has no effect, since the server is always a process of its own"] if in_process else []
    if used:
        logger.warning("LocalBackend: %s", "; ".join(used))
    return path if dir is None else dir


def groups_of(groups: Iterable[TrajectoryGroup] | None, options: dict[str, object]) -> Iterable[TrajectoryGroup]:
    """Return the groups of a step, also from OpenPipe ART's argument `trajectory_groups`.

    Removes `trajectory_groups` and `verbose`, which has no effect here, from `options`. Raises ConfigError when the groups
    are passed twice or not at all.
    """
    options.pop("verbose", None)
    named = cast("Iterable[TrajectoryGroup] | None", options.pop("trajectory_groups", None))
    if groups is not None and named is not None:
        raise ConfigError("groups: give the groups once, as `groups` or as `trajectory_groups`")
    chosen = named if groups is None else groups
    if chosen is None:
        raise ConfigError("groups: a step needs a list of TrajectoryGroups")
    return chosen
