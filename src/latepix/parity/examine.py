"""One case through both sides: what the trainer makes of it, what the server makes of it, and what differs.

The trainer's side is the code a run uses: its picture door, renderer, adapter and `ModelInfo.expand`. The server's
side is its answers to `/inference/v1/generate`, the only authority on ids and ranges, and to `/latepix/pixels`.
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from latepix.config.schema import RunConfig
from latepix.errors import ImageError, InferenceError, PlaceholderMismatch, ProcessFailed, TransportError, reason_code
from latepix.families.model_info import ModelInfo
from latepix.families.registry import get_adapter
from latepix.inference.client import InferenceClient, Prompt, Routing, Sampling
from latepix.inference.contract import PixelsResponse
from latepix.inference.control import ServerControl
from latepix.inference.render import MessageRenderer
from latepix.parity.cases import Case
from latepix.parity.compare import (
    Mismatch,
    Pixels,
    Placement,
    compare_pixels,
    compare_placements,
    server_pixels,
    server_placement,
)
from latepix.parity.findings import Row
from latepix.runs import picture_door
from latepix.trace.ingress import InlineImage
from latepix.trace.messages import iter_images

#: Refusals that the config asks for, whatever the picture.
_LIMITS = ("too_many_bytes", "too_many_pixels", "aspect_ratio", "too_many_images")
#: Pixels of a larger prompt are not asked for: they would come as one JSON text of a third more than that, bytes.
_MAX_PIXEL_BYTES = 256_000_000


class TrainerSide:
    """What the trainer makes of conversations."""

    def __init__(self, config: RunConfig, info: ModelInfo) -> None:
        self.info = info
        self.max_tokens = info.max_len(config.inference.max_model_len)
        self.patch_size = info.grid.factor // info.merge_size
        self._is_fitted = config.images.fit
        self._max_images = config.images.max_per_prompt
        self._door = picture_door(config.images, info)
        self._renderer = MessageRenderer(info)
        self._adapter = get_adapter(info.model_type)
        self._processor = self._adapter.load_processor(info.path)

    def prompt(self, case: Case) -> Prompt:
        """Take a case's pictures through the door and render its messages.

        Raises:
            ImageError, PlaceholderMismatch: the door or the renderer refuses it.
        """
        messages = case.build(self._door)
        images = tuple(iter_images(messages))
        if len(images) > self._max_images:
            raise ImageError(
                f"{len(images)} pictures in the conversation, the limit is {self._max_images} (images.max_per_prompt).",
                "too_many_images",
            )
        return Prompt(token_ids=tuple(self._renderer.render(messages).token_ids), images=images)

    def placement(self, prompt: Prompt) -> Placement:
        """Expand a prompt by the sizes of its pictures.

        Raises:
            PlaceholderMismatch: a text was taken for a placeholder.
        """
        token_ids, ranges = self.info.expand(prompt.token_ids, prompt.images)
        return Placement(token_ids=token_ids, ranges=ranges)

    def size(self, image: InlineImage) -> tuple[int, int]:
        """Return (width, height) in pixels that a picture must have in front of the vision tower.

        A fitted picture must keep its size: that no processor resizes it is what `images.fit` is for.
        """
        if self._is_fitted:
            return image.width, image.height
        return self.info.grid.processed_size(image.width, image.height)

    def pixels(self, images: Sequence[InlineImage]) -> list[Pixels]:
        """Process the pictures of a prompt, one for each slot.

        Raises:
            PlaceholderMismatch: the processor and the grid of the model folder do not say the same of a picture.
        """
        by_hash: dict[str, Pixels] = {}
        for image in images:
            if image.sha256 in by_hash:
                continue
            processed = self._adapter.process_image(self._processor, image.open())
            size = processed.grid_thw[2] * self.patch_size, processed.grid_thw[1] * self.patch_size
            if size != self.size(image) or processed.num_tokens != self.info.num_image_tokens(image):
                raise PlaceholderMismatch(
                    f"The trainer disagrees with itself on a picture of {image.width} x {image.height} pixels: by the "
                    f"model folder's limits it must become {self.size(image)} and {self.info.num_image_tokens(image)} "
                    f"tokens, its processor makes {size} and {processed.num_tokens} tokens of it. This is a bug of the "
                    "family's adapter."
                )
            values = processed.pixel_values.flatten(1).float().numpy()
            by_hash[image.sha256] = Pixels(grid_thw=processed.grid_thw, values=values)
        return [by_hash[image.sha256] for image in images]


class Examiner:
    """Takes cases through server and trainer.

    Attributes:
        has_pixels: whether the server has `/latepix/pixels`, as far as is known.
    """

    def __init__(
        self,
        trainer: TrainerSide,
        client: InferenceClient,
        control: ServerControl,
        *,
        routing: Routing,
        tolerance: float,
    ) -> None:
        self.has_pixels = True
        self._trainer = trainer
        self._client = client
        self._control = control
        self._routing = routing
        self._tolerance = tolerance

    async def examine(self, case: Case) -> Row:
        """Take one case through both sides.

        Raises:
            ProcessFailed: the server is gone.
        """
        row = Row(name=case.name, kind=case.kind, about=case.about)
        try:
            prompt = self._trainer.prompt(case)
            expected = self._trainer.placement(prompt)
        except (ImageError, PlaceholderMismatch) as error:
            return _refused(row, case, reason_code(error), str(error))
        row = msgspec.structs.replace(
            row,
            sizes=[(image.width, image.height) for image in prompt.images],
            num_tokens=[placed.length for placed in expected.ranges],
        )
        if case.refusal is not None and not case.may_pass:
            return row.ends("failed", f"it must be refused ({case.refusal}), and it was let through")
        if len(expected.token_ids) >= self._trainer.max_tokens:
            note = f"{len(expected.token_ids)} tokens; there is room for {self._trainer.max_tokens - 1} and an answer"
            return row.ends("too long", note)
        try:
            return await self._compare(row, prompt, expected)
        except (InferenceError, TransportError, PlaceholderMismatch) as error:
            await ensure_alive(self._control, error)
            return row.ends("failed", str(error))

    async def _compare(self, row: Row, prompt: Prompt, expected: Placement) -> Row:
        # The authority: a prompt of the run gets its ids and ranges from this very answer.
        answer = await self._client.generate(prompt, Sampling(temperature=1.0, max_tokens=1), self._routing)
        found = compare_placements(Placement(token_ids=answer.prompt_token_ids, ranges=answer.ranges), expected)
        ours = self._trainer.pixels(prompt.images)
        response = await self._server_pixels(prompt, ours)
        if response is not None:
            if server_placement(response) != Placement(token_ids=answer.prompt_token_ids, ranges=answer.ranges):
                found.append(
                    Mismatch(
                        "ids",
                        "/latepix/pixels against /inference/v1/generate",
                        "another prompt for the same request",
                        "wants the same from both routes",
                    )
                )
            theirs = server_pixels(response)
            more, largest = compare_pixels(
                theirs,
                ours,
                [self._trainer.size(image) for image in prompt.images],
                patch_size=self._trainer.patch_size,
                tolerance=self._tolerance,
            )
            found += more
            row = msgspec.structs.replace(row, grids=[one.grid_thw for one in theirs], max_pixel_difference=largest)
        row = msgspec.structs.replace(row, mismatches=found)
        return row.ends("failed" if found else "ok")

    async def _server_pixels(self, prompt: Prompt, ours: Sequence[Pixels]) -> PixelsResponse | None:
        """Return the server's pixels; None if it has no such route, or if they would be too many."""
        if not self.has_pixels or not prompt.images or sum(one.values.nbytes for one in ours) > _MAX_PIXEL_BYTES:
            return None
        try:
            return await self._control.pixels(prompt)
        except TransportError as error:
            if error.status != 404:
                raise
            self.has_pixels = False
            return None


async def ensure_alive(control: ServerControl, error: Exception) -> None:
    """Return if the server still answers after a failed request; the failure is then the request's own.

    Raises:
        ProcessFailed: it does not.
    """
    try:
        await control.peak_rss_bytes()
    except TransportError as dead:
        raise ProcessFailed(f"The inference server is gone ({dead}) after this: {error}") from error


def _refused(row: Row, case: Case, reason: str, message: str) -> Row:
    if reason == case.refusal or reason in _LIMITS:
        return row.ends("refused", reason)
    wanted = "it must pass" if case.refusal is None else f"the reason must be {case.refusal}"
    return row.ends("failed", f"refused ({reason}), but {wanted}: {message}")
