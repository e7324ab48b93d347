"""The checks of `understudy doctor`. Imports no torch; other processes report on torch and the engines."""

from __future__ import annotations

import os
import platform
import shutil
import sys
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import understudy

from ..config import EngineOptions
from ..extras import install_command
from .facts import Broken, EngineFacts, TorchFacts, query_facts
from .packages import KNOWN, Check, Installed, package_checks
from .services import judge_checks, langfuse_checks, server_checks

try:
    import psutil  # with the extra `server`
except ImportError:
    psutil = None

GIB = 2**30
LEAST_DISK = 2 * GIB
"""Bytes of free disk below which the check warns: a few checkpoints or one download could fill it."""
LEAST_MEMORY = GIB
"""Bytes of free memory below which the check warns."""


@dataclass(frozen=True)
class Report:
    """All checks. `engine` and `loader` are those that `understudy serve` would use here; None where only a client can
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
        services = [pool.submit(server_checks, folder), pool.submit(langfuse_checks), pool.submit(judge_checks)]
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
        checks += [*more, *package_checks(packages)]
        for service in services:
            checks += service.result()
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
        Check("machine", "Understudy", "ok", understudy.__version__),
        Check("machine", "Python", "ok", f"{platform.python_version()} at {sys.executable}"),
        Check("machine", "platform", "ok", system)
        if sys.platform != "win32"
        else Check("machine", "platform", "warn", f"{system}; the server needs Linux or macOS", "wsl --install"),
    ]
    if psutil is not None:
        memory = psutil.virtual_memory()
        text = f"{size(memory.available)} of {size(memory.total)} free"
        checks.append(Check("machine", "memory", "ok" if memory.available > LEAST_MEMORY else "warn", text))
    for name, place in (("disk", folder), ("model cache", model_cache())):
        checks.append(disk_check(name, place))
    return checks


def disk_check(name: str, place: Path, usage: Callable[[Path], int] | None = None) -> Check:
    """Free disk space at `place`, a folder that may not exist yet. `usage` returns the free bytes of a folder."""
    existing = next((folder for folder in (place, *place.parents) if folder.exists()), Path("/"))
    free = usage(existing) if usage else shutil.disk_usage(existing).free
    status = "ok" if free > LEAST_DISK else "warn"
    fix = None if status == "ok" else ("--dir" if name == "disk" else "HF_HOME")
    return Check("machine", name, status, f"{size(free)} free at {place}", fix)


def model_cache() -> Path:
    """The folder in which Hugging Face's libraries keep downloaded models."""
    home = os.environ.get("HF_HOME") or Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache") / "huggingface"
    return Path(os.environ.get("HF_HUB_CACHE") or Path(home) / "hub").expanduser()


def torch_checks(torch: TorchFacts | Broken | None, installed: Installed, *, needed: bool) -> list[Check]:
    """The engine's packages, what torch was built for, and its devices with their precision."""
    missing = installed.missing("server")
    if missing and needed:
        return [
            Check("engine", "packages", "broken", f"not installed: {', '.join(missing)}", install_command("server"))
        ]
    if torch is None:
        text = "not installed; this machine can be only a client of a server elsewhere"
        return [Check("engine", "packages", "missing", text, install_command("server"))]
    if isinstance(torch, Broken):
        fix = f"pip install --force-reinstall torch=={KNOWN['torch'][0]}"
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
        text = f"the driver lists {', '.join(torch.driver_gpus)}, but this torch ({torch.build} build) cannot use it"
        lines.append(Check("engine", "GPU", "warn", text, f"pip install --force-reinstall torch=={KNOWN['torch'][0]}"))
    if not torch.devices:
        also = "; mps with --device mps" if torch.mps else ""
        lines.append(Check("engine", "device", "ok", f"cpu, {torch.threads} threads, float32{also}"))
    return lines


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
