"""The connection between the first learner of a team and one on another machine, which listens.

Both prove that they have the team's key (HMAC, as `multiprocessing.connection` does it). What follows is not encrypted:
it is for a network as trusted as a Ray cluster's.
"""

from __future__ import annotations

import os
import socket
import struct
import time
from contextlib import suppress
from multiprocessing import AuthenticationError
from multiprocessing.connection import Connection, answer_challenge, deliver_challenge

from ..protocol import TEAM_KEY_VARIABLE

FOUND_SECONDS = 120.0
"""How long the first learner looks for one that does not listen yet, since it imports Python modules before."""
COMING_SECONDS = 3600.0
"""How long that one waits for the first, which starts when all have a place and the base."""
PROOF_SECONDS = 10
"""A stranger that does not prove its key in time is left."""


def accepted(host: str, port: int) -> Connection:
    """Listen until the first learner has come. Raises OSError if the address is taken, or nobody comes: the first learner,
    or what should start it, may have ended."""
    deadline = time.monotonic() + COMING_SECONDS
    with socket.create_server((host, port)) as listening:
        while True:
            listening.settimeout(max(0.1, deadline - time.monotonic()))
            peer = listening.accept()[0]
            with suppress(AuthenticationError, AssertionError, EOFError, OSError):
                connection = _connection(peer)
                deliver_challenge(connection, _key())
                answer_challenge(connection, _key())
                return _proved(connection)


def connected(address: str) -> Connection:
    """Connect to the learner that listens at HOST:PORT. Raises OSError if it does not, or does not know the key."""
    host, _, port = address.rpartition(":")
    deadline = time.monotonic() + FOUND_SECONDS
    while True:
        try:
            connection = _connection(socket.create_connection((host, int(port)), PROOF_SECONDS))
            try:
                answer_challenge(connection, _key())
                deliver_challenge(connection, _key())
                return _proved(connection)
            except BaseException:
                connection.close()
                raise
        except (AuthenticationError, AssertionError) as error:  # Python 3.11 asserts the other side's first words
            raise OSError(f"what listens at {address} is no learner of this team: {error}") from error
        except (EOFError, OSError) as error:  # it does not listen yet, or waits for a stranger's proof
            if time.monotonic() > deadline:
                raise OSError(f"no learner listens at {address}: {error!r}") from error
            time.sleep(0.2)


def _connection(peer: socket.socket) -> Connection:
    peer.settimeout(None)
    peer.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)  # a message is a header and then its bytes
    peer.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    _limit_reads(peer, PROOF_SECONDS)
    return Connection(peer.detach())


def _proved(connection: Connection) -> Connection:
    with socket.socket(fileno=os.dup(connection.fileno())) as peer:
        _limit_reads(peer, 0)
    return connection


def _limit_reads(peer: socket.socket, seconds: int) -> None:
    """Let a read that waits longer raise OSError. 0: no limit."""
    peer.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, struct.pack("ll", seconds, 0))


def _key() -> bytes:
    return os.environ[TEAM_KEY_VARIABLE].encode()
