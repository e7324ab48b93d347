"""The connection between the first learner of a team and one on another machine, which listens.

Both prove that they have the team's key (HMAC, as `multiprocessing.connection` does it). What follows is not encrypted:
it is for a network as trusted as that of a cluster of your own.
"""

from __future__ import annotations

import os
import socket
import threading
import time
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from multiprocessing import AuthenticationError
from multiprocessing.connection import Connection, answer_challenge, deliver_challenge
from queue import Empty, Full, Queue

from ..protocol import TEAM_KEY_VARIABLE

FOUND_SECONDS = 120.0
"""How long the first learner looks for one that does not listen yet, since it imports Python modules before."""
COMING_SECONDS = 3600.0
"""How long that one waits for the first, which starts when all have a place and the base."""
PROOF_SECONDS = 10.0
"""How long a peer has for its whole proof, however it spreads its bytes."""
MAX_PROOFS = 64
"""Proofs under way at once; one more peer ends the oldest. A peer that has the key proves it in milliseconds."""


def accepted(host: str, port: int) -> Connection:
    """Listen until the first learner has come. Raises OSError if the address is taken, or nobody comes: the first learner,
    or what should start it, may have ended. Proofs run side by side, so a slow stranger delays nobody."""
    arrived: Queue[Connection] = Queue(1)
    with socket.create_server((host, port)) as listening:
        threading.Thread(target=_accept, args=(listening, arrived), name="accept", daemon=True).start()
        try:
            return arrived.get(timeout=COMING_SECONDS)
        except Empty:
            raise TimeoutError(f"no first learner came to {host}:{port} within {COMING_SECONDS:g} s") from None
        finally:
            with suppress(OSError):  # macOS has no shutdown of a listening socket
                listening.shutdown(socket.SHUT_RDWR)  # wakes the thread that accepts


def _accept(listening: socket.socket, arrived: Queue[Connection]) -> None:
    """Let each peer prove the key in a thread of its own, until the listening socket is closed."""

    def prove(peer: socket.socket) -> None:
        with suppress(AuthenticationError, AssertionError, EOFError, OSError):
            connection = _authenticated(peer, deliver_challenge, answer_challenge)
            try:
                arrived.put_nowait(connection)
            except Full:
                connection.close()

    peers: deque[socket.socket] = deque()
    with suppress(OSError):
        while True:
            peer = listening.accept()[0]
            threading.Thread(target=prove, args=(peer,), name="proof", daemon=True).start()
            peers.append(peer)
            if len(peers) > MAX_PROOFS:
                _hang_up(peers.popleft())


def connected(address: str) -> Connection:
    """Connect to the learner that listens at HOST:PORT. Raises OSError if it does not, or does not know the key."""
    host, _, port = address.rpartition(":")
    deadline = time.monotonic() + FOUND_SECONDS
    while True:
        try:
            peer = socket.create_connection((host, int(port)), PROOF_SECONDS)
            return _authenticated(peer, answer_challenge, deliver_challenge)
        except (AuthenticationError, AssertionError) as error:  # Python 3.11 asserts the other side's first words
            raise OSError(f"what listens at {address} is no learner of this team: {error}") from error
        except (EOFError, OSError) as error:  # it does not listen yet, or has hung up
            if time.monotonic() > deadline:
                raise OSError(f"no learner listens at {address}: {error!r}") from error
            time.sleep(0.2)


def _authenticated(peer: socket.socket, *steps: Callable[[Connection, bytes], None]) -> Connection:
    """The connection to a peer after the `steps` of the proof. Closes `peer`. Raises AuthenticationError, AssertionError,
    EOFError, OSError: also for a peer that takes longer than PROOF_SECONDS."""
    with peer:
        peer.settimeout(None)
        peer.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)  # a message is a header and then its bytes
        peer.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        late = threading.Timer(PROOF_SECONDS, _hang_up, (peer,))  # a limit of a read would begin anew with each byte
        late.daemon = True
        connection = Connection(os.dup(peer.fileno()))
        late.start()
        try:
            for step in steps:
                step(connection, _key())
        except BaseException:
            connection.close()
            raise
        finally:
            late.cancel()
        return connection


def _hang_up(peer: socket.socket) -> None:
    """End a connection while another thread reads from it; one that is closed already stays so."""
    with suppress(OSError):
        peer.shutdown(socket.SHUT_RDWR)


def _key() -> bytes:
    return os.environ[TEAM_KEY_VARIABLE].encode()
