"""The listening socket of a server, and its URL."""

from __future__ import annotations

import errno
import socket

from offbook.base.errors import ConfigError
from offbook.base.http_access import is_loopback

ALL_ADDRESSES = ("0.0.0.0", "::", "")
"""Hosts that mean all addresses of this machine."""


def listen(host: str, port: int) -> socket.socket:
    """Open a listening TCP socket; port 0 takes a free one. Raises ConfigError that says which option to change."""
    try:
        family = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0][0]
        both = family == socket.AF_INET6 and host in ALL_ADDRESSES and socket.has_dualstack_ipv6()
        return socket.create_server((host, port), family=family, backlog=2048, dualstack_ipv6=both)
    except OSError as error:
        if error.errno == errno.EADDRINUSE:
            why = f"port {port} on {host} is taken by another program; choose another --port (0 takes a free one)"
        elif error.errno in (errno.EACCES, errno.EPERM):
            why = f"port {port} on {host} may not be used by this account; choose a --port above 1023"
        else:
            why = f"--host {host}, --port {port}: this machine cannot listen on this address ({error})"
        raise ConfigError(why) from error


def url_of(host: str, listener: socket.socket) -> str:
    """The URL of a listening server. For all addresses of the machine, it has the machine's name."""
    shown = socket.gethostname() if host in ALL_ADDRESSES else host
    return f"http://{f'[{shown}]' if ':' in shown else shown}:{listener.getsockname()[1]}"


def local_url(url: str, listener: socket.socket) -> str:
    """The URL for clients on this machine: loopback if the server listens on all addresses, else `url`."""
    name, _, port = url.removeprefix("http://").rpartition(":")
    if is_loopback(name) or name != socket.gethostname():
        return url
    only_ipv6 = listener.family == socket.AF_INET6 and listener.getsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY)
    return f"http://{'[::1]' if only_ipv6 else '127.0.0.1'}:{port}"
