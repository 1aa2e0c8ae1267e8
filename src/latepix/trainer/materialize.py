"""References -> pixels, as late as possible: on the trainer, once per distinct picture.

`materialize_mm_refs` is the plain function. `Materializer` runs it for a step's micro batches, in threads and one
micro batch ahead of the forward, and remembers processed pictures up to a number of bytes.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import msgspec
import numpy as np

from latepix.errors import PlaceholderMismatch
from latepix.families.base import Adapter, ProcessedImage
from latepix.trace.ingress import InlineImage
from latepix.trace.refs import MMRefs
from latepix.trace.training import MicroBatch


class MMInputs(msgspec.Struct, frozen=True):
    """The pictures of a micro batch, ready for the vision tower.

    Attributes:
        images: distinct pictures, parallel to `MMRefs.images`.
        slot_images: index into `images` of every slot, in the order of the tokens.
    """

    images: tuple[ProcessedImage, ...] = ()
    slot_images: tuple[int, ...] = ()


def materialize_mm_refs(
    mm_refs: MMRefs,
    adapter: Adapter,
    processor: Any,
    *,
    process: Callable[[InlineImage], ProcessedImage] | None = None,
    owner: Callable[[int], str] | None = None,
) -> MMInputs:
    """Decode and process each distinct picture once, and check every slot against its grid.

    Args:
        mm_refs: of one micro batch.
        adapter: of the model's family.
        processor: from `adapter.load_processor`.
        process: replaces decode + processor, for caching.
        owner: says whose token an offset is, for the error message.
    Raises:
        PlaceholderMismatch: a picture's grid needs another number of tokens than its slot has.
    """
    process = process or (lambda image: adapter.process_image(processor, image.open()))
    images = tuple(process(image) for image in mm_refs.images)
    for slot, ref in enumerate(mm_refs.refs):
        image = images[ref.image]
        if image.num_tokens != ref.length:
            whose = f"{owner(ref.offset)}: " if owner else ""
            raise PlaceholderMismatch(
                f"{whose}Slot {slot} at {ref.offset}, picture {mm_refs.images[ref.image].sha256[:12]}: grid "
                f"{image.grid_thw} needs {image.num_tokens} tokens, the sample has {ref.length}. Server and trainer "
                "use different processor settings."
            )
    return MMInputs(images=images, slot_images=tuple(ref.image for ref in mm_refs.refs))


class MaterializeStats(msgspec.Struct):
    """What materializing cost since the stats were taken last.

    Attributes:
        num_processed: pictures that were decoded and processed.
        num_hits: pictures of a micro batch that were there already, or on their way.
        decode_s, processor_s: work in the threads, seconds.
        wait_s: how long the forward waited for pictures, seconds.
    """

    num_processed: int = 0
    num_hits: int = 0
    decode_s: float = 0.0
    processor_s: float = 0.0
    wait_s: float = 0.0


class _Work(msgspec.Struct, frozen=True):
    image: ProcessedImage
    decode_s: float
    processor_s: float


class Materializer:
    """Materializes ahead in threads. One thread asks, and it alone touches the cache.

    Args:
        adapter, processor: of the model.
        cache_bytes: of processed pictures that are kept. What a micro batch needs is alive besides.
        num_workers: threads.
    """

    def __init__(self, adapter: Adapter, processor: Any, *, cache_bytes: int, num_workers: int = 2) -> None:
        self._adapter = adapter
        self._processor = processor
        self._cache_bytes = cache_bytes
        #: By content hash, the one used longest ago in front.
        self._cache: dict[str, Future[_Work]] = {}
        self._pool = ThreadPoolExecutor(max_workers=num_workers, thread_name_prefix="materialize")
        self._stats = MaterializeStats()
        #: Submitted, and not yet counted.
        self._fresh: list[Future[_Work]] = []

    def run(self, micro_batches: Sequence[MicroBatch]) -> Iterator[MMInputs]:
        """Yield the pictures of each micro batch; those of the next one are made meanwhile.

        Each distinct picture is decoded and processed once, as long as the pictures that are needed again fit into
        the cache: of a full cache, what no later micro batch needs leaves first, then what is needed last.

        Raises:
            PlaceholderMismatch: a picture's grid needs another number of tokens than its slot has.
        """
        self._start(micro_batches[:1])
        for number, micro_batch in enumerate(micro_batches):
            # Keeps the pictures of this micro batch whatever the cache forgets.
            own = {image.sha256: self._cache[image.sha256] for image in micro_batch.mm_refs.images}
            self._start(micro_batches[number + 1 : number + 2])
            inputs = self._finish(micro_batch, own)
            self._evict(micro_batches[number + 1 :])
            yield inputs

    def materialize(self, micro_batch: MicroBatch) -> MMInputs:
        """Return the pictures of one micro batch; see `run`."""
        return next(self.run([micro_batch]))

    def take_stats(self) -> MaterializeStats:
        """Return what was counted since the last call, and count from zero."""
        for future in [future for future in self._fresh if future.done()]:
            self._fresh.remove(future)
            if not future.cancelled() and future.exception() is None:
                self._stats.num_processed += 1
                self._stats.decode_s += future.result().decode_s
                self._stats.processor_s += future.result().processor_s
        taken, self._stats = self._stats, MaterializeStats()
        return taken

    @property
    def cached_bytes(self) -> int:
        """Size of the remembered pictures."""
        return sum(_num_bytes(future) for future in self._cache.values())

    def close(self) -> None:
        """End the threads."""
        self._pool.shutdown(cancel_futures=True)

    def _start(self, micro_batches: Iterable[MicroBatch]) -> None:
        for micro_batch in micro_batches:
            for image in micro_batch.mm_refs.images:
                future = self._cache.pop(image.sha256, None)
                if future is None:
                    future = self._pool.submit(self._work, image)
                    self._fresh.append(future)
                else:
                    self._stats.num_hits += 1
                self._cache[image.sha256] = future

    def _work(self, image: InlineImage) -> _Work:
        started = time.monotonic()
        picture = image.open()
        decoded = time.monotonic()
        processed = self._adapter.process_image(self._processor, picture)
        return _Work(image=processed, decode_s=decoded - started, processor_s=time.monotonic() - decoded)

    def _finish(self, micro_batch: MicroBatch, own: dict[str, Future[_Work]]) -> MMInputs:
        return materialize_mm_refs(
            micro_batch.mm_refs,
            self._adapter,
            self._processor,
            process=lambda image: self._wait(image, own[image.sha256]),
            owner=lambda offset: f"Trace {_owner(micro_batch, offset)}",
        )

    def _wait(self, image: InlineImage, future: Future[_Work]) -> ProcessedImage:
        started = time.monotonic()
        try:
            work = future.result()
        except BaseException:
            # A picture that failed is not remembered as failed.
            self._cache.pop(image.sha256, None)
            raise
        self._stats.wait_s += time.monotonic() - started
        return work.image

    def _evict(self, later: Sequence[MicroBatch]) -> None:
        """Forget pictures until the rest fits: those that are not needed again first, then those needed last."""
        excess = self.cached_bytes - self._cache_bytes
        if excess <= 0:
            return
        next_use = {
            image.sha256: number
            for number, micro_batch in reversed(list(enumerate(later)))
            for image in micro_batch.mm_refs.images
        }
        never = len(later)
        for sha256 in sorted(self._cache, key=lambda sha256: -next_use.get(sha256, never)):
            if excess <= 0 or next_use.get(sha256) == 0:
                # The next micro batch's are on their way already.
                break
            excess -= _num_bytes(self._cache.pop(sha256))


def _num_bytes(future: Future[_Work]) -> int:
    if not future.done() or future.cancelled() or future.exception() is not None:
        return 0
    return future.result().image.num_bytes


def _owner(micro_batch: MicroBatch, offset: int) -> str:
    sample = int(np.searchsorted(micro_batch.sample_starts, offset, side="right")) - 1
    return micro_batch.trace_ids[sample]
