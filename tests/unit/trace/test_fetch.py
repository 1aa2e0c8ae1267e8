"""Paths and URLs: what is allowed is read once and frozen, everything else is refused with its reason."""

from __future__ import annotations

import os
import socket
import threading
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from latepix.errors import ImageError
from latepix.trace.fetch import ImageAccess, fetch_url, shown
from latepix.trace.ingress import ImageLimits, ingest_image
from latepix.trace.net import is_public
from tests.tiny.picture_server import PictureServer, Reply, picture_server, raw_server
from tests.tiny.pictures import draw_picture, encode

DATA = encode(draw_picture())
LOCAL = ImageAccess(hosts=("127.0.0.1",), allow_private=True, timeout_s=5)
LIMITS = ImageLimits()


def reason_of(source: Any, access: ImageAccess | None, **options: Any) -> str:
    with pytest.raises(ImageError) as caught:
        ingest_image(source, access=access, **options)
    return caught.value.reason


def fetch_reason(url: str, access: ImageAccess, addresses: Sequence[str]) -> str:
    with pytest.raises(ImageError) as caught:
        fetch_url(url, access, LIMITS, resolver=lambda host: addresses)
    return caught.value.reason


# --- files -------------------------------------------------------------------------------------------------------


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Return an allowed folder with a picture, beside a file that is not in it."""
    folder = tmp_path / "allowed"
    folder.mkdir()
    (folder / "a picture.png").write_bytes(DATA)
    (tmp_path / "secret.png").write_bytes(DATA)
    return folder


@pytest.mark.parametrize("form", ["path", "text", "url", "url with host", "part", "dots inside", "link inside"])
def test_a_file_in_an_allowed_folder_is_taken(folder: Path, form: str) -> None:
    path = folder / "a picture.png"
    (folder / "link.png").symlink_to(path)
    forms: dict[str, Any] = {
        "path": path,
        "text": str(path),
        "url": path.as_uri(),
        "url with host": path.as_uri().replace("file:///", "FILE://localhost/"),
        "part": {"type": "image", "path": str(path)},
        "dots inside": folder / ".." / "allowed" / "a picture.png",
        "link inside": folder / "link.png",
    }
    assert ingest_image(forms[form], access=ImageAccess(folders=(folder,))).data == DATA


def test_a_relative_path_is_one_of_the_working_directory(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(folder.parent)
    access = ImageAccess(folders=(Path("allowed"),))
    assert ingest_image("allowed/a picture.png", access=access).data == DATA
    assert reason_of("secret.png", access) == "not_allowed"


def test_an_allowed_folder_may_be_a_link(folder: Path) -> None:
    (folder.parent / "link").symlink_to(folder)
    access = ImageAccess(folders=(folder.parent / "link",))
    assert ingest_image(folder / "a picture.png", access=access).data == DATA


@pytest.mark.parametrize("access", [None, ImageAccess(), ImageAccess(hosts=("a",))])
def test_files_are_refused_by_default(folder: Path, access: ImageAccess | None) -> None:
    assert reason_of(folder / "a picture.png", access) == "not_allowed"


@pytest.mark.parametrize("form", ["outside", "dots", "link", "linked folder", "prefix", "other machine", "missing"])
def test_a_file_outside_is_refused(folder: Path, form: str) -> None:
    secret = folder.parent / "secret.png"
    (folder / "link.png").symlink_to(secret)
    (folder / "up").symlink_to(folder.parent)
    (folder.parent / "allowed2").mkdir()
    (folder.parent / "allowed2" / "a.png").write_bytes(DATA)
    forms: dict[str, Any] = {
        "outside": secret,
        "dots": f"{folder}/../secret.png",
        "link": folder / "link.png",
        "linked folder": folder / "up" / "secret.png",
        "prefix": folder.parent / "allowed2" / "a.png",
        "other machine": f"file://elsewhere{folder}/a%20picture.png",
        "missing": folder.parent / "missing.png",  # does not tell whether it is there
    }
    assert reason_of(forms[form], ImageAccess(folders=(folder,))) == "not_allowed"


def test_what_is_no_readable_file_is_refused(folder: Path) -> None:
    os.mkfifo(folder / "pipe")
    (folder / "loop").symlink_to(folder / "loop")
    access = ImageAccess(folders=(folder,))
    for name in ("missing.png", "pipe", "loop", "nul\0", "n" * 5000, "a picture.png/b"):
        assert reason_of(f"{folder}/{name}", access) == "unreadable_file", name
    assert reason_of(folder, access) == "unreadable_file"


def test_a_large_file_is_refused_before_it_is_read(folder: Path) -> None:
    with (folder / "sparse.png").open("wb") as file:
        file.truncate(1 << 40)
    assert reason_of(folder / "sparse.png", ImageAccess(folders=(folder,))) == "too_many_bytes"


# --- urls --------------------------------------------------------------------------------------------------------


@pytest.fixture
def server() -> Iterator[PictureServer]:
    """Serve one page for each thing that can go right or wrong."""
    pages: dict[str, bytes | Reply] = {
        "/a.png": DATA,
        "/%C3%A9.png?a=%20b": DATA,
        "/chunked": Reply(DATA, is_chunked=True, piece_bytes=100),
        "/no-length": Reply(DATA, headers={"Content-Length": None, "Connection": "close"}),
        "/short": Reply(DATA, headers={"Content-Length": str(len(DATA) + 5)}),
        "/large": Reply(b"", headers={"Content-Length": "30000000"}),
        "/large-chunked": Reply(bytes(2_000_000), is_chunked=True, piece_bytes=100_000),
        "/drip": Reply(DATA, piece_bytes=1, pause_s=0.05),
        "/error": Reply(DATA, status=500),
        "/empty": Reply(b"", status=204),
        "/gzip": Reply(DATA, headers={"Content-Encoding": "gzip"}),
        "/html": Reply(b"<!doctype html><p>log in", headers={"Content-Type": "image/png"}),
        "/to-a": Reply(status=302, headers={"Location": "/a.png"}),
        "/to-loop": Reply(status=307, headers={"Location": "/to-loop"}),
        "/to-nothing": Reply(status=302),
        "/to-localhost": Reply(status=301, headers={"Location": "http://localhost:1/a.png"}),
        "/to-private": Reply(status=301, headers={"Location": "http://inner.example.test/a.png"}),
        "/to-file": Reply(status=308, headers={"Location": "file:///etc/hostname"}),
        "/to-ftp": Reply(status=303, headers={"Location": "ftp://127.0.0.1/a.png"}),
    }
    with picture_server(pages) as server:
        yield server


@pytest.mark.parametrize("page", ["a.png", "chunked", "no-length", "to-a", "\u00e9.png?a=%20b#part"])
def test_a_picture_is_fetched(server: PictureServer, page: str) -> None:
    assert ingest_image(f"{server.url}/{page}", access=LOCAL).data == DATA


def test_what_was_fetched_is_frozen(server: PictureServer) -> None:
    image = ingest_image({"type": "image_url", "image_url": {"url": f"{server.url}/a.png"}}, access=LOCAL)
    assert server.num_requests == 1
    assert ingest_image(image.url, access=LOCAL) == ingest_image(image, access=LOCAL) == image
    assert server.num_requests == 1


@pytest.mark.parametrize("access", [None, ImageAccess(), ImageAccess(folders=(Path("/"),))])
def test_urls_are_refused_by_default(server: PictureServer, access: ImageAccess | None) -> None:
    assert reason_of(f"{server.url}/a.png", access) == "not_allowed"
    assert server.num_requests == 0


@pytest.mark.parametrize(
    ("page", "reason"),
    [
        ("missing", "fetch_failed"),
        ("error", "fetch_failed"),
        ("empty", "fetch_failed"),
        ("short", "fetch_failed"),
        ("gzip", "fetch_failed"),
        ("html", "not_an_image"),
        ("large", "too_many_bytes"),
        ("to-loop", "fetch_failed"),
        ("to-nothing", "fetch_failed"),
        ("to-localhost", "not_allowed"),
        ("to-file", "not_allowed"),
        ("to-ftp", "not_allowed"),
    ],
)
def test_a_bad_answer_is_refused(server: PictureServer, page: str, reason: str) -> None:
    assert reason_of(f"{server.url}/{page}", LOCAL) == reason


def test_a_stream_without_length_is_cut_off_at_the_limit(server: PictureServer) -> None:
    assert reason_of(f"{server.url}/large-chunked", LOCAL, limits=ImageLimits(max_bytes=250_000)) == "too_many_bytes"


def test_a_redirect_to_a_private_address_is_refused(server: PictureServer) -> None:
    access = ImageAccess(hosts=("127.0.0.1", "*.example.test"), allow_private=True)
    asked: list[str] = []

    def resolver(host: str) -> list[str]:
        asked.append(host)
        return ["127.0.0.1" if host == "127.0.0.1" else "10.0.0.1"]

    with pytest.raises(ImageError, match="private or special address") as caught:
        fetch_url(f"{server.url}/to-private", access, LIMITS, resolver=resolver)
    assert caught.value.reason == "not_allowed"
    assert asked == ["127.0.0.1", "inner.example.test"]


def test_a_slow_body_times_out(server: PictureServer) -> None:
    access = ImageAccess(hosts=("127.0.0.1",), allow_private=True, timeout_s=0.3)
    started = time.monotonic()
    assert reason_of(f"{server.url}/drip", access) == "fetch_timeout"
    assert time.monotonic() - started < 2


@pytest.mark.parametrize("answer", [b"", b"HTTP/1.1 200 OK\r\n" + b"X: y\r\n" * 50], ids=["nothing", "headers"])
@pytest.mark.parametrize("scheme", ["http", "https"])
def test_slow_headers_and_a_slow_handshake_time_out(answer: bytes, scheme: str) -> None:
    access = ImageAccess(hosts=("127.0.0.1",), allow_private=True, timeout_s=0.3)
    with raw_server(answer or bytes(1), pause_s=0.05 if answer else 30) as (port, _):
        started = time.monotonic()
        reason = reason_of(f"{scheme}://127.0.0.1:{port}/a.png", access)
        assert time.monotonic() - started < 2
    # What is no TLS is refused as soon as enough of it has come.
    assert reason == "fetch_timeout" or (scheme == "https" and answer and reason == "fetch_failed")


def test_a_slow_name_server_times_out() -> None:
    is_over = threading.Event()

    def resolver(host: str) -> list[str]:
        is_over.wait(30)
        return ["127.0.0.1"]

    access = ImageAccess(hosts=("a.test",), timeout_s=0.2)
    with pytest.raises(ImageError) as caught:
        fetch_url("http://a.test/", access, LIMITS, resolver=resolver)
    is_over.set()
    assert caught.value.reason == "fetch_timeout"


def test_a_name_is_resolved_once_and_the_host_keeps_its_name(server: PictureServer) -> None:
    answers = iter([["127.0.0.1"], ["127.0.0.2"]])  # the second one would rebind the name
    access = ImageAccess(hosts=("pictures.test",), allow_private=True)
    url = f"http://Pictures.Test:{server.port}/a.png"
    assert fetch_url(url, access, LIMITS, resolver=lambda host: next(answers)) == DATA
    assert next(answers) == ["127.0.0.2"]
    [(path, headers)] = server.requests
    assert (path, headers["Host"]) == ("/a.png", f"pictures.test:{server.port}")


def test_tls_asks_for_the_name_and_not_for_the_address() -> None:
    access = ImageAccess(hosts=("pictures.test",), allow_private=True)
    with raw_server() as (port, received):
        assert fetch_reason(f"https://pictures.test:{port}/", access, ["127.0.0.1"]) == "fetch_failed"
        assert b"pictures.test" in received[0]


def test_the_next_address_is_tried() -> None:
    with picture_server({"/a.png": DATA}) as server:
        access = ImageAccess(hosts=("pictures.test",), allow_private=True)
        url = f"http://pictures.test:{server.port}/a.png"
        assert fetch_url(url, access, LIMITS, resolver=lambda host: ["127.0.0.9", "127.0.0.1"]) == DATA


def test_proxies_are_not_asked(server: PictureServer, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("http_proxy", "HTTP_PROXY", "all_proxy"):
        monkeypatch.setenv(name, "http://127.0.0.1:1")
    assert ingest_image(f"{server.url}/a.png", access=LOCAL).data == DATA


@pytest.mark.parametrize("addresses", [[], ["no address"], ["127.0.0.1"], ["93.184.216.34", "10.0.0.1"]])
def test_a_name_without_public_addresses_only_is_refused(addresses: list[str]) -> None:
    reason = "not_allowed" if len(addresses) and addresses[0] != "no address" else "fetch_failed"
    assert fetch_reason("http://a.test/", ImageAccess(hosts=("a.test",)), addresses) == reason


def test_a_wildcard_does_not_open_private_addresses() -> None:
    access = ImageAccess(hosts=("*.test",), allow_private=True)
    assert fetch_reason("http://a.test/", access, ["127.0.0.1"]) == "not_allowed"


def test_a_refused_connection_is_named() -> None:
    with socket.create_server(("127.0.0.1", 0)) as closed:
        port = closed.getsockname()[1]
    assert reason_of(f"http://127.0.0.1:{port}/a.png", LOCAL) == "fetch_failed"


@pytest.mark.parametrize(
    "url",
    [
        "http://b.test/",
        "http://a.test.b.test/",
        "http://xa.test/",
        "http://sub.a.test/",
        "http://user@a.test/",
        "http://a.test@b.test/",
        "http://a.test\\@b.test/",
        "http://a.test/a b",
        "http://a.test/\r\nX: y",
        "http://a.test\t/",
        "http://a%2etest/",
        "http://a.test:99999/",
        "http://a.test:x/",
        "http://[::1",
        "http://[fe80::1%25lo]/",
        "http:///a",
        "http://",
        "https:a.test",
    ],
)
def test_other_hosts_and_odd_urls_are_refused(url: str) -> None:
    assert fetch_reason(url, ImageAccess(hosts=("a.test", "*.c.test")), ["93.184.216.34"]) == "not_allowed"


@pytest.mark.parametrize("url", ["ftp://a.test/a", "gopher://a.test/", "javascript://a.test/", "s3://a/b"])
def test_other_schemes_are_refused(url: str) -> None:
    assert reason_of(url, ImageAccess(hosts=("a.test",), folders=(Path("/"),))) == "unsupported_source"


@pytest.mark.parametrize(
    "address",
    [
        "0.0.0.0",
        "10.1.2.3",
        "100.64.0.1",
        "127.0.0.1",
        "169.254.169.254",
        "172.16.0.1",
        "192.168.0.1",
        "192.0.2.1",
        "198.18.0.1",
        "224.0.0.1",
        "240.0.0.1",
        "255.255.255.255",
        "::",
        "::1",
        "::ffff:93.184.216.34",
        "::ffff:127.0.0.1",
        "::7f00:1",
        "64:ff9b::7f00:1",
        "2002:7f00:1::",
        "2001::1",
        "2001:db8::1",
        "fc00::1",
        "fe80::1",
        "fe80::1%eth0",
        "fec0::1",
        "ff02::1",
    ],
)
def test_special_addresses_are_not_public(address: str) -> None:
    assert not is_public(address)


@pytest.mark.parametrize("address", ["93.184.216.34", "8.8.8.8", "2606:2800:220:1:248:1893:25c8:1946"])
def test_ordinary_addresses_are_public(address: str) -> None:
    assert is_public(address)


def test_messages_show_at_most_24_characters_of_a_source(folder: Path) -> None:
    secret = "x7" * 40
    access = ImageAccess(folders=(folder,), hosts=("a.test",))
    for source in (f"http://{secret}.test/?{secret}", f"/{secret}", f"file://{secret}/a", f"{secret}://a", secret):
        for tried in (access, None):
            with pytest.raises(ImageError) as caught:
                ingest_image(source, access=tried)
            assert secret[:26] not in str(caught.value)
    assert shown("a" * 24) == repr("a" * 24)
    assert len(shown("a" * 25)) == len(shown("a" * 25, end=True)) == 26
