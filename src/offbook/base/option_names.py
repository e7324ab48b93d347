"""What to write instead of an option that does not exist: our name for another library's option, the object that takes the
option, or the closest name."""

from __future__ import annotations

import functools
import importlib
import inspect
from collections.abc import Callable, Collection, Iterable
from difflib import get_close_matches
from typing import Any, ParamSpec, TypeVar, cast

from .errors import ConfigError

P = ParamSpec("P")
R = TypeVar("R")

_TRAINERS = "Trainer(), MCPTrainer() or app.train()"
OWNERS = {
    f"config=TrainConfig({{}}=...) in {_TRAINERS}": ("offbook.base.config:TrainConfig",),
    "lora=LoraOptions({}=...) in TrainableModel()": ("offbook.base.config:LoraOptions",),
    f"{{}}=... in {_TRAINERS}": ("offbook.trainer.options:TrainerOptions",),
    "{}=... in train()": ("offbook.trainer.trainer:Trainer.train",),
    "{}=... in evaluate()": ("offbook.trainer.trainer:Trainer.evaluate",),
    "{}=... in LocalBackend()": ("offbook.client.local:LocalBackend", "offbook.base.server_options:EngineOptions"),
    "{}=... in RemoteBackend()": ("offbook.client.backend:RemoteBackend",),
    "{}=... in TrainableModel()": ("offbook.client.model:TrainableModel",),
    "{}=... in model.train()": ("offbook.client.model:TrainableModel.train",),
    "{}=... in trainable()": ("offbook_langgraph.training.rollout:TrainableOptions",),
    "{}=... in MCPTrainer()": ("offbook_mcp.training.mcp_trainer:MCPTrainerArguments",),
    f"judge=Ruler({{}}=...) in {_TRAINERS}": ("offbook.rewards.ruler_judge:Ruler",),
}
"""Where an option belongs -> the classes and functions that have it. One that several have belongs to the first of them."""


@functools.cache
def owned_options() -> dict[str, list[str]]:
    """Where options belong -> their names. Imports what has them, so it is for errors only; what is not installed has none."""
    owned: dict[str, list[str]] = {}
    for place, references in OWNERS.items():
        names = [name for reference in references for name in _options_of(reference)]
        known = {name for others in owned.values() for name in others}
        owned[place] = [name for name in names if name not in known]
    return owned


def _options_of(reference: str) -> list[str]:
    module, _, path = reference.partition(":")
    try:
        owner: Any = functools.reduce(getattr, path.split("."), importlib.import_module(module))
    except ImportError:
        return []
    parameters = inspect.signature(owner).parameters.values()
    return [
        item.name
        for item in parameters
        if item.name != "self" and item.kind not in (item.VAR_KEYWORD, item.VAR_POSITIONAL)
    ]


_LITELLM = {
    "base_url": "api_base",
    "cache_responses": "cache",
    "caching": "cache",
    "max_cost": "`with llms.budget(max_cost):`, or Trainer(max_cost=)",
    "max_retries": "retries",
    "num_retries": "retries",
    "price": "prices",
    "request_timeout": "timeout",
    "response_format": "ask(messages, schema)",
    "messages": "ask(messages, ...)",
    "n": "ask(..., sample=0), ask(..., sample=1), ...",
    "no-log": "nothing: prompts are not logged",
    "stream": "nothing: answers are read whole",
    "fallbacks": "an Llm for each model",
    "drop_params": "only parameters that the model takes",
    "mock_response": "offbook.testing",
    "input_cost_per_token": "prices",
    "output_cost_per_token": "prices",
}
"""Parameters of litellm that are not passed on."""

NO_COUNTERPART = [
    "advantage_balance",
    "kimi_k2_tau",
    "mask_prob_ratio",
    "delta",
    "entropy_coef",
    "top_entropy_quantile",
    "off_policy_mask_threshold",
    "sync_ref_model",
    "use_kl_in_reward",
    "entropy_coeff",
    "clip_ratio_c",
    "filter_groups",
]

FOREIGN: dict[str, str] = {
    # common names
    "batch_size": "scenarios_per_step, and group_size= rollouts of each",
    "rank": "r",
    "rollouts": "group_size",
    # OpenPipe ART
    "_config": "config=TrainConfig(...)",
    "_internal_config": "TrainableModel(lora=LoraOptions(...)) and LocalBackend(max_model_len=..., engine_args={...})",
    "_openai_client_config": "LocalBackend(max_model_len=..., engine_args={...})",
    "base_path": "dir",
    "base_url": "RemoteBackend(url)",
    "beta": "kl_coef",
    "entity": "project",
    "grad_accumulation_sequences": "row_tokens",
    "importance_sampling_level": 'loss="gspo", with sequence="trajectory" or "call"',
    "inference_gpu_ids": "inference_gpus",
    "in_process": "nothing: the server is always a process of its own",
    "init_args": "LocalBackend(max_model_len=..., ...)",
    "kl_penalty_coef": "kl_coef",
    "logprob_calculation_chunk_size": "logits_chunk",
    "loss_fn": "loss",
    "max_batch_exceptions": "max_exceptions=..., which holds for each batch",
    "max_concurrent_batches": "prefetch, one less: it counts the batches beside the one in use",
    "normalize_advantages": "scale_rewards",
    "num_trajectories_learning_rate_multiplier_power": "learning_rate",
    "path": "dir",
    "pbar_total_completion_tokens": "nothing: the bar counts rollouts",
    "peft_args": "lora=LoraOptions(r=..., alpha=...) in TrainableModel()",
    "ppo": 'loss="grpo" (PPO\'s clip) or loss="cispo"',
    "remote_server_url": "RemoteBackend(url)",
    "report_metrics": "log(), and a trace sink",
    "run_id": "name",
    "run_name": "name",
    "skip_batches": "groups[skipped * batch_size:] as the groups",
    "trainer_gpu_ids": "train_gpus",
    "truncated_importance_sampling": "importance_cap",
    "use_tqdm": "nothing: there is no bar",
    # TRL
    "args": "config",
    "chat_template_kwargs": "the field of the call that the rollout makes",
    "environment_factory": "your own agent as the rollout",
    "eval_dataset": "eval",
    "generation_batch_size": "scenarios_per_step",
    "gradient_accumulation_steps": "minibatches",
    "lora_alpha": "alpha",
    "loss_type": "loss",
    "max_completion_length": "max_completion_tokens",
    "lr_scheduler_type": "a function of the step as config=",
    "max_steps": "steps",
    "min_p": "the field of the call that the rollout makes",
    "num_generations": "group_size",
    "num_iterations": "epochs",
    "peft_config": "lora",
    "quantization_config": "load_in_4bit",
    "report_to": "sinks",
    "resume_from_checkpoint": "the same call again, which resumes",
    "reward_funcs": "reward",
    "reward_weights": "weighted(parts, weights) as reward=",
    "rollout_func": "your own agent as the rollout",
    "save_steps": "nothing: every step is a checkpoint",
    "steps_per_generation": "minibatches",
    "top_k": "the field of the call that the rollout makes",
    "top_p": "the field of the call that the rollout makes",
    "train_dataset": "scenarios",
    "use_vllm": 'LocalBackend(engine="vllm")',
    "vllm_enable_sleep_mode": "memory_layout",
    "vllm_gpu_memory_utilization": "engine_args",
    "vllm_importance_sampling_clip_max": "importance_cap",
    "vllm_importance_sampling_mode": "importance_cap",
    "vllm_mode": 'LocalBackend(engine="vllm"), or vllm_url=',
    # verl
    "adv_estimator": "nothing: it is always grpo",
    "clip_ratio_high": "epsilon_high",
    "clip_ratio_low": "epsilon",
    "custom_reward_function": "reward",
    "experiment_name": "name",
    "grad_clip": "max_grad_norm",
    "kl_loss_coef": "kl_coef",
    "kl_loss_type": "kl_coef",
    "logger": "sinks",
    "lora_rank": "r",
    "loss_agg_mode": "loss",
    "loss_mode": "loss",
    "lr": "learning_rate",
    "lr_warmup_steps": "warmup_updates",
    "max_num_seqs": "max_batch",
    "max_prompt_length": "max_model_len",
    "max_response_length": "max_completion_tokens",
    "multi_turn": "your own agent as the rollout",
    "norm_adv_by_std_in_grpo": "scale_rewards",
    "ppo_epochs": "epochs",
    "ppo_max_token_len_per_gpu": "row_tokens",
    "ppo_mini_batch_size": "minibatches",
    "project_name": "project",
    "resume_mode": "nothing: running again always resumes",
    "reward_model": "judge",
    "rollout_is": "importance_cap",
    "rollout_is_threshold": "importance_cap",
    "save_freq": "nothing: every step is a checkpoint",
    "tensor_model_parallel_size": "tensor_parallel",
    "test_freq": "eval_every",
    "total_training_steps": "steps",
    "train_batch_size": "scenarios_per_step",
    "train_files": "scenarios",
    "use_kl_loss": "kl_coef",
    "val_files": "eval",
    # agent-lightning
    "adapter": "select",
    "agent_match": "select",
    "algorithm": "config",
    "n_runners": "concurrency",
    "val_dataset": "eval",
    **dict.fromkeys(NO_COUNTERPART, ""),
    # of one object only
    "Model.id": "name",
    "RemoteBackend.base_url": "url",
    "TrainableModel.id": "name",
    "TrainableModel.model": "base_model",
    "TrainableModel.path": "base_model",
    "TrainableModel.remote_server_url": "backend=RemoteBackend(url)",
    "Trainer.run_id": "run",
    "Trainer.run_name": "run",
    **{f"{where}.{name}": use for where in ("Llm", "Ruler") for name, use in _LITELLM.items()},
}
"""Option of another library, or `Object.option` -> our option, or what to use; "" if it has no counterpart. The page
docs/coming_from.md has the names and their sources."""


def unknown_option(where: str, name: str, known: Iterable[str]) -> str:
    """What is wrong with the option `name` of `where`, which takes `known`, and what to write instead."""
    names = [*known]
    return f"{where}: there is no option {name!r}{_remedy(where, name, names)}"


def _remedy(where: str, name: str, known: Collection[str]) -> str:
    ours = FOREIGN.get(f"{where}.{name}", FOREIGN.get(name, name))
    if not ours:
        return ", and it has no counterpart here: leave it out"
    if not ours.isidentifier():
        return f": use {ours}"
    if ours in known:
        return f": use {ours}=..."
    if place := _place(ours):
        return f": use {place}"
    if close := get_close_matches(ours, known, n=1):
        return f": did you mean {close[0]!r}?"
    elsewhere = get_close_matches(ours, [option for options in owned_options().values() for option in options], 1, 0.8)
    if elsewhere:
        return f": did you mean {_place(elsewhere[0])}?"
    return f"; there are {', '.join(known)}"


def _place(option: str) -> str:
    """How the option is given to each object that takes it; "" if none does."""
    return " or ".join(place.format(option) for place, options in owned_options().items() if option in options)


def check_options(where: str, options: Iterable[str], known: Collection[str]) -> None:
    """Raise ConfigError for the first of `options` that is not `known`."""
    for name in options:
        if name not in known:
            raise ConfigError(unknown_option(where, name, known))


def names_checked(where: str) -> Callable[[Callable[P, R]], Callable[P, R]]:
    """Decorate a function so that an unknown keyword raises ConfigError with the right name, not TypeError."""

    def decorate(function: Callable[P, R]) -> Callable[P, R]:
        known = [name for name in inspect.signature(function).parameters if name != "self"]

        @functools.wraps(function)
        def checked(*args: P.args, **options: P.kwargs) -> R:
            check_options(where, options, known)
            return function(*args, **options)

        @functools.wraps(function)
        async def checked_async(*args: P.args, **options: P.kwargs) -> Any:
            check_options(where, options, known)
            return await cast(Callable[P, Any], function)(*args, **options)

        return cast(Callable[P, R], checked_async) if inspect.iscoroutinefunction(function) else checked

    return decorate
