"""A vLLM on TCP, and Offbook's server in front of that very process: what benchmarks/gateway.py and swap.py start."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import httpx
import psutil

START_SECONDS = 600


@dataclass(frozen=True)
class Both:
    """The URL of each, and its process."""

    vllm: str
    gateway: str
    vllm_process: psutil.Process
    gateway_process: psutil.Process

    def cpu_seconds(self) -> dict[str, float]:
        """What each has computed so far: the gateway, vLLM's own web server, and the processes in which it samples."""
        inside = self.vllm_process.children(recursive=True)
        web = [each for each in inside if "api_server" in " ".join(each.cmdline())]
        return {
            "gateway": _seconds(self.gateway_process),
            "vLLM's web server": sum(_seconds(each) for each in web),
            "vLLM's engine": sum(_seconds(each) for each in inside if each not in web),
        }


@contextmanager
def both(base: Path, *, train: bool = False, scripted: bool = False) -> Iterator[Both]:
    """Started on free ports, ended with the block. `scripted`: a vLLM that computes nothing, see scripted_vllm.py."""
    with tempfile.TemporaryDirectory(prefix="gateway-") as folder:
        ports = free_ports(2)
        urls = [f"http://127.0.0.1:{port}" for port in ports]
        vllm = ["-m", "offbook.engine.inference.vllm.command", "--model", str(base), "--served-model-name", "base"]
        vllm += ["--port", str(ports[0]), "--parent-pid", str(os.getpid()), "--max-model-len", "1024"]
        if scripted:
            vllm = [str(Path(__file__).with_name("scripted_vllm.py")), str(ports[0])]
        gateway = ["-m", "offbook.server", "--model", str(base), "--vllm-url", urls[0], "--port", str(ports[1])]
        gateway += ["--dir", folder, *([] if train else ["--inference-only"])]
        processes: list[subprocess.Popen[bytes]] = []
        signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that what was started is ended
        try:
            for name, url, words in (("vllm", urls[0], vllm), ("gateway", urls[1], gateway)):
                log = Path(folder, f"{name}.log")
                with log.open("wb") as output:
                    command = [sys.executable, *words]
                    processes.append(subprocess.Popen(command, stdout=output, stderr=output, start_new_session=True))
                await_health(url, processes[-1], log)
            yield Both(urls[0], urls[1], psutil.Process(processes[0].pid), psutil.Process(processes[1].pid))
        except BaseException:
            for log in sorted(Path(folder).glob("*.log")):
                print(f"---- {log.name}\n{log.read_text(errors='replace')[-2000:]}", file=sys.stderr)
            raise
        finally:
            for process in reversed(processes):
                process.terminate()
                process.wait()


def await_health(url: str, process: subprocess.Popen[bytes], log: Path) -> None:
    """Wait until a server answers; ends the program with its log when it does not."""
    deadline = time.monotonic() + START_SECONDS
    while time.monotonic() < deadline:
        if process.poll() is not None:
            break
        try:
            answer = httpx.get(f"{url}/health", trust_env=False)
            if answer.is_success and b'"starting"' not in answer.content:
                return
        except httpx.TransportError:
            pass
        time.sleep(0.5)
    raise SystemExit(f"{url} did not start:\n{log.read_text(errors='replace')[-3000:]}")


def free_ports(count: int) -> list[int]:
    """Ports of this machine that nobody listens on."""
    sockets = [socket.socket() for _ in range(count)]
    for each in sockets:
        each.bind(("127.0.0.1", 0))
    ports = [each.getsockname()[1] for each in sockets]
    for each in sockets:
        each.close()
    return ports


def _seconds(process: psutil.Process) -> float:
    used = process.cpu_times()
    return used.user + used.system
