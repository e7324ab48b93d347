"""Which folder holds the base model: `tiny`, a folder, or a Hugging Face name."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import cast

from ... import tiny
from ...errors import ConfigError
from ...types import Json

_HUB_NAME = re.compile(r"^[A-Za-z0-9][\w.-]*(/[\w.-]+)?$")
_HUB_FILES = ["*.json", "*.safetensors", "*.txt", "*.jinja", "*.model", "tokenizer*"]


@dataclass(frozen=True)
class BaseModelPath:
    """`name` is what the user wrote, `path` where it lies, `reference` what a PEFT folder names as its base."""

    name: str
    path: Path
    reference: str

    def is_called(self, name: str) -> bool:
        """Whether `name` means this base: the same word, or the same folder."""
        if name in (self.name, "tiny"):
            return name == self.name
        try:
            return Path(name).exists() and Path(name).resolve() == self.path
        except (OSError, ValueError):  # longer than a path may be, or with a NUL in it
            return False

    def special_tokens(self, texts: Sequence[str]) -> frozenset[int]:
        """The ids of those texts that are special tokens by the tokenizer's file."""
        try:
            tokenizer = json.loads((self.path / "tokenizer.json").read_text("utf-8"))
        except (OSError, ValueError):
            return frozenset()  # a slow tokenizer has no such file: text alone is looked at then
        added = cast(list[dict[str, Json]], tokenizer.get("added_tokens", []))
        return frozenset(int(token["id"]) for token in added if token.get("content") in texts)


def reference(name: str) -> str:
    """What a PEFT folder names as its base when the base is called `name`; the base need not be here."""
    if name == "tiny":
        return str(tiny.path())
    folder = Path(name).expanduser()
    return str(folder.resolve()) if folder.exists() else name


def find(name: str) -> BaseModelPath:
    """The base model called `name`, downloaded from the hub when it is not here. Raises ConfigError."""
    if name == "tiny":
        return BaseModelPath(name, _checked(tiny.path(), name), reference(name))
    folder = Path(name).expanduser()
    if folder.exists():
        return BaseModelPath(name, _checked(folder.resolve(), name), reference(name))
    if not _HUB_NAME.match(name):
        raise ConfigError(
            f"--model {name}: there is no such folder, and it is no Hugging Face name. "
            "Give `tiny`, a folder with config.json and weights, or a name such as Qwen/Qwen2.5-0.5B-Instruct"
        )
    return BaseModelPath(name, _checked(_from_hub(name), name), reference(name))


def _checked(folder: Path, name: str) -> Path:
    if not (folder / "config.json").is_file():
        raise ConfigError(f"--model {name}: {folder} has no config.json, so it is no model folder")
    if not any(folder.glob("*.safetensors")):
        raise ConfigError(f"--model {name}: {folder} has no *.safetensors weights")
    return folder


def _from_hub(name: str) -> Path:
    try:
        from huggingface_hub import snapshot_download  # pyright: ignore[reportUnknownVariableType]  # untyped in part; a download tool that only this path needs
        from huggingface_hub.errors import LocalEntryNotFoundError
    except ImportError as error:
        raise ConfigError(
            f"--model {name}: there is no such folder, and huggingface_hub is not installed: pip install huggingface_hub"
        ) from error
    try:
        return Path(snapshot_download(name, allow_patterns=_HUB_FILES))
    except LocalEntryNotFoundError as error:
        raise ConfigError(_not_found(name, "the hub cannot be reached and it is not in the local cache")) from error
    except Exception as error:  # the hub's client raises many kinds; each means that there is no model
        first = next((line for line in str(error).splitlines() if line.strip()), type(error).__name__)
        raise ConfigError(_not_found(name, first)) from error


def _not_found(name: str, why: str) -> str:
    return (
        f"--model {name}: no folder {Path(name).absolute()}, and https://huggingface.co/{name} gave nothing ({why}). "
        "Check the name, download it while online, or give the folder's path; `--model tiny` needs no download"
    )
