"""Files and URLs -> bytes, only where `ImageAccess` allows it.

Nothing is read by default. A file must lie in an allowed folder after symbolic links are resolved. A URL is fetched
once, from an allowed host, and frozen; the name of the host is resolved once, every address is checked, and the
connection goes to a checked address, so that a second answer of the name server changes nothing. Redirects are checked
like the first URL. One deadline bounds name, connection, headers and body together. Proxies are never asked.
"""

from __future__ import annotations

import http.client
import os
import stat
import time
from pathlib import Path
from urllib.parse import quote, unquote, urljoin, urlsplit

import msgspec

from latepix.errors import ImageError
from latepix.trace.decode import ImageLimits
from latepix.trace.net import Resolver, TimedReader, connect, is_public, resolve, resolve_until, time_left

_PORTS = {"http": 80, "https": 443}
_REDIRECTS = frozenset({301, 302, 303, 307, 308})
_MAX_REDIRECTS = 5
_CHUNK_BYTES = 1 << 16
_SHOWN_CHARS = 24


class ImageAccess(msgspec.Struct, frozen=True):
    """Where pictures may be read from, beside the source itself. The sizes are bounded by `ImageLimits`.

    Attributes:
        folders: files below them may be read.
        hosts: names (or `*.name` for all names below it) that http(s) URLs may point to, without port.
        allow_private: also connect to private, loopback and other special addresses, for hosts that are listed
            literally.
        timeout_s: for one picture, redirects included.
    """

    folders: tuple[Path, ...] = ()
    hosts: tuple[str, ...] = ()
    allow_private: bool = False
    timeout_s: float = 10.0


class _Target(msgspec.Struct, frozen=True):
    """A checked URL."""

    scheme: str
    host: str
    port: int
    path: str
    netloc: str
    is_literal: bool


def shown(text: str, *, end: bool = False) -> str:
    """Return at most 24 characters of a text, for error messages: it may be a picture or hold a secret."""
    if len(text) <= _SHOWN_CHARS:
        return repr(text)
    return repr("..." + text[3 - _SHOWN_CHARS :] if end else text[: _SHOWN_CHARS - 3] + "...")


def read_file(path: str, access: ImageAccess | None, limits: ImageLimits) -> bytes:
    """Read a file that lies in an allowed folder.

    Args:
        path: a path, or a file:// URL of this machine.
        access: None allows nothing.
        limits: bounds the size.
    Raises:
        ImageError: `not_allowed`, `unreadable_file`, `too_many_bytes`.
    """
    name = shown(path, end=True)
    if access is None or not access.folders:
        raise ImageError(
            f"Reading pictures from files is off here, got {name}. Pass bytes or a data URL, or allow the folder "
            "(images.allow_folders, ImageAccess.folders).",
            "not_allowed",
        )
    try:
        real = _local_path(path).resolve()
        is_inside = any(real.is_relative_to(folder.resolve()) for folder in access.folders)
    except ImageError:
        raise
    except (OSError, RuntimeError, ValueError) as error:  # a loop of links, a NUL, a name that is too long
        raise ImageError(f"{name} is no path of a file ({type(error).__name__}).", "unreadable_file") from error
    if not is_inside:
        raise ImageError(
            f"The file {name} lies outside the allowed folders, after links are resolved. Add its folder to "
            "images.allow_folders.",
            "not_allowed",
        )
    try:
        # Not through a link that came in since, and without waiting for a pipe.
        descriptor = os.open(real, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK)
        try:
            status = os.fstat(descriptor)
            if not stat.S_ISREG(status.st_mode):
                raise ImageError(f"{name} is not a regular file.", "unreadable_file")
            limits.check_bytes(status.st_size)
            with os.fdopen(descriptor, "rb", closefd=False) as file:
                data = file.read(limits.max_bytes + 1)
        finally:
            os.close(descriptor)
    except OSError as error:
        raise ImageError(f"The file {name} cannot be read: {error.strerror}.", "unreadable_file") from error
    limits.check_bytes(len(data))
    return data


def fetch_url(url: str, access: ImageAccess | None, limits: ImageLimits, *, resolver: Resolver = resolve) -> bytes:
    """Fetch an http(s) URL of an allowed host.

    Args:
        url: the address; redirects are followed as long as each is allowed.
        access: None allows nothing.
        limits: bounds the size.
        resolver: asks the name server.
    Raises:
        ImageError: `not_allowed`, `fetch_failed`, `fetch_timeout`, `too_many_bytes`.
    """
    if access is None or not access.hosts:
        raise ImageError(
            f"Fetching pictures is off here, got {shown(url)}. Send a data URL, or allow the host (images.allow_hosts, "
            "ImageAccess.hosts).",
            "not_allowed",
        )
    deadline = time.monotonic() + access.timeout_s
    for _ in range(_MAX_REDIRECTS + 1):
        target = _check_url(url, access)
        try:
            answer = _get(target, access, limits, deadline, resolver)
        except ImageError:
            raise
        except TimeoutError as error:
            raise ImageError(
                f"The picture from {shown(target.host, end=True)} did not arrive within {access.timeout_s:g} s "
                "(images.fetch_timeout_s).",
                "fetch_timeout",
            ) from error
        except (OSError, http.client.HTTPException, ValueError) as error:
            reason = error.strerror if isinstance(error, OSError) and error.strerror else type(error).__name__
            raise ImageError(
                f"The picture could not be fetched from {shown(target.host, end=True)}: {str(reason)[:80]}.",
                "fetch_failed",
            ) from error
        if isinstance(answer, bytes):
            return answer
        url = urljoin(url, answer)
    raise _failed(target, f"more than {_MAX_REDIRECTS} redirects")


def _failed(target: _Target, what: str) -> ImageError:
    return ImageError(f"The picture could not be fetched from {shown(target.host, end=True)}: {what}.", "fetch_failed")


def _local_path(text: str) -> Path:
    if text[:5].lower() != "file:":
        return Path(text)
    parts = urlsplit(text)
    if parts.netloc.lower() not in ("", "localhost"):
        raise ImageError(
            f"The file URL names another machine, {shown(parts.netloc, end=True)}; write file:///path.", "not_allowed"
        )
    return Path(unquote(parts.path))


def _check_url(url: str, access: ImageAccess) -> _Target:
    """Take a URL apart; what browsers and servers could read in two ways is refused."""
    try:
        parts = urlsplit(url)
        port = parts.port or _PORTS.get(parts.scheme, 0)
        host = (parts.hostname or "").rstrip(".")
        host = host if host.isascii() else host.encode("idna").decode("ascii")
    except ValueError as error:
        raise ImageError(f"{shown(url)} is no URL: it cannot be taken apart.", "not_allowed") from error
    is_plain = not any(char <= " " or char in "\\\x7f" for char in url) and not {"@", "%"} & set(parts.netloc)
    if parts.scheme not in _PORTS or not host or not is_plain:
        raise ImageError(
            f"{shown(url)} is no URL of a picture: wanted http(s)://host/..., without a user name, spaces, control "
            "characters or backslashes.",
            "not_allowed",
        )
    names = [entry.lower().strip("[]").rstrip(".") for entry in access.hosts]
    if host not in names and not any(name.startswith("*.") and host.endswith(name[1:]) for name in names):
        raise ImageError(
            f"The host {shown(host, end=True)} is not allowed. Add it to images.allow_hosts, or send the picture "
            "inline.",
            "not_allowed",
        )
    path = quote(parts.path or "/", safe="/%:@!$&'()*+,;=~")
    if parts.query:
        path += "?" + quote(parts.query, safe="/%:@!$&'()*+,;=~?")
    bracketed = f"[{host}]" if ":" in host else host
    netloc = bracketed if port == _PORTS[parts.scheme] else f"{bracketed}:{port}"
    return _Target(parts.scheme, host, port, path, netloc, host in names)


def _get(target: _Target, access: ImageAccess, limits: ImageLimits, deadline: float, resolver: Resolver) -> bytes | str:
    """Return the body, or where the answer redirects to."""
    addresses = resolve_until(deadline, resolver, target.host)
    if not addresses:
        raise _failed(target, "its name has no address")
    if not (access.allow_private and target.is_literal) and not all(is_public(address) for address in addresses):
        raise ImageError(
            f"The host {shown(target.host, end=True)} has a private or special address. List the host itself in "
            "images.allow_hosts and set images.allow_private_addresses if it should be reached.",
            "not_allowed",
        )
    with connect(target.scheme, target.host, target.port, addresses, deadline) as connection:
        connection.settimeout(time_left(deadline))
        connection.sendall(
            f"GET {target.path} HTTP/1.1\r\nHost: {target.netloc}\r\nUser-Agent: latepix\r\nAccept: image/*\r\n"
            "Accept-Encoding: identity\r\nConnection: close\r\n\r\n".encode("ascii")
        )
        with http.client.HTTPResponse(TimedReader(connection, deadline), method="GET") as response:  # ty: ignore[invalid-argument-type]
            response.begin()
            if response.status in _REDIRECTS and (location := response.headers.get("Location")):
                return location
            if response.status != 200:
                raise _failed(target, f"HTTP status {response.status}")
            if response.headers.get("Content-Encoding", "identity").lower() != "identity":
                raise _failed(target, "the answer is compressed, which was not asked for")
            return _read_body(response, target, limits)


def _read_body(response: http.client.HTTPResponse, target: _Target, limits: ImageLimits) -> bytes:
    limits.check_bytes(response.length or 0)
    chunks: list[bytes] = []
    num_bytes = 0
    while chunk := response.read(_CHUNK_BYTES):
        num_bytes += len(chunk)
        limits.check_bytes(num_bytes)
        chunks.append(chunk)
    if response.length:
        raise _failed(target, f"it ended {response.length} bytes early")
    return b"".join(chunks)
