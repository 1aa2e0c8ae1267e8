"""Connections that end at a deadline and go to checked addresses only.

A name is resolved once, and the connection goes to an address that was checked: a second answer of the name server
changes nothing (DNS rebinding). The certificate must still be that of the name.
"""

from __future__ import annotations

import io
import ipaddress
import socket
import ssl
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

#: Host name -> addresses as text.
Resolver: TypeAlias = Callable[[str], Sequence[str]]


def connect(scheme: str, host: str, port: int, addresses: Sequence[str], deadline: float) -> socket.socket:
    """Connect to the first address that answers, under the name of the host.

    Raises:
        OSError: none of them answers (TimeoutError: not before the deadline), or the certificate is not the host's.
    """
    connection = _first_that_answers(port, addresses, deadline)
    if scheme == "http":
        return connection
    try:
        connection.settimeout(time_left(deadline))
        return ssl.create_default_context().wrap_socket(connection, server_hostname=host)
    except BaseException:
        connection.close()
        raise


def _first_that_answers(port: int, addresses: Sequence[str], deadline: float) -> socket.socket:
    refused: OSError | None = None
    for position, address in enumerate(addresses):
        try:
            timeout = time_left(deadline) / (len(addresses) - position)
            return socket.create_connection((address, port), timeout=timeout)
        except OSError as error:
            refused = error
    raise refused or OSError("no address")


def is_public(address: str) -> bool:
    """Return whether an address is one of the open internet: not private, loopback, link-local, mapped or reserved."""
    ip = ipaddress.ip_address(address.partition("%")[0])
    if isinstance(ip, ipaddress.IPv6Address) and (ip.ipv4_mapped or ip.sixtofour or ip.teredo or ip.is_site_local):
        return False
    return ip.is_global and not (ip.is_private or ip.is_multicast or ip.is_reserved or ip.is_unspecified)


def resolve(host: str) -> list[str]:
    """Ask the system for the addresses of a host."""
    return list(dict.fromkeys(str(info[4][0]) for info in socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)))


def resolve_until(deadline: float, resolver: Resolver, host: str) -> Sequence[str]:
    """Call a resolver, which knows no timeout, in a thread that is left behind at the deadline."""
    done: list[Any] = []

    def run() -> None:
        try:
            done.append(resolver(host))
        except Exception as error:
            done.append(error)

    thread = threading.Thread(target=run, name="resolve", daemon=True)
    thread.start()
    thread.join(time_left(deadline))
    if not done:
        raise TimeoutError
    if isinstance(done[0], Exception):
        raise done[0]
    return done[0]


def time_left(deadline: float) -> float:
    """Return the seconds until a moment of `time.monotonic`; raise TimeoutError if there are none."""
    left = deadline - time.monotonic()
    if left <= 0:
        raise TimeoutError
    return left


class TimedReader(io.RawIOBase):
    """A socket for `http.client`: each wait for bytes ends at the deadline, however slowly they drip."""

    def __init__(self, connection: socket.socket, deadline: float) -> None:
        super().__init__()
        self._connection = connection
        self._deadline = deadline

    def makefile(self, mode: str) -> io.BufferedReader:
        """Return a buffered reader; `http.client` asks for one."""
        return io.BufferedReader(self)

    def readable(self) -> bool:
        """Return True."""
        return True

    def readinto(self, buffer: Any) -> int:
        """Read what is there, or wait until the deadline."""
        self._connection.settimeout(time_left(self._deadline))
        return self._connection.recv_into(buffer)
