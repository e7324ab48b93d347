"""Arguments that other trainers' constructors take, and what says the same here."""

from __future__ import annotations

from collections.abc import Mapping

from ..errors import ConfigError

BACKEND_OPTIONS = {
    "path": "dir=",
    "in_process": "nothing: the server is always a process of its own",
    "engine_args": "single options such as max_model_len= or device=",
}
MODEL_OPTIONS = {
    "_internal_config": "lora=LoraOptions(r=..., alpha=...) for the adapter and LocalBackend(max_model_len=..., ...) for the engine",
    "entity": "project=",
    "base_path": "LocalBackend(dir=...)",
    "report_metrics": "log(), and a trace sink",
}


def refuse_foreign(given: Mapping[str, object], known: Mapping[str, str], where: str) -> None:
    """Raise ConfigError for an argument of another trainer, naming ours."""
    for name in given:
        if name in known:
            raise ConfigError(f"{where} has no argument {name!r}: use {known[name]}")
