"""One campaign: real processes under load, one of them hurt at a time, and what was promised checked after each."""

from __future__ import annotations

import contextlib
import random
import resource
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import httpx
import psutil
from safetensors.numpy import load_file

from offbook import tiny
from offbook.engine import checkpoint_files
from tests.server.servers import until

from . import supervised
from .damage import PARTS, Damaged, damage
from .promises import Promises

DECK = (
    *("client", "client", "program", "program", "stopped", "stopped", "server", "sampler", "learner"),
    *("disk full", "damage", "clock", "sft", "import"),
)
"""What fourteen events hurt; each fourteen in a new order."""
CLIENTS = 2
BACK_SECONDS = 900.0
"""Generous, for machines that are shared: a server that is not back by then is not coming back."""
FULL_BYTES = 64 * 1024
"""No file of server and learner grows beyond it while the disk is full."""
FULL_SECONDS = 2.0
STOPPED_SECONDS = 4.0
IMPORT_SECONDS = 8.0
"""Within which `offbook import` is killed, at random."""
JUMPS = (-3e7, -3e5, 3e5, 3e7)
"""Seconds by which the wall clock jumps."""


@dataclass
class Outcome:
    """Of one event. `broken`: promises that were not kept; `verify`: "clean", "named", or "" where the server ran on."""

    part: str
    how: str
    calls: int = 0  # answered since the last event, and looked up
    steps: int = 0
    unanswered: int = 0  # requests that had to be sent again
    verify: str = ""
    back: float = 0.0  # seconds until calls were answered again
    broken: list[str] = field(default_factory=list[str])

    def line(self) -> str:
        fate = "; ".join(self.broken) or "nothing lost"
        checked = f"{self.calls} calls, {self.steps} steps, {self.unanswered} sent again"
        verified = f", verify: {self.verify}" if self.verify else ""
        return f"{self.part} ({self.how}): {checked}; back after {self.back:.1f} s{verified}: {fate}"


def decks(count: int, chance: random.Random) -> list[str]:
    """What each of `count` events hurts."""
    parts: list[str] = []
    while len(parts) < count:
        parts += chance.sample(DECK, len(DECK))
    return parts[:count]


class Campaign:
    """Starts a server with the embedded engine and its clients; leaving the context ends them."""

    def __init__(self, folder: Path, seed: int) -> None:
        self.folder = folder / "dir"
        self._work = folder
        self._chance = random.Random(seed)
        self._clock = folder / "clock"
        self._offset = 0.0
        self._port = free_port()
        self._damages = 0
        self._stops = 0
        self._trainings = 0
        self._imports = 0
        self._journals: list[Path] = []
        self._clients: dict[str, subprocess.Popen[bytes]] = {}
        folder.mkdir(parents=True, exist_ok=True)
        self._log = (folder / "output.log").open("ab")
        self._http = httpx.Client(base_url=f"http://127.0.0.1:{self._port}", timeout=30, trust_env=False)
        self.promises = Promises(self.folder)
        shutil.copytree(tiny.path(), folder / "base")
        self._server = self._started()

    def __enter__(self) -> Campaign:
        return self

    def __exit__(self, *_: object) -> None:
        for process in (*self._clients.values(), self._server):
            if process.poll() is None:
                process.kill()
            process.wait()
        self._http.close()
        self._log.close()

    def begin(self) -> None:
        """Start the clients, and wait until each has trained a step."""
        self._await_healthy()
        for number in range(CLIENTS):
            self._start_client(f"agent-{number}")
        self._until(lambda: len(self.promises.trained) >= CLIENTS, "the first steps")

    def event(self, part: str) -> Outcome:
        """Hurt one part at a random moment, wait until calls are answered again, and check every promise."""
        time.sleep(self._chance.random() * 1.5)
        self._read()
        before = (len(self.promises.calls), len(self.promises.trained), self.promises.unanswered)
        outcome = Outcome(part, "")
        began = time.monotonic()
        try:
            EVENTS[part](self, outcome)
            self._await_service(trains=part in ("learner", "disk full"))
        except AssertionError as error:
            outcome.broken.append(f"not back: {error}")
        outcome.back = time.monotonic() - began
        outcome.broken += self.promises.broken()
        after = (len(self.promises.calls), len(self.promises.trained), self.promises.unanswered)
        outcome.calls, outcome.steps, outcome.unanswered = (b - a for a, b in zip(before, after, strict=True))
        return outcome

    def finish(self) -> Outcome:
        """The last check: training goes on, the clients end, and an ended server leaves a clean directory."""
        outcome = Outcome("the end", "SIGTERM of the server")
        try:
            self._await_service(trains=True)
            for process in self._clients.values():
                process.kill()
                process.wait()
            self._server.send_signal(signal.SIGTERM)
            self._server.wait(BACK_SECONDS)
            self._verified(outcome)
            self._read()
            for name, applied in self.promises.steps().items():
                self._check_newest(name, applied, outcome)
        except AssertionError as error:
            outcome.broken.append(f"not back: {error}")
        outcome.calls, outcome.steps = len(self.promises.calls), len(self.promises.trained)
        outcome.broken += self.promises.broken()
        return outcome

    # ---- what is done

    def kill_client(self, outcome: Outcome) -> None:
        name = self._chance.choice(sorted(self._clients))
        outcome.how = f"SIGKILL of {name}"
        self._clients[name].kill()
        self._clients[name].wait()
        until(lambda: not self._programs(name), f"the programs of {name} have ended with it", BACK_SECONDS)
        self._start_client(name)

    def kill_program(self, outcome: Outcome) -> None:
        """Its rollout fails, or `offbook wrap` ends with its signal; its client goes on."""
        outcome.how = "SIGKILL"
        until(lambda: self._programs(), "a program runs", BACK_SECONDS)[0].kill()

    def stop(self, outcome: Outcome) -> None:
        """SIGSTOP for a while: what waits for the stopped process goes on when it does."""
        peers: dict[str, Callable[[], psutil.Process | subprocess.Popen[bytes]]] = {
            "server": lambda: self._server,
            "sampler": lambda: self._child("inference"),
            "learner": lambda: self._child("engine.learner"),
            "client": lambda: self._clients[min(self._clients)],
        }
        self._stops += 1
        name = sorted(peers)[self._stops % len(peers)]
        outcome.part, outcome.how = f"stopped: {name}", f"SIGSTOP for {STOPPED_SECONDS:.0f} s"
        process = peers[name]()
        process.send_signal(signal.SIGSTOP)
        try:
            time.sleep(STOPPED_SECONDS)
        finally:
            process.send_signal(signal.SIGCONT)

    def kill_server(self, outcome: Outcome) -> None:
        outcome.how = "SIGKILL"
        self._stop_server()
        self._verified(outcome)
        self._server = self._started()

    def kill_sampler(self, outcome: Outcome) -> None:
        outcome.how = "SIGKILL"
        self._child("inference").kill()

    def kill_learner(self, outcome: Outcome) -> None:
        outcome.how = "SIGKILL"
        self._child("engine.learner").kill()

    def fill_disk(self, outcome: Outcome) -> None:
        """Neither server nor learner can make a file larger than a few pages, for a while."""
        outcome.how = f"no file beyond {FULL_BYTES} bytes for {FULL_SECONDS:.0f} s"
        pids = [self._server.pid, self._child("engine.learner").pid]
        _limit_files(pids, FULL_BYTES)
        try:
            time.sleep(FULL_SECONDS)
        finally:
            _limit_files(pids, resource.RLIM_INFINITY)

    def jump_clock(self, outcome: Outcome) -> None:
        """Unclaimed calls are swept by the new clock before anything is checked."""
        self._offset += self._chance.choice(JUMPS)
        outcome.how = f"the wall clock is off by {self._offset:+.0f} s"
        self._clock.write_text(str(self._offset))
        time.sleep(2.5)

    def hurt_supervised(self, outcome: Outcome) -> None:
        """A supervised training in mid-epoch, its server or the learner is killed; the same command ends it."""
        self._trainings += 1
        name, hurt = f"sft-{self._trainings}", ("client", "server", "learner")[self._trainings % 3]
        journal = self._work / f"{name}.jsonl"
        self._journals.append(journal)
        words = [
            sys.executable,
            "-m",
            "tests.campaign.supervised",
            str(self._http.base_url),
            name,
            self._base(),
            str(journal),
        ]
        at = self._chance.randrange(1, supervised.UPDATES // 2)
        process = subprocess.Popen(words, stdout=self._log, stderr=self._log)
        try:
            step = until(lambda: (now := self._step(name)) >= at and now, f"step {at} of {name}", BACK_SECONDS)
            outcome.part, outcome.how = f"sft: {hurt}", f"SIGKILL at step {step} of {supervised.UPDATES}"
            if hurt == "client":
                process.kill()
            elif hurt == "learner":
                self._child("engine.learner").kill()
            else:
                self._stop_server()
                self._server = self._started()
                self._await_healthy()
            process.wait(BACK_SECONDS)
        finally:
            process.kill()
            process.wait()
        done = subprocess.run(words, stdout=self._log, stderr=self._log, timeout=BACK_SECONDS, check=False)
        assert done.returncode == 0, f"the training again ended with {done.returncode}: {self._tail()}"
        if (step := self._step(name)) != supervised.UPDATES:
            outcome.broken.append(f"twice or lost: {name} is at step {step} after {supervised.UPDATES} updates")

    def kill_import(self, outcome: Outcome) -> None:
        """`offbook import` of an agent's newest step is killed; the directory is whole, and the same command ends it."""
        self._imports += 1
        name = f"imported-{self._imports}"
        self._stop_server()
        models = self.folder / "default" / "models"
        newest = {path: checkpoint_files.steps(path)[:1] for path in sorted(models.glob("agent-*/checkpoints"))}
        folder = next(path for path, steps in newest.items() if steps)
        source = checkpoint_files.path_of(folder, newest[folder][0])
        words = ["import", str(source), "--model", name, "--base", self._base(), "--dir", str(self.folder)]
        process = subprocess.Popen([sys.executable, "-m", "offbook", *words], stdout=self._log, stderr=self._log)
        seconds = self._chance.random() * IMPORT_SECONDS
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(seconds)
        ended = process.poll() is not None
        process.kill()
        process.wait()
        outcome.how = "SIGKILL after its end" if ended else f"SIGKILL after {seconds:.1f} s"
        self._verified(outcome)
        if not (models / name).exists():
            self._command(*words)
        imported = checkpoint_files.path_of(models / name / "checkpoints", 1)
        if _tensors(imported) != _tensors(source):
            outcome.broken.append(f"lost: {name} is not the adapter that was imported")
        self._server = self._started()
        self._await_healthy()
        body = {"model": name, "messages": [{"role": "user", "content": "hi"}], "max_tokens": 2}
        answer = self._http.post("/v1/chat/completions", json=body, timeout=BACK_SECONDS)
        if answer.status_code != 200:
            outcome.broken.append(f"not back: {name} answers {answer.status_code}: {answer.text[:300]}")

    def damage_file(self, outcome: Outcome) -> None:
        self._stop_server()
        kept = self._work / "records.kept"
        shutil.rmtree(kept, ignore_errors=True)
        self._command("backup", "--dir", str(self.folder), "--output", str(kept))
        self._damages += 1
        order = [PARTS[(self._damages + shift) % len(PARTS)] for shift in range(len(PARTS))]
        done = next(found for part in order if (found := damage(self.folder, part, self._chance)) is not None)
        outcome.part, outcome.how = f"damage: {done.part}", done.how
        told = self._command("verify", "--dir", str(self.folder), fails=True)
        outcome.verify = "named" if done.named in told else "MISSED"
        if done.named not in told:
            outcome.broken.append(f"verify does not name {done.named} ({done.how}): {told}")
        self._mend(done, kept)
        self._server = self._started()

    def _mend(self, done: Damaged, kept: Path) -> None:
        """As the messages say: a backup for records, --repair for state; the server mends the rest itself."""
        if done.part in ("records", "missing records"):
            for end in ("-wal", "-shm"):
                Path(f"{self.folder / 'records.db'}{end}").unlink(missing_ok=True)
            shutil.copyfile(kept / "records.db", self.folder / "records.db")
        elif done.part == "state":
            self._command("verify", "--dir", str(self.folder), "--repair")
            self._read()
            self.promises.state.pop(done.model, None)
        elif done.step is not None:
            self._read()
            self.promises.roll_back(done.model, done.step)

    # ---- processes

    def _base(self) -> str:
        return str(self._work / "base")

    def _step(self, name: str) -> int:
        """The step of a model; 0 where there is none yet or no server."""
        try:
            answer = self._http.get(f"/api/models/{name}")
        except httpx.HTTPError:
            return 0
        return answer.json()["step"] if answer.status_code == 200 else 0

    def _started(self) -> subprocess.Popen[bytes]:
        words = [sys.executable, "-m", "tests.campaign.server", str(self._clock), "--dir", str(self.folder)]
        words += ["--model", self._base(), "--port", str(self._port), "--threads", "1"]
        return subprocess.Popen(words, stdout=self._log, stderr=self._log)

    def _start_client(self, name: str) -> None:
        journal = self._work / f"{name}-{len(self._journals)}.jsonl"
        self._journals.append(journal)
        words = [sys.executable, "-m", "tests.campaign.client", "--url", str(self._http.base_url), "--name", name]
        words += ["--journal", str(journal), "--seed", str(self._chance.randrange(2**31)), "--clock", str(self._clock)]
        self._clients[name] = subprocess.Popen(words, stdout=self._log, stderr=self._log)

    def _programs(self, client: str = "") -> list[psutil.Process]:
        """The running programs, of one client or of all."""
        found: list[psutil.Process] = []
        for process in psutil.process_iter():
            with contextlib.suppress(psutil.NoSuchProcess, psutil.AccessDenied):
                words = process.cmdline()
                of_it = any(word.startswith(str(self._work / client)) for word in words)
                if words[1:3] == ["-m", "tests.campaign.program"] and of_it and not _ended(process):
                    found.append(process)
        return found

    def _stop_server(self) -> None:
        """kill -9 of the server alone: its children have to follow."""
        children = psutil.Process(self._server.pid).children(recursive=True)
        self._server.kill()
        self._server.wait()
        until(lambda: all(_ended(child) for child in children), "the children have ended with the server", BACK_SECONDS)

    def _child(self, word: str) -> psutil.Process:
        def found() -> psutil.Process | None:
            with contextlib.suppress(psutil.NoSuchProcess):  # one that ends while they are listed
                for process in psutil.Process(self._server.pid).children():
                    if any(word in part for part in process.cmdline()):
                        return process
            return None

        return until(found, f"a child {word!r}", BACK_SECONDS)

    def _command(self, *words: str, fails: bool = False) -> str:
        """The output of a maintenance command. Raises AssertionError where it fails, or with `fails` does not."""
        argv = [sys.executable, "-m", "offbook", *words]
        done = subprocess.run(argv, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False)
        assert done.returncode == (1 if fails else 0), f"{' '.join(words)} ended with {done.returncode}: {done.stdout}"
        return done.stdout

    # ---- checks

    def _read(self) -> None:
        self.promises.read(self._journals)

    def _verified(self, outcome: Outcome) -> None:
        told = self._command("verify", "--dir", str(self.folder))
        outcome.verify = "clean" if " 0 damaged" in told else "damaged"
        if outcome.verify != "clean":
            outcome.broken.append(f"verify: {told}")

    def _check_newest(self, name: str, applied: int, outcome: Outcome) -> None:
        """One checkpoint for each request that was applied: none lost, none twice."""
        folder = self.folder / "default" / "models" / name / "checkpoints"
        newest = max(int(path.name) for path in folder.iterdir() if path.name.isdecimal())
        if newest != applied:
            outcome.broken.append(f"twice or lost: {name} is at step {newest}, {applied} requests were applied")

    def _await_healthy(self) -> None:
        def healthy() -> bool:
            assert self._server.poll() is None, f"the server ended with {self._server.returncode}: {self._tail()}"
            try:
                return self._http.get("/health").json().get("status") == "ok"
            except (httpx.HTTPError, ValueError):
                return False

        until(healthy, f"the server is ready: {self._tail()}", BACK_SECONDS)

    def _await_service(self, *, trains: bool) -> None:
        """Every client is answered again: two calls, and with `trains` a step of anybody."""
        self._await_healthy()
        self._read()
        calls = {name: self._answered(name) for name in self._clients}
        trained = len(self.promises.trained)
        self._until(
            lambda: all(self._answered(name) >= count + 2 for name, count in calls.items()),
            "every client is answered again",
        )
        if trains:
            self._until(lambda: len(self.promises.trained) > trained, "a step is trained again")

    def _answered(self, name: str) -> int:
        return sum(line["trajectory"].startswith(f"{name}-") for line in self.promises.calls.values())

    def _until(self, met: Callable[[], bool], what: str) -> None:
        def looked() -> bool:
            for name, process in self._clients.items():
                assert process.poll() is None, f"{name} ended by itself: {self._tail()}"
            assert self._server.poll() is None, f"the server ended by itself: {self._tail()}"
            self._read()
            return met()

        until(looked, what, BACK_SECONDS)

    def _tail(self) -> str:
        return (self._work / "output.log").read_text("utf-8", "replace")[-2000:]


EVENTS: dict[str, Callable[[Campaign, Outcome], None]] = {
    "client": Campaign.kill_client,
    "server": Campaign.kill_server,
    "sampler": Campaign.kill_sampler,
    "learner": Campaign.kill_learner,
    "program": Campaign.kill_program,
    "stopped": Campaign.stop,
    "disk full": Campaign.fill_disk,
    "damage": Campaign.damage_file,
    "clock": Campaign.jump_clock,
    "sft": Campaign.hurt_supervised,
    "import": Campaign.kill_import,
}


def _ended(process: psutil.Process) -> bool:
    try:
        return not process.is_running() or process.status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True


def _tensors(checkpoint: Path) -> dict[str, bytes]:
    return {name: tensor.tobytes() for name, tensor in load_file(checkpoint / checkpoint_files.ADAPTER).items()}


def _limit_files(pids: list[int], size: int) -> None:
    """The size that no file of these processes may grow beyond; writes then fail as on a disk that is full."""
    for pid in pids:
        try:
            _, hard = resource.prlimit(pid, resource.RLIMIT_FSIZE)
            resource.prlimit(pid, resource.RLIMIT_FSIZE, (size, hard))
        except ProcessLookupError:
            continue  # it has ended meanwhile, and its successor has the limits of its parent


def free_port() -> int:
    """A port that no other program gets while the server is down: systems give 32768 and above to who asks for any."""
    while True:
        port = random.SystemRandom().randrange(12_000, 32_000)
        with socket.socket() as tried, contextlib.suppress(OSError):
            tried.bind(("127.0.0.1", port))
            return port
