"""Serve a model on a GPU machine of a cloud provider, launched by SkyPilot."""

from __future__ import annotations

import asyncio
import subprocess
import sys
from pathlib import Path
from typing import Annotated

import typer

from offbook.base.errors import ConfigError
from offbook.base.terminal import echo
from offbook.commands.help_pages import more_option

from .sky_command import clusters, price_line, status_of, take_down, wanted_resources
from .skypilot import SkyPilotBackend, cluster_key, free_port, key_file, known_clusters, ssh_command

app = typer.Typer(
    help="Serve a model on a GPU machine of a cloud provider, launched by SkyPilot.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)
Cluster = Annotated[str, typer.Argument(help="name of the machine")]


@app.command()
def up(
    model: Annotated[str, typer.Option(help="base model, such as Qwen/Qwen2.5-7B-Instruct")],
    gpu: Annotated[str, typer.Option(help="GPU and number, such as L4 or H100:2")],
    cluster: Cluster = "offbook",
    infra: Annotated[str | None, more_option(help="cloud, or cloud/region  [default: the cheapest]")] = None,
    spot: Annotated[bool, more_option("--spot", help="use a cheaper machine that the cloud may reclaim")] = False,
    mirror: Annotated[
        str | None, typer.Option(help="place for copies of checkpoints, such as s3://BUCKET/PATH")
    ] = None,
    env_file: Annotated[
        Path | None, more_option(help="file with environment variables for the machine, such as keys")
    ] = None,
    idle_minutes: Annotated[float, more_option(help="shut the machine down after this many minutes without work")] = 30,
    yes: Annotated[bool, typer.Option("--yes", "-y", help="do not ask for confirmation")] = False,
) -> None:
    """Show the price, launch a machine, and serve a model on it.

    An idle machine shuts itself down. With --mirror it is deleted; otherwise it is stopped and keeps its disk."""
    resources = wanted_resources(gpu, None, spot) | ({"infra": infra} if infra else {})
    if not yes and status_of(cluster) != "UP":
        echo(price_line(resources))
        typer.confirm(f"Launch {cluster}?", abort=True)
    started = SkyPilotBackend.initialize_cluster(
        cluster,
        base_model=model,
        resources=resources,
        use_spot=spot,
        mirror=mirror,
        idle_minutes=idle_minutes,
        env_path=env_file,
    )
    asyncio.run(started).close()
    echo(f"{cluster} serves {model}. It ends itself after {idle_minutes:g} minutes without work.")
    echo(f"  tunnel and shell: offbook cloud ssh {cluster}")
    echo(f"  end it:           offbook cloud down {cluster}")


@app.command()
def status() -> None:
    """List the machines that were launched from here."""
    names = known_clusters()
    records = {str(record["name"]): record for record in clusters(*names)} if names else {}
    for name in names:
        record = records.get(name, {})
        echo(f"{name}  {record.get('status', 'gone')}  {record.get('resources_str') or ''}".rstrip())
    if not names:
        echo("no machine was launched from here", err=True)


@app.command()
def ssh(
    cluster: Cluster = "offbook",
    port: Annotated[int, typer.Option(min=0, max=65535, help="local port of the tunnel; 0: a free one")] = 0,
) -> None:
    """Open a tunnel to the server.

    At a terminal, this also opens a shell on the machine."""
    if status_of(cluster) != "UP":  # also writes the entry for ssh
        raise ConfigError(f"{cluster} is not up: `offbook cloud up {cluster} --model MODEL --gpu GPU` launches it")
    local = port or free_port()
    echo(f"export OFFBOOK_URL=http://127.0.0.1:{local} OFFBOOK_API_KEY={cluster_key(cluster)}")
    options = () if sys.stdin.isatty() else ("-N",)
    raise typer.Exit(subprocess.call(ssh_command(cluster, local, *options)))


@app.command()
def down(
    cluster: Cluster = "offbook",
    yes: Annotated[bool, typer.Option("--yes", "-y", help="do not ask for confirmation")] = False,
) -> None:
    """Terminate a machine and delete its disk."""
    if not yes:
        typer.confirm(f"Terminate {cluster}? What is not on the mirror or downloaded is lost", abort=True)
    take_down(cluster)
    key_file(cluster).unlink(missing_ok=True)
    echo(f"{cluster} is down")
