"""The command `offbook import`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from offbook.base.adapter_folders import named_base
from offbook.base.errors import ConfigError
from offbook.base.server_options import server_folder
from offbook.base.terminal import echo
from offbook.client.connection.http import checked_name

from .lazy_import import imported
from .options import Dir


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
