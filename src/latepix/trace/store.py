"""Traces on disk: `traces/step_*.jsonl`, one trace a line, and each picture once in `images/` by its hash.

In a line, a picture is `{"sha256", "media_type", "width", "height"}`; its bytes lie in
`images/<sha256>.<png|jpg>` of the run folder. `read_traces` puts them back, so that what was written is what is read.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

import msgspec

from latepix.errors import TransportError
from latepix.trace.graph import Trace
from latepix.trace.ingress import InlineImage
from latepix.trace.messages import ImagePart, Message, iter_images

_SHA256 = re.compile(r"[0-9a-f]{64}")
_EXTENSIONS = {"image/png": "png", "image/jpeg": "jpg"}


def image_path(images_dir: Path, image: InlineImage) -> Path:
    """Return where a picture of a run lies.

    Raises:
        TransportError: hash or media type are not those of a stored picture.
    """
    if not _SHA256.fullmatch(image.sha256) or image.media_type not in _EXTENSIONS:
        raise TransportError(f"{image.media_type!r} picture {image.sha256[:80]!r} is none that a run folder can hold.")
    return images_dir / f"{image.sha256}.{_EXTENSIONS[image.media_type]}"


class TraceWriter:
    """Appends traces to the files of a run folder; pictures are written once each."""

    def __init__(self, run_dir: Path) -> None:
        self._traces_dir = run_dir / "traces"
        self._images_dir = run_dir / "images"
        self._traces_dir.mkdir(parents=True, exist_ok=True)
        self._images_dir.mkdir(parents=True, exist_ok=True)
        self._stored: set[str] = {path.stem for path in self._images_dir.iterdir() if path.suffix != ".tmp"}

    def write(self, name: str, traces: Iterable[Trace]) -> Path:
        """Write traces to `traces/<name>.jsonl`, replacing the file if it is there.

        Raises:
            TransportError: the disk refused, for example because it is full.
        """
        path = self._traces_dir / f"{name}.jsonl"
        partial = path.with_suffix(".jsonl.tmp")
        try:
            partial.write_bytes(self._lines(traces))
            partial.replace(path)
        except OSError as error:
            partial.unlink(missing_ok=True)
            raise _cannot_write(path, error) from error
        return path

    def append_quarantine(self, traces: Iterable[Trace]) -> None:
        """Append failed traces to `quarantine.jsonl` of the run folder.

        Raises:
            TransportError: the disk refused.
        """
        path = self._traces_dir.parent / "quarantine.jsonl"
        try:
            with path.open("ab") as file:
                file.write(self._lines(traces))
        except OSError as error:
            raise _cannot_write(path, error) from error

    def _lines(self, traces: Iterable[Trace]) -> bytes:
        lines = []
        for trace in traces:
            for node in trace.nodes:
                for image in iter_images([node.message]):
                    self._store(image)
            lines.append(_ENCODER.encode(_map_images(trace, _without_data)) + b"\n")
        return b"".join(lines)

    def _store(self, image: InlineImage) -> None:
        if image.sha256 in self._stored:
            return
        path = image_path(self._images_dir, image)
        partial = path.with_suffix(".tmp")
        try:
            partial.write_bytes(image.data)
            partial.replace(path)
        except OSError:
            partial.unlink(missing_ok=True)
            raise
        self._stored.add(image.sha256)


def read_traces(path: Path | str, *, with_images: bool = True) -> Iterator[Trace]:
    """Read one `traces/*.jsonl` file or a `quarantine.jsonl`, pictures back inline.

    Args:
        path: the file; pictures are looked up in `images` beside it or beside its folder.
        with_images: off leaves the bytes of the pictures out (their hashes and sizes stay).
    Raises:
        TransportError: a line is not a trace, or a picture is missing; names the line.
    """
    path = Path(path)
    images_dir = next((d for d in (path.parent / "images", path.parent.parent / "images") if d.is_dir()), path.parent)
    cache: dict[str, bytes] = {}

    def load(image: InlineImage) -> InlineImage:
        if image.sha256 not in cache:
            data = image_path(images_dir, image).read_bytes()
            if hashlib.sha256(data).hexdigest() != image.sha256:
                raise TransportError(f"picture {image.sha256} was changed after it was stored")
            cache[image.sha256] = data
        return msgspec.structs.replace(image, data=cache[image.sha256])

    with path.open("rb") as lines:
        for number, line in enumerate(lines, start=1):
            try:
                trace = _DECODER.decode(line)
                _check_nodes(trace)
                yield _map_images(trace, load) if with_images else trace
            except (msgspec.MsgspecError, TransportError, OSError) as error:
                raise TransportError(f"{path}, line {number}: {error}.") from error


def _check_nodes(trace: Trace) -> None:
    """Check what the types cannot say: parents come first, and what belongs together is equally long."""
    for index, node in enumerate(trace.nodes):
        num_images = sum(1 for _ in iter_images([node.message]))
        if (
            (node.parent is not None and not 0 <= node.parent < index)
            or len(node.mask) != len(node.token_ids)
            or len(node.logprobs) != sum(node.mask)
            or len(node.ranges) != num_images
        ):
            raise TransportError(
                f"trace {trace.id}, node {index}: parent {node.parent}, {len(node.token_ids)} tokens, {len(node.mask)} "
                f"mask entries ({sum(node.mask)} sampled), {len(node.logprobs)} logprobs, {num_images} pictures and "
                f"{len(node.ranges)} ranges do not fit each other"
            )


def _cannot_write(path: Path, error: OSError) -> TransportError:
    return TransportError(
        f"Cannot write traces to {path}: {error.strerror}. Free some space or choose another output_dir."
    )


def _without_data(image: InlineImage) -> InlineImage:
    return msgspec.structs.replace(image, data=b"")


def _map_images(trace: Trace, change: Callable[[InlineImage], InlineImage]) -> Trace:
    def map_message(message: Message) -> Message:
        if not any(isinstance(part, ImagePart) for part in message.content):
            return message
        content = tuple(
            ImagePart(image=change(part.image)) if isinstance(part, ImagePart) else part for part in message.content
        )
        return msgspec.structs.replace(message, content=content)

    nodes = tuple(msgspec.structs.replace(node, message=map_message(node.message)) for node in trace.nodes)
    return msgspec.structs.replace(trace, nodes=nodes)


_ENCODER = msgspec.json.Encoder()
_DECODER = msgspec.json.Decoder(Trace)
