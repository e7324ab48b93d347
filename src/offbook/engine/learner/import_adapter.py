"""Makes a PEFT LoRA of another tool the first checkpoint of a model.

python -m offbook.engine.learner.import_adapter --base DIR --name BASE --adapter DIR --model NAME --checkpoints DIR. Writes why
it was not imported to the original stdout, and nothing else there.
"""

from __future__ import annotations

import argparse
import sys
import time
from pathlib import Path
from typing import cast

import torch
from safetensors import SafetensorError

from offbook.base.config import LoraOptions
from offbook.base.errors import ConfigError, OffbookError
from offbook.base.json_files import read_json
from offbook.base.types import Json, TrainResult

from ..checkpoint_files import ADAPTER, ADAPTER_CONFIG, CheckpointNote, is_file
from .__main__ import original_stdout
from .checkpoints import Draft, OptimizerState, rng_states
from .model.policy import Policy

_READ = {"peft_type", "r", "lora_alpha", "lora_dropout", "target_modules"}
_WITHOUT_EFFECT = {
    *("base_model_name_or_path", "task_type", "inference_mode", "revision", "peft_version", "auto_mapping"),
    *("exclude_modules", "layers_pattern", "megatron_core", "qalora_group_size", "ensure_weight_tying", "eva_config"),
}
"""Fields of adapter_config.json that change nothing in what the saved tensors compute."""
_PLAIN: dict[str, tuple[Json, ...]] = {"bias": ("none",), "init_lora_weights": (True, "gaussian", "eva", "orthogonal")}
"""Fields -> the values, beside none and false, with which the adapter is a plain LoRA. Every other field makes another
kind of adapter: those that start from changed base weights (PiSSA, OLoRA) too."""


def lora_of(adapter: Path) -> LoraOptions:
    """The shape of an adapter. Raises ConfigError that names what is missing, or what makes it no plain LoRA."""
    missing = [name for name in (ADAPTER_CONFIG, ADAPTER) if not is_file(adapter / name)]
    if missing:
        raise ConfigError(f"{adapter} has no {' and no '.join(missing)}: give the folder of a PEFT LoRA")
    loaded: Json = read_json(adapter / ADAPTER_CONFIG)
    if not isinstance(loaded, dict):
        raise ConfigError(f"{adapter / ADAPTER_CONFIG}: an object is needed, got {loaded!r:.100}")
    config = cast(dict[str, Json], loaded)
    faults = [] if config.get("peft_type") == "LORA" else [f"peft_type is {config.get('peft_type')!a:.100}, not 'LORA'"]
    faults += [
        f"{name if name.isidentifier() else ascii(name)} is {value!a:.100}"
        for name, value in config.items()
        if value and name not in _READ | _WITHOUT_EFFECT and value not in _PLAIN.get(name, ())
    ]
    if faults:
        raise ConfigError(f"{adapter} is no LoRA that a step can go on from: {', '.join(faults)}")
    modules: str | list[Json] = config.get("target_modules") or []
    names: list[Json] = modules if isinstance(modules, list) else [modules]
    if not all(isinstance(name, str) for name in names):
        raise ConfigError(f"{adapter / ADAPTER_CONFIG}: target_modules: names are needed, got {modules!r:.100}")
    return LoraOptions.parse(
        r=config.get("r"),
        alpha=config.get("lora_alpha"),
        dropout=config.get("lora_dropout") or 0.0,
        target_modules=tuple(sorted(names)) if isinstance(modules, list) else modules,
    )


def write_checkpoint(policy: Policy, adapter: Path, model: str, base: str, checkpoints: Path) -> Path:
    """Write step 1 of `model`: the adapter, an optimizer without a history, and generators by the seed 0. Raises ConfigError
    that names the tensors that do not fit the base, OSError, SafetensorError."""
    policy.load_adapter(adapter)
    lora = policy.lora
    assert lora is not None  # it was loaded with one
    torch.manual_seed(lora.seed)  # pyright: ignore[reportUnknownMemberType]  # torch's own annotations are partial
    with Draft(checkpoints, 1) as draft:
        policy.save_adapter(draft.path)
        draft.write_optimizer(OptimizerState({}, 0))
        draft.write_rng(rng_states())
        note = CheckpointNote(
            step=1,
            model=model,
            base_model=base,
            lora=lora,
            config={},
            metrics={},
            result=TrainResult(model=model, step=1, applied=True),
            created_at=time.time(),
        )
        return draft.commit(note)


def main(argv: list[str] | None = None) -> int:
    """Import the adapter. Returns the exit code."""
    parser = argparse.ArgumentParser(prog="python -m offbook.engine.learner.import_adapter")
    parser.add_argument("--name", required=True)
    parser.add_argument("--model", required=True)
    for folder in ("--base", "--adapter", "--checkpoints"):
        parser.add_argument(folder, type=Path, required=True)
    arguments, answers = parser.parse_args(argv), original_stdout()
    try:
        policy = Policy.load(arguments.base, lora_of(arguments.adapter), name=arguments.name)
        write_checkpoint(policy, arguments.adapter, arguments.model, arguments.name, arguments.checkpoints)
    except (OffbookError, OSError, ValueError, RuntimeError, SafetensorError) as error:
        answers.write(str(error) or type(error).__name__)
        answers.flush()
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
