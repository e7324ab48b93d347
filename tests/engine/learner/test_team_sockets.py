"""The connection of learners on two machines: who has no key, or says nothing, is left, and the first learner is served."""

from __future__ import annotations

import contextlib
import socket
import threading
from collections.abc import Callable
from multiprocessing.connection import Connection

import pytest

from offbook.engine.learner import team_sockets
from offbook.engine.protocol import TEAM_KEY_VARIABLE

HOST = "127.0.0.1"


@pytest.fixture(autouse=True)
def key(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(TEAM_KEY_VARIABLE, "key of the test")
    monkeypatch.setattr(team_sockets, "PROOF_SECONDS", 1)


@pytest.fixture
def listening() -> tuple[int, Callable[[], Connection]]:
    """The port at which a thread listens for the first learner, and a function that waits for its connection."""
    with socket.create_server((HOST, 0)) as free:
        port = int(free.getsockname()[1])
    found: list[Connection] = []
    thread = threading.Thread(target=lambda: found.append(team_sockets.accepted(HOST, port)), daemon=True)
    thread.start()

    def wait() -> Connection:
        thread.join(20)
        return found[0]

    return port, wait


def test_tasks_go_both_ways_and_its_end_is_seen(listening: tuple[int, Callable[[], Connection]]) -> None:
    port, wait = listening
    first = team_sockets.connected(f"{HOST}:{port}")
    other = wait()
    message = bytes(3_000_000)
    writer = threading.Thread(target=first.send_bytes, args=(message,))
    writer.start()
    assert other.recv_bytes() == message
    writer.join()
    idle = threading.Event()
    threading.Timer(1.5, lambda: (idle.set(), other.send_bytes(b"late"))).start()  # longer than a stranger may take
    assert first.recv_bytes() == b"late" and idle.is_set()
    first.close()
    with pytest.raises(EOFError):
        other.recv_bytes()


def test_strangers_are_left_and_the_first_learner_comes_after_them(
    listening: tuple[int, Callable[[], Connection]],
) -> None:
    port, wait = listening
    with reach(port), reach(port) as rude:
        rude.sendall(b"GET / HTTP/1.1\r\n\r\n")
        first = team_sockets.connected(f"{HOST}:{port}")
    first.send_bytes(b"hello")
    assert wait().recv_bytes() == b"hello"


def test_strangers_that_send_a_byte_at_a_time_delay_nobody(
    listening: tuple[int, Callable[[], Connection]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(team_sockets, "PROOF_SECONDS", 60)
    port, wait = listening
    slow = [drip(port) for _ in range(3)]
    assert [peer.recv(1) for peer, _ in slow] == [b"\0"] * 3, "each is challenged, and none waits for another"
    first = team_sockets.connected(f"{HOST}:{port}")
    first.send_bytes(b"hello")
    assert wait().recv_bytes() == b"hello"
    assert all(sender.is_alive() for _, sender in slow)
    for peer, _ in slow:
        peer.close()


def test_a_stranger_has_one_deadline_for_its_whole_proof(listening: tuple[int, Callable[[], Connection]]) -> None:
    port, _ = listening
    peer, sender = drip(port)
    sender.join(20)
    assert not sender.is_alive(), "a byte at a time kept the connection open"
    peer.close()


def reach(port: int) -> socket.socket:
    """A connection to what listens there, or is about to."""
    while True:
        try:
            return socket.create_connection((HOST, port), 20)
        except ConnectionRefusedError:
            continue


def drip(port: int) -> tuple[socket.socket, threading.Thread]:
    """A peer that announces an answer and sends it a byte at a time, until either side hangs up."""
    peer = reach(port)
    peer.sendall(b"\0\0\0\xff")

    def send() -> None:
        with contextlib.suppress(OSError):
            while not threading.Event().wait(0.2):
                peer.sendall(b"x")

    sender = threading.Thread(target=send, daemon=True)
    sender.start()
    return peer, sender


def test_one_more_stranger_than_can_prove_at_once_ends_the_oldest(
    listening: tuple[int, Callable[[], Connection]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(team_sockets, "MAX_PROOFS", 1)
    monkeypatch.setattr(team_sockets, "PROOF_SECONDS", 60)
    port, wait = listening
    with contextlib.closing(drip(port)[0]) as oldest:
        first = team_sockets.connected(f"{HOST}:{port}")
        wait()
        while oldest.recv(100):  # its challenge, and then the end
            pass
    first.close()


def test_another_key_is_an_error_that_names_the_address(
    listening: tuple[int, Callable[[], Connection]], monkeypatch: pytest.MonkeyPatch
) -> None:
    port, _ = listening
    own = team_sockets.__dict__["_key"]
    thread = threading.current_thread()
    monkeypatch.setattr(team_sockets, "_key", lambda: b"another" if threading.current_thread() is thread else own())
    with pytest.raises(OSError, match=f"what listens at {HOST}:{port} is no learner of this team: "):
        team_sockets.connected(f"{HOST}:{port}")


def test_one_to_whom_nobody_comes_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(team_sockets, "COMING_SECONDS", 0.5)
    with pytest.raises(TimeoutError):
        team_sockets.accepted(HOST, 0)


def test_nobody_there_is_an_error_that_names_the_address(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(team_sockets, "FOUND_SECONDS", 0.5)
    with socket.socket() as closed:
        closed.bind((HOST, 0))
        address = f"{HOST}:{closed.getsockname()[1]}"
        with pytest.raises(OSError, match=f"no learner listens at {address}: .*Refused"):
            team_sockets.connected(address)
