"""`understudy doctor`: what this machine has, what runs on it, and what mends what is missing. Imports no torch."""

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
from .facts import Broken, EngineFacts, TorchFacts, ask
from .packages import KNOWN, Check, Installed, package_checks
from .services import judge_checks, langfuse_checks, server_checks

try:
    import psutil  # with the extra `server`
except ImportError:
    psutil = None

GIB = 2**30
LEAST_DISK = 2 * GIB
"""Below it, a few checkpoints or one download end a run."""
LEAST_MEMORY = GIB


@dataclass(frozen=True)
class Report:
    """`engine` and `loader` are what `understudy serve` would take here; None: a client only."""

    checks: tuple[Check, ...]
    engine: str | None
    loader: str | None

    @property
    def ok(self) -> bool:
        """Nothing that the engine needs is broken."""
        return all(check.status != "broken" for check in self.checks)


def examine(
    options: EngineOptions, folder: Path, installed: Installed | None = None, more: Sequence[Check] = ()
) -> Report:
    """Look at everything: the slow parts, imports and HTTP, at the same time. `more` are checks made before."""
    packages = installed or Installed()
    with ThreadPoolExecutor() as pool:
        services = [pool.submit(server_checks, folder), pool.submit(langfuse_checks), pool.submit(judge_checks)]
        torch = ask("torch", TorchFacts) if packages.version("torch") else None
        engine, loader = choose(options, torch, packages)
        parts = [part for part in (engine, loader) if part in ("vllm", "unsloth") and packages.version(part)]
        asked = {part: pool.submit(ask, part, EngineFacts) for part in parts}
        checks = machine_checks(folder) + torch_checks(torch, packages, needed=engine is not None)
        for part, what in ((engine, "sampler"), (loader, "loader")):
            if part in ("vllm", "unsloth"):
                facts = asked[part].result() if part in asked else None
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
    """The engine and the loader that `auto` means here; (None, None) where nothing of an engine is asked for or here."""
    asked = options.engine != "auto" or options.loader != "auto"
    if not asked and installed.version("torch") is None:
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
        told = f"{size(memory.available)} of {size(memory.total)} free"
        checks.append(Check("machine", "memory", "ok" if memory.available > LEAST_MEMORY else "warn", told))
    for name, place in (("disk", folder), ("model cache", model_cache())):
        checks.append(disk_check(name, place))
    return checks


def disk_check(name: str, place: Path, usage: Callable[[Path], int] | None = None) -> Check:
    """Free space where `place` is or will be. `usage` gives the free bytes of a folder."""
    there = next((each for each in (place, *place.parents) if each.exists()), Path("/"))
    free = usage(there) if usage else shutil.disk_usage(there).free
    status = "ok" if free > LEAST_DISK else "warn"
    fix = None if status == "ok" else ("--dir" if name == "disk" else "HF_HOME")
    return Check("machine", name, status, f"{size(free)} free at {place}", fix)


def model_cache() -> Path:
    """Where Hugging Face keeps downloaded models."""
    home = os.environ.get("HF_HOME") or Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache") / "huggingface"
    return Path(os.environ.get("HF_HUB_CACHE") or Path(home) / "hub").expanduser()


def torch_checks(torch: TorchFacts | Broken | None, installed: Installed, *, needed: bool) -> list[Check]:
    """What the engine's packages are, what torch was built for, and its devices with their precision."""
    missing = installed.missing("server")
    if missing and needed:
        return [Check("engine", "packages", "broken", f"without {', '.join(missing)}", install_command("server"))]
    if torch is None:
        told = "none: only a client of a server elsewhere works here"
        return [Check("engine", "packages", "missing", told, install_command("server"))]
    if isinstance(torch, Broken):
        fix = f"pip install --force-reinstall torch=={KNOWN['torch'][0]}"
        version = installed.version("torch")
        return [Check("engine", "torch", "broken", f"{version} is installed, but: {torch.why}", fix)]
    built = Check("engine", "torch", "ok", f"{torch.version}, built for {torch.build}")
    return [built, *device_checks(torch)]


def device_checks(torch: TorchFacts) -> list[Check]:
    """One line per GPU, or the CPU."""
    lines: list[Check] = []
    for gpu in torch.devices:
        precision = "bfloat16" if gpu.bfloat16 else "no bfloat16: fp16 with an fp32 LoRA"
        told = (
            f"{gpu.name}, {size(gpu.free)} of {size(gpu.total)} free, compute capability {gpu.capability}, {precision}"
        )
        lines.append(Check("engine", f"cuda:{gpu.index}", "ok", told))
    if torch.driver_gpus and not torch.devices:
        told = f"{', '.join(torch.driver_gpus)} is here, and this torch ({torch.build} build) cannot use it"
        lines.append(Check("engine", "GPU", "warn", told, f"pip install --force-reinstall torch=={KNOWN['torch'][0]}"))
    if not torch.devices:
        also = "; mps with --device mps" if torch.mps else ""
        lines.append(Check("engine", "device", "ok", f"cpu, {torch.threads} threads, float32{also}"))
    return lines


def engine_check(what: str, package: str, facts: EngineFacts | Broken | None, installed: Installed) -> Check:
    """vLLM or Unsloth, where it is the one that is used."""
    other = "--engine embedded" if package == "vllm" else "--loader peft"
    if facts is None:
        return Check("engine", what, "broken", f"{package} is not installed", f"{install_command(package)}, or {other}")
    name, version = installed.found(package) or (package, "")
    if isinstance(facts, Broken):
        told = f"{name} {version} is installed, but: {facts.why}"
        return Check("engine", what, "broken", told, f"{install_command(package)}, or {other}")
    return Check("engine", what, "ok", f"{name} {version} on {facts.platform}")


def size(count: int) -> str:
    """Bytes, as a person reads them."""
    return f"{count / GIB:.1f} GiB"
