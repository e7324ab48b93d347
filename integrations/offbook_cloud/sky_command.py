"""The `sky` command of SkyPilot, and the task that runs a server on a machine of a cloud.

SkyPilot stays in an environment of its own: it requires uvicorn below 0.36, and the server 0.40. Written for version 0.14.
"""

from __future__ import annotations

import json
import os
import shlex
import subprocess
import tempfile
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

from offbook.base.errors import DISTRIBUTION, BackendError, ConfigError, installation_origin, origin_folder
from offbook.base.http_access import KEY_VARIABLE
from offbook.base.types import Json

SKY_INSTALL = "uv tool install 'skypilot[aws]==0.14.1'"
"""Installs it in an environment of its own."""
SERVER_PORT = 8000
"""Port of the server on the machine, on loopback."""
STOP_MINUTES = 5
"""Minutes without a job after which SkyPilot stops the machine."""
PRICE_SECONDS = 30.0
"""Limit for the price, which SkyPilot reads from a catalogue on the internet."""
ENDED = ("SUCCEEDED", "FAILED", "FAILED_SETUP", "FAILED_DRIVER", "CANCELLED")
"""States of SkyPilot's jobs that have ended."""


@dataclass(frozen=True)
class ServerTask:
    """A server on a machine of a cloud. `resources`: SkyPilot's, such as {"accelerators": "L4:1", "use_spot": True}.

    It listens on loopback and ends after `idle_minutes` without work; SkyPilot then takes the machine down, or stops it
    and keeps its disk if there is no `mirror`.
    """

    base_model: str
    resources: Mapping[str, Json]
    mirror: str | None = None
    idle_minutes: float = 30
    serve: Sequence[str] = ()

    def as_json(self) -> dict[str, Json]:
        """The task as SkyPilot reads it from YAML."""
        extras = "gpu,mirror" if self.mirror is not None else "gpu"
        requirement, mounts = source_from(installation_origin(), extras)
        # An open tunnel is an SSH session, which would keep the machine's idle timer at zero: it counts jobs alone.
        stop = {"idle_minutes": STOP_MINUTES, "down": self.mirror is not None, "wait_for": "jobs"}
        words = ["--model", self.base_model, "--host", "127.0.0.1", "--port", str(SERVER_PORT)]
        words += ["--idle-exit", f"{self.idle_minutes:g}"]
        words += ["--mirror", self.mirror] if self.mirror is not None else []
        task: dict[str, Json] = {
            "name": "offbook",
            "resources": {"autostop": stop, **self.resources},
            "setup": "cd ~\n"
            "curl -LsSf https://astral.sh/uv/install.sh | sh\n"
            ". ~/.local/bin/env\n"
            "uv venv --allow-existing --python 3.11 ~/offbook-env\n"
            f"uv pip install --python ~/offbook-env {shlex.quote(requirement)}\n",
            "run": ". ~/offbook-env/bin/activate\n"
            f"exec offbook serve --dir ~/offbook {shlex.join([*words, *self.serve])}\n",
        }
        return task | ({"file_mounts": dict(mounts)} if mounts else {})


def source_from(origin: Mapping[str, object], extras: str) -> tuple[str, dict[str, str]]:
    """What installs this package on another machine: the requirement, and the files to copy there, as {there: here}. `origin`: as
    PEP 610 records it. Raises ConfigError if that is unknown.

    >>> source_from({"url": "file:///srv/offbook", "dir_info": {"editable": True}}, "gpu")
    ('./offbook-source[gpu]', {'~/offbook-source': '/srv/offbook'})
    >>> source_from({"url": "https://example.com/offbook.git", "vcs_info": {"vcs": "git", "commit_id": "a1"}}, "gpu")
    ('offbook[gpu] @ git+https://example.com/offbook.git@a1', {})
    """
    url = str(origin.get("url", ""))
    match origin:
        case {"dir_info": _}:
            return f"./offbook-source[{extras}]", {"~/offbook-source": origin_folder(url)}
        case {"vcs_info": {"vcs": str(vcs), "commit_id": str(commit)}}:
            return f"{DISTRIBUTION}[{extras}] @ {vcs}+{url}@{commit}", {}
        case {"archive_info": _} if url.startswith("file:"):
            name = origin_folder(url).rsplit("/", 1)[-1]
            return f"./{name}[{extras}]", {f"~/{name}": origin_folder(url)}
        case {"archive_info": _}:
            return f"{DISTRIBUTION}[{extras}] @ {url}", {}
        case _:
            raise ConfigError(
                "this installation does not say where it came from: install Offbook from a checkout or wheel"
            )


def wanted_resources(gpu: str | None, resources: object, use_spot: bool) -> dict[str, Json]:
    """SkyPilot's resources from `gpu`, such as "H100" or "A100:2", or from a mapping or a `sky.Resources`.

    Raises ConfigError for both, neither, or another type.
    """
    if (gpu is None) == (resources is None):
        raise ConfigError(f'give either gpu=, such as "L4" or "H100:2", or resources=, got {gpu!r} and {resources!r}')
    if gpu is not None:
        chosen: dict[str, Json] = {"accelerators": gpu if ":" in gpu else f"{gpu}:1"}
    elif isinstance(resources, Mapping):
        chosen = dict(cast(Mapping[str, Json], resources))
    elif hasattr(resources, "to_yaml_config"):
        chosen = dict(cast(Any, resources).to_yaml_config())
    else:
        raise ConfigError(f"resources: a mapping or a sky.Resources is needed, got {type(resources).__name__}")
    return chosen | ({"use_spot": True} if use_spot else {})


def price_line(resources: Mapping[str, Json]) -> str:
    """What the machine costs an hour, in words. Never fails: the catalogue may be out of reach."""
    wanted = resources.get("accelerators")
    if isinstance(wanted, Mapping) and len(cast(Mapping[str, Json], wanted)) == 1:
        wanted = ":".join(str(part) for item in cast(Mapping[str, Json], wanted).items() for part in item)
    if not isinstance(wanted, str):
        return f"price unknown: `sky gpus list` has it for {dict(resources)!r}"
    place = ("--infra", str(resources["infra"])) if resources.get("infra") else ()
    try:
        offers: Json = parsed(sky("gpus", "list", wanted, *place, "-o", "json", timeout=PRICE_SECONDS))
        spot = bool(resources.get("use_spot"))
        return cheapest(wanted, [offer for listed in offers.values() for offer in listed], spot)
    except (BackendError, KeyError, TypeError, AttributeError) as error:
        return f"{wanted}: price unknown ({error}); `sky gpus list {wanted}` has it"


def cheapest(wanted: str, offers: Iterable[Mapping[str, Json]], spot: bool) -> str:
    """The cheapest of SkyPilot's offers, in words.

    >>> offer = {"cloud": "gcp", "instance_type": "g2-standard-4", "region": "us-east4", "price": 0.705, "spot_price": 0.282}
    >>> cheapest("L4:1", [offer], spot=True)
    'L4:1: from 0.28 USD an hour as a spot machine (gcp g2-standard-4, us-east4)'
    >>> cheapest("L4:1", [offer | {"price": float("nan")}], spot=False)
    'L4:1: price unknown, no offer has one'
    """
    column = "spot_price" if spot else "price"
    priced = [offer for offer in offers if isinstance(offer[column], int | float) and offer[column] > 0]
    if not priced:
        return f"{wanted}: price unknown, no offer has one"
    best = min(priced, key=lambda offer: offer[column])
    kind = " as a spot machine" if spot else ""
    where = f"{best['cloud']} {best['instance_type']}, {best['region']}".lower()
    return f"{wanted}: from {best[column]:.2f} USD an hour{kind} ({where})"


def clusters(*names: str) -> list[dict[str, Json]]:
    """SkyPilot's records of these clusters, asked from the clouds; a cluster that it does not know is left out.

    It also writes their entries for ssh."""
    return parsed(sky("status", *names, "--refresh", "-o", "json"))


def status_of(cluster: str) -> str | None:
    """SkyPilot's status: UP, INIT, STOPPED, AUTOSTOPPING; None for a cluster that does not exist."""
    known = clusters(cluster)
    return str(known[0]["status"]) if known else None


def job_runs(cluster: str) -> bool:
    """Whether a job of the cluster has not ended."""
    jobs: Json = parsed(sky("queue", cluster, "-o", "json"))
    return any(job["status"] not in ENDED for job in jobs.get(cluster, ()))


def launch(cluster: str, task: ServerTask, key: str, env_path: Path | None) -> None:
    """Launch the machine, or start a stopped one, and run the task on it. Returns once the task is submitted."""
    _submit(("launch", "-c", cluster), ("-d", "-y"), task, key, env_path)


def run_again(cluster: str, task: ServerTask, key: str, env_path: Path | None) -> None:
    """Run the task on a machine that is up, without its setup."""
    _submit(("exec", cluster), ("-d",), task, key, env_path)


def cancel_jobs(cluster: str) -> None:
    """End all jobs of the cluster."""
    sky("cancel", cluster, "-a", "-y")


def take_down(cluster: str) -> None:
    """Terminate the machine. Its disk is deleted."""
    sky("down", "-y", cluster)


def _submit(command: Sequence[str], flags: Sequence[str], task: ServerTask, key: str, env_path: Path | None) -> None:
    """The key travels as a secret in the environment of `sky`: not in the task, nor on a command line."""
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder, "task.yaml")
        file.write_text(json.dumps(task.as_json(), indent=1), encoding="utf-8")  # JSON is YAML
        extra = () if env_path is None else ("--env-file", str(env_path))
        sky(*command, str(file), *flags, *extra, "--secret", KEY_VARIABLE, env={KEY_VARIABLE: key})


def sky(*words: str, env: Mapping[str, str] | None = None, timeout: float | None = None) -> str:
    """Run `sky` and return its output. Raises BackendError with the end of what it wrote, or what to install."""
    try:
        done = subprocess.run(
            ["sky", *words],
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            errors="replace",
            env={**os.environ, **(env or {})},
            timeout=timeout,
            check=False,
        )
    except FileNotFoundError as error:
        raise BackendError(
            f"the command `sky` is not installed: `{SKY_INSTALL}`, with your cloud in the brackets, in a separate "
            "environment, because its packages conflict with the server's"
        ) from error
    except subprocess.TimeoutExpired as error:
        raise BackendError(f"`sky {words[0]}` did not answer within {timeout:g} s") from error
    if done.returncode:
        raise BackendError(f"`sky {shlex.join(words[:3])}` failed: {(done.stderr + done.stdout).strip()[-1000:]}")
    return done.stdout


def parsed(output: str) -> Json:
    r"""The JSON at the end of what `sky` wrote: lines for people may stand before it. Raises BackendError.

    >>> parsed("Cluster(s) not found: nothere.\n[]\n")
    []
    """
    lines = output.split("\n")
    for number, line in enumerate(lines):
        if line[:1] in ("[", "{"):
            try:
                return json.loads("\n".join(lines[number:]))
            except ValueError:
                continue  # a line for people that begins like JSON
    raise BackendError(f"`sky` wrote no JSON: {output[-500:]!r}. This needs SkyPilot 0.14 (`sky --version`)")
