"""Cost of a batch between orchestrator and trainer: `python benchmarks/batch.py`.

Two loads. Pictures: 64 samples (8 prompts x 8 rollouts), one photo-like JPEG of 1024 x 768 each (768 image tokens of
Qwen3-VL's 32 px), 32 text and 16 sampled tokens; prepare, encode and decode are timed together. Text: 2,000 samples
of 16 to 3,500 tokens packed into micro batches of 8,192.

The last line is one JSON object: `bytes_per_sample`, `mm_total_s`, `text_pack_s` (seconds of `prepare_batch`),
`text_fill` (tokens over the room of all micro batches), `jpeg_bytes` (mean size of a picture). Times are the best of
several runs.
"""

from __future__ import annotations

import io
import json
import time
from collections.abc import Callable

import numpy as np
from PIL import Image, ImageFilter

from latepix import InlineImage, MMRefs, TrainingSample, ingest_image, prepare_batch
from latepix.trace.ingress import GridFit
from latepix.trace.training import decode_batch, encode_batch

_IMAGE_TOKENS = 768
_PLACEHOLDER = 151655
_GRID = GridFit(factor=32, min_pixels=65536, max_pixels=16777216)


def photo(seed: int) -> InlineImage:
    """Draw a picture with the statistics of a photo: large soft shapes, fine grain."""
    rng = np.random.default_rng(seed)
    coarse, medium = (
        Image.fromarray(rng.integers(0, 256, size, dtype=np.uint8)).resize((1024, 768), Image.Resampling.BICUBIC)
        for size in ((12, 16, 3), (96, 128, 3))
    )
    grain = Image.fromarray(rng.integers(96, 160, (768, 1024, 3), dtype=np.uint8)).filter(ImageFilter.GaussianBlur(1))
    picture = Image.blend(Image.blend(coarse, medium, 0.35), grain, 0.3)
    buffer = io.BytesIO()
    picture.save(buffer, "JPEG", quality=90)
    image = ingest_image(buffer.getvalue(), fit=_GRID)
    assert (image.media_type, image.width, image.height) == ("image/jpeg", 1024, 768)
    return image


def sample(
    rng: np.random.Generator, num_text: int, num_sampled: int, image: InlineImage | None, group: int
) -> TrainingSample:
    """Make one sample: a picture, text, sampled tokens."""
    num_image = _IMAGE_TOKENS if image else 0
    length = num_image + num_text + num_sampled
    token_ids = rng.integers(0, 150_000, length).astype(np.int32)
    token_ids[:num_image] = _PLACEHOLDER
    loss_mask = np.zeros(length, dtype=bool)
    loss_mask[-num_sampled:] = True
    return TrainingSample(
        token_ids=token_ids,
        loss_mask=loss_mask,
        inference_logprobs=np.where(loss_mask, -rng.random(length), 0).astype(np.float32),
        advantages=np.where(loss_mask, 0.5, 0).astype(np.float32),
        mm_refs=MMRefs.from_slots([(image, 0, num_image)] if image else []),
        group_id=group,
    )


def best(run: Callable[[], object], repeats: int) -> float:
    """Return the shortest time of several runs, seconds."""
    times = []
    for _ in range(repeats):
        started = time.perf_counter()
        run()
        times.append(time.perf_counter() - started)
    return min(times)


def main() -> None:
    """Measure both loads, print a table and the JSON line."""
    rng = np.random.default_rng(0)
    photos = [photo(seed) for seed in range(8)]
    shown = [sample(rng, 32, 16, photos[index // 8], index // 8) for index in range(64)]
    (batch,) = prepare_batch(shown, step=0, micro_batch_tokens=16384)
    num_bytes = len(encode_batch(batch))

    def pictures() -> None:
        (made,) = prepare_batch(shown, step=0, micro_batch_tokens=16384)
        decode_batch(encode_batch(made))

    lengths = rng.integers(16, 3501, 2000)
    texts = [sample(rng, int(length) - 8, 8, None, index) for index, length in enumerate(lengths)]
    (packed,) = prepare_batch(texts, step=0, micro_batch_tokens=8192)
    result = {
        "bytes_per_sample": num_bytes / len(shown),
        "mm_total_s": best(pictures, 20),
        "text_pack_s": best(lambda: prepare_batch(texts, step=0, micro_batch_tokens=8192), 10),
        "text_fill": float(lengths.sum() / (8192 * len(packed.micro_batches))),
        "jpeg_bytes": sum(image.num_bytes for image in photos) / len(photos),
    }
    for key, value in result.items():
        print(f"{key:20}{value:14,.4f}")
    print(json.dumps(result))


if __name__ == "__main__":
    main()
