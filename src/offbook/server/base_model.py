"""Finds the folder of a base model: a bundled policy, a local folder, a converted base or a Hugging Face name."""

from __future__ import annotations

import json
import logging
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import cast

from offbook.base.adapter_folders import adapter_folder
from offbook.base.errors import ConfigError
from offbook.base.json_files import read_json
from offbook.base.local_bases import OFFERS, bases_folder, local_base
from offbook.base.types import Json

from .. import plugins, tiny

logger = logging.getLogger(__name__)

_HUB_NAME = re.compile(r"^[A-Za-z0-9][\w.-]*(/[\w.-]+)?$")
_CACHED = "models--"
_THOUGHTS = re.compile(r"think|thought|reason|<\|channel", re.IGNORECASE)
_HUB_FILES = ["*.json", "*.safetensors", "*.txt", "*.jinja", "*.model", "tokenizer*"]


@dataclass(frozen=True)
class BaseModelPath:
    """A base model on this machine.

    `name` is what the user wrote, `path` its folder. `reference` is the value of `base_model_name_or_path` in the
    configuration of exported adapters.
    """

    name: str
    path: Path
    reference: str

    def is_called(self, name: str) -> bool:
        """Whether `name` means this base: it is equal, a path of the same folder, or the name that adapters give."""
        if name in (self.name, self.reference) or name in tiny.FOLDERS:
            return name in (self.name, self.reference)
        try:
            if Path(name).exists():
                return Path(name).resolve() == self.path
            base = local_base(name)
        except (OSError, ValueError):  # too long for a path, or with a NUL character
            return False
        return base is not None and base.folder.resolve() == self.path

    def special_tokens(self, texts: Sequence[str]) -> frozenset[int]:
        """The ids of those `texts` that tokenizer.json lists as added tokens; empty without that file."""
        try:
            added = cast(list[dict[str, Json]], read_json(self.path / "tokenizer.json").get("added_tokens", []))
            return frozenset(int(token["id"]) for token in added if token.get("content") in texts)
        except (OSError, ValueError, KeyError, TypeError, AttributeError):
            return frozenset()  # a slow tokenizer has no such file; callers then search the text only

    def answers_plainly(self) -> bool:
        """Whether the chat templates are here and none mentions thoughts: no reasoning parser reads the model's answers."""
        templates = self._templates()
        return bool(templates) and not _THOUGHTS.search(templates)

    def template_words(self) -> frozenset[str] | None:
        """All words of the chat templates, among them the names of their variables; None if the templates are not here."""
        templates = self._templates()
        return frozenset(re.findall(r"\w+", templates)) if templates else None

    def _templates(self) -> str:
        files = (*self.path.glob("*.jinja"), *self.path.glob("additional_chat_templates/*.jinja"))
        try:
            texts = [file.read_text("utf-8") for file in files]
            template = read_json(self.path / "tokenizer_config.json").get("chat_template")
        except (OSError, ValueError, AttributeError):
            return ""
        if template is not None:
            texts.append(json.dumps(template).replace("\\n", "\n"))
        return "\n".join(texts)


def reference(name: str) -> str:
    """The `base_model_name_or_path` of an adapter whose base is `name`: its name, which holds on other machines too, or the
    absolute path of a folder without one. A folder of the Hugging Face cache has the name under which it was downloaded,
    and a converted base that of its original.

    >>> reference("Qwen/Qwen2.5-0.5B-Instruct"), reference("tiny")
    ('Qwen/Qwen2.5-0.5B-Instruct', 'tiny')
    """
    folder = Path(name).expanduser()
    if name in tiny.FOLDERS:
        return name
    base = local_base(folder.name if folder.exists() and folder.resolve().parent == bases_folder() else name)
    if base is not None:
        return base.reference
    if not folder.exists():
        return name
    for cached, snapshots in zip(folder.absolute().parts, folder.absolute().parts[1:], strict=False):
        if snapshots == "snapshots" and cached.startswith(_CACHED):
            return cached.removeprefix(_CACHED).replace("--", "/")
    return str(folder.resolve())


def find(name: str) -> BaseModelPath:
    """Find the base model `name`; download it from the Hugging Face hub if necessary. Raises ConfigError."""
    name = next((own for own in tiny.FOLDERS if name == str(tiny.path(own))), name)  # as adapters of it name it
    if name in tiny.FOLDERS:
        return BaseModelPath(name, _checked(tiny.path(name), name), reference(name))
    folder = Path(name).expanduser()
    if folder.exists():
        return BaseModelPath(name, _checked(folder.resolve(), name), reference(name))
    if not _HUB_NAME.match(name):
        raise ConfigError(
            f"--model {name}: there is no such folder, and it is not a Hugging Face name. "
            "Use `tiny`, a folder with config.json and weights, or a name such as Qwen/Qwen2.5-0.5B-Instruct"
        )
    if (base := local_base(name)) is not None and (name == base.name or not _is_cached(name)):
        if name != base.name:
            logger.warning(
                "%s is not downloaded: the base %r of this machine, converted from it, is used", name, base.name
            )
        return BaseModelPath(name, _checked(base.folder.resolve(), name), base.reference)
    if name in plugins.names(OFFERS):
        raise ConfigError(f"--model {name}: not on this machine yet: {plugins.load(OFFERS, name)}")
    return BaseModelPath(name, _checked(_from_hub(name), name), reference(name))


def _checked(folder: Path, name: str) -> Path:
    if adapter_folder(str(folder)) is not None:
        raise ConfigError(
            f"--model {name}: this is an adapter: make a model of it with offbook import {name} --model NAME"
        )
    if not (folder / "config.json").is_file():
        raise ConfigError(f"--model {name}: {folder} has no config.json, so it is not a model folder")
    if not any(folder.glob("*.safetensors")):
        raise ConfigError(f"--model {name}: {folder} has no *.safetensors weights")
    return folder


def _is_cached(name: str) -> bool:
    """Whether the Hugging Face cache holds the configuration and weights of the original."""
    try:
        from huggingface_hub import snapshot_download  # pyright: ignore[reportUnknownVariableType]  # partly untyped; only a download needs it

        return any(Path(snapshot_download(name, local_files_only=True)).glob("*.safetensors"))
    except (ImportError, OSError, ValueError):  # LocalEntryNotFoundError is an OSError and a ValueError
        return False


def _from_hub(name: str) -> Path:
    try:
        from huggingface_hub import snapshot_download  # pyright: ignore[reportUnknownVariableType]  # partly untyped; only a download needs it
        from huggingface_hub.errors import LocalEntryNotFoundError
    except ImportError as error:
        raise ConfigError(
            f"--model {name}: there is no such folder, and huggingface_hub is not installed: pip install huggingface_hub"
        ) from error
    try:
        return Path(snapshot_download(name, allow_patterns=_HUB_FILES))
    except LocalEntryNotFoundError as error:
        raise ConfigError(
            _not_found(name, "the hub cannot be reached, and the model is not in the local cache")
        ) from error
    except Exception as error:  # the hub's client raises many types; all mean that the model cannot be downloaded
        first = next((line for line in str(error).splitlines() if line.strip()), type(error).__name__)
        raise ConfigError(_not_found(name, first)) from error


def _not_found(name: str, why: str) -> str:
    return (
        f"--model {name}: no folder {Path(name).absolute()}, and no download from https://huggingface.co/{name} ({why}). "
        "Check the name, download it while online, or give the folder's path; `--model tiny` needs no download"
    )
