"""The commands `offbook checkpoints`, `export`, `import`, `verify` and `backup`: what a directory keeps."""

from __future__ import annotations

import asyncio
import shlex
from pathlib import Path
from typing import Annotated, cast, get_args

import typer

from offbook.base.adapter_folders import named_base
from offbook.base.errors import ConfigError
from offbook.base.server_options import server_folder
from offbook.base.terminal import echo
from offbook.base.text import counted
from offbook.base.wire import CheckpointState, ExportFormat, ExportRequest, ExportResult
from offbook.client.connection.download import download_export
from offbook.client.connection.http import Api, checked_name
from offbook.client.local import server_at
from offbook.plugins import imported

from .options import Dir, Model, Server

FORMATS: tuple[str, ...] = get_args(ExportFormat)


def checkpoints(model: Model, url: Server = None, dir: Dir = None) -> None:
    """List a model's checkpoints."""
    listed = list_checkpoints(model, url, dir)
    for checkpoint in listed:
        echo(f"{checkpoint.step:5}  {checkpoint.path}")
    if size := sum(checkpoint.size for checkpoint in listed):
        echo(f"{counted(len(listed), 'checkpoint')}, {size / 1e6:,.1f} MB", err=True)
    if not listed:
        echo(f"model {model!r} is at step 0: nothing has been trained yet, so it has no checkpoints", err=True)


def export(
    model: Model,
    output: Annotated[Path, typer.Option(help="new folder on this machine")],
    format: Annotated[
        str,
        typer.Option(
            help="peft: the LoRA; merged: base and LoRA in one model; gguf-ready: the merged model for llama.cpp's converter"
        ),
    ] = "peft",
    step: Annotated[int | None, typer.Option(min=1, help="step of the checkpoint  [default: the newest]")] = None,
    url: Server = None,
    dir: Dir = None,
) -> None:
    """Write a checkpoint as a folder that other tools load.

    The tools are vLLM, transformers and llama.cpp's converter. With --url, the checkpoint is downloaded.

    \b
    Example:
      offbook export email-agent --output email-agent-lora
    """
    written = export_model(model, output, format, step, url, dir)
    echo(written)
    if format == "gguf-ready":
        echo(f"to convert it to one GGUF file: {convert_command(written)}", err=True)


def import_command(
    adapter: Annotated[Path, typer.Argument(help="folder with adapter_config.json and adapter_model.safetensors")],
    model: Annotated[str, typer.Option("--model", help="name of the new model")],
    base: Annotated[
        str | None,
        typer.Option(help="its base: tiny, a folder, or a Hugging Face name  [default: what the adapter names]"),
    ] = None,
    project: Annotated[str, typer.Option(help="project of the model")] = "default",
    dir: Dir = None,
) -> None:
    """Create a model from a LoRA that another tool trained.

    The adapter becomes step 1 of the model. Training continues from there. Stop the directory's server first.

    \b
    Example:
      offbook import ./my-lora --model email-agent
    """
    models = imported("offbook.server.stored_models", "ui")
    folder = adapter.expanduser().absolute()
    named = named_base(folder)
    if base is None and named is None:
        raise ConfigError(f"the adapter in {folder} does not name its base model: pass --base")
    if base is not None and named is not None and base != named:
        echo(f"the adapter was made for the base {named!r}; you chose {base!r}, and its layers are compared", err=True)
    name, place = checked_name(model, "--model"), checked_name(project, "--project")
    root = server_folder(dir)
    echo(str(models.import_model(root, folder, name, place, base or named)))


def list_checkpoints(model: str, url: str | None, folder: Path | None) -> list[CheckpointState]:
    """The model's checkpoints, by step. `url=None`: of the server, or the files, in `folder`."""
    api = server_at(url, folder)
    if api is None:
        stored = imported("offbook.server.stored_models", "ui")
        return stored.checkpoints_of(server_folder(folder), checked_name(model, "model"))
    return asyncio.run(api.checkpoints(model))


def export_model(model: str, output: Path, format: str, step: int | None, url: str | None, folder: Path | None) -> str:
    """Write a step (None: the newest) to a new folder on this machine and return its path.

    Raises ConfigError for an unknown format or a model at step 0, ServerError, BackendError.
    """
    if format not in FORMATS:
        raise ConfigError(f"--format: {format!r} must be one of {', '.join(FORMATS)}")
    chosen = cast(ExportFormat, format)
    api = server_at(url, folder)
    if api is None:
        stored = imported("offbook.server.stored_models", "ui")
        name = checked_name(model, "model")
        return _shown(stored.export_checkpoint(server_folder(folder), name, step, chosen, str(output.absolute())))

    async def export(api: Api) -> str:
        newest = (await api.model(model)).step
        if newest == 0:
            raise ConfigError(
                f"model {model!r} is at step 0: nothing has been trained yet, so there is no LoRA to export; train a step first"
            )
        exported_step = newest if step is None else step
        if url is not None:
            return str(await download_export(api, model, exported_step, chosen, output, _show))
        request = ExportRequest(format=chosen, output=str(output.absolute()))
        return _shown(await api.export(model, exported_step, request))

    return asyncio.run(export(api))


def _shown(result: ExportResult) -> str:
    _show(result.note)
    return result.path


def _show(note: str) -> None:
    if note:
        echo(note, err=True)


def convert_command(folder: str) -> str:
    """The shell command that converts a folder exported as `gguf-ready` to one GGUF file."""
    return shlex.join(["python", "llama.cpp/convert_hf_to_gguf.py", folder, "--outfile", f"{folder}.gguf"])


def verify(
    dir: Dir = None,
    repair: Annotated[
        bool, typer.Option("--repair", help="set damaged parts aside, rebuild model.json and start new records")
    ] = False,
) -> None:
    """Check the records, models and checkpoints of a directory.

    Exits with code 1 if any is damaged or could not be checked. Stop the
    directory's server first."""
    raise typer.Exit(imported("offbook.server.maintenance", "ui").verify(_existing(dir), repair=repair))


def backup(
    output: Annotated[Path, typer.Option(help="new folder for the copy")],
    dir: Dir = None,
) -> None:
    """Copy the records, models and checkpoints of a directory, and verify the copy.

    Exits with code 1 if a part of the copy is damaged. The server may be running.
    """
    code = imported("offbook.server.maintenance", "ui").backup(_existing(dir), output.expanduser().absolute())
    raise typer.Exit(code)


def _existing(folder: Path | None) -> Path:
    place = server_folder(folder)
    if not place.is_dir():
        raise ConfigError(f"{place}: no such directory; name the server's directory with --dir")
    return place
