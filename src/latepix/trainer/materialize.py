"""References -> pixels, as late as possible: on the trainer, once per distinct picture.

`materialize_mm_refs` is the plain function. `Materializer` runs it in threads, one micro batch ahead of the forward,
with a byte-bounded cache by content hash.
"""

from __future__ import annotations

import threading
import time
from collections import OrderedDict
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import msgspec

from latepix.errors import PlaceholderMismatch
from latepix.families.base import Adapter, ProcessedImage
from latepix.trace.ingress import InlineImage
from latepix.trace.refs import MMRefs


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
) -> MMInputs:
    """Decode and process each distinct picture once, and check every slot against its grid.

    Args:
        mm_refs: of one micro batch.
        adapter: of the model's family.
        processor: from `adapter.load_processor`.
        process: replaces decode + processor, for caching.
    Raises:
        PlaceholderMismatch: a picture's grid needs another number of tokens than its slot has.
    """
    process = process or (lambda image: adapter.process_image(processor, image.open()))
    images = tuple(process(image) for image in mm_refs.images)
    for slot, ref in enumerate(mm_refs.refs):
        image = images[ref.image]
        if image.num_tokens != ref.length:
            raise PlaceholderMismatch(
                f"Slot {slot} at {ref.offset}: grid {image.grid_thw} needs {image.num_tokens} tokens, the sample has "
                f"{ref.length}. Server and trainer use different processor settings."
            )
    return MMInputs(images=images, slot_images=tuple(ref.image for ref in mm_refs.refs))


class Materializer:
    """Materializes in the background and remembers processed pictures up to a number of bytes."""

    def __init__(self, adapter: Adapter, processor: Any, *, cache_bytes: int) -> None:
        self._adapter = adapter
        self._processor = processor
        self._cache_bytes = cache_bytes
        self._cache: OrderedDict[str, ProcessedImage] = OrderedDict()
        self._cached_bytes = 0
        self._lock = threading.Lock()
        self._pool = ThreadPoolExecutor(max_workers=1, thread_name_prefix="materialize")
        self.num_processed = 0
        self.num_hits = 0
        self.busy_s = 0.0

    def submit(self, mm_refs: MMRefs) -> Future[MMInputs]:
        """Start to materialize; the result is there by the time the forward needs it, if all goes well."""
        return self._pool.submit(self._materialize, mm_refs)

    def close(self) -> None:
        """End the threads."""
        self._pool.shutdown(cancel_futures=True)

    def _materialize(self, mm_refs: MMRefs) -> MMInputs:
        started = time.monotonic()
        inputs = materialize_mm_refs(mm_refs, self._adapter, self._processor, process=self._process)
        self.busy_s += time.monotonic() - started
        return inputs

    def _process(self, image: InlineImage) -> ProcessedImage:
        with self._lock:
            if image.sha256 in self._cache:
                self._cache.move_to_end(image.sha256)
                self.num_hits += 1
                return self._cache[image.sha256]
        processed = self._adapter.process_image(self._processor, image.open())
        self.num_processed += 1
        with self._lock:
            self._cache[image.sha256] = processed
            self._cached_bytes += processed.num_bytes
            while self._cached_bytes > self._cache_bytes and self._cache:
                _, oldest = self._cache.popitem(last=False)
                self._cached_bytes -= oldest.num_bytes
        return processed
