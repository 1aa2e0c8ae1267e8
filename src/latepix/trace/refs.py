"""References to pictures: which picture, and where the server placed it. Never pixels.

Made from the server's `mm_placeholders`, carried by samples and micro batches, read by the trainer's materializer.
Storage is deduplicated by content hash, slots never are: two identical pictures are one entry of `images` and two
`refs`. What holds (checked by `MMRefs.validate`):

* every ref lies inside the sample, refs are sorted and do not overlap;
* a ref covers placeholder ids only, and every placeholder id is covered by a ref.

Worked example, placeholder id 9, two pictures of 2 tokens, the second one shown twice::

    token_ids  [5, 9, 9, 6, 9, 9, 9, 9, 7]
    images     (A, B)
    refs       (image=0, offset=1, length=2) (image=1, offset=4, length=2) (image=1, offset=6, length=2)
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence

import msgspec
import numpy as np

from latepix.errors import PlaceholderMismatch
from latepix.trace.ingress import InlineImage


class PlaceholderRange(msgspec.Struct, frozen=True):
    """A run of placeholder tokens: `token_ids[offset : offset + length]`."""

    offset: int
    length: int


class ImageRef(msgspec.Struct, frozen=True, array_like=True):
    """One slot: `images[image]` fills `token_ids[offset : offset + length]`."""

    image: int
    offset: int
    length: int


def expand_placeholders(
    logical_ids: Sequence[int], lengths: Sequence[int], placeholder_ids: Collection[int]
) -> tuple[list[int], list[PlaceholderRange]]:
    """Repeat each placeholder of a logical prompt to its picture's number of tokens.

    Args:
        logical_ids: one placeholder per picture.
        lengths: tokens of each picture, in prompt order.
        placeholder_ids: ids that stand for pictures.
    Returns:
        The expanded ids, and where each picture landed.
    Raises:
        PlaceholderMismatch: the number of placeholders is not the number of lengths.
    """
    slots = [index for index, token in enumerate(logical_ids) if token in placeholder_ids]
    if len(slots) != len(lengths):
        raise PlaceholderMismatch(f"The prompt has {len(slots)} media placeholders, but {len(lengths)} pictures came.")
    expanded: list[int] = []
    ranges: list[PlaceholderRange] = []
    at = 0
    for slot, length in zip(slots, lengths, strict=True):
        expanded += logical_ids[at:slot]
        ranges.append(PlaceholderRange(offset=len(expanded), length=length))
        expanded += [logical_ids[slot]] * length
        at = slot + 1
    expanded += logical_ids[at:]
    return expanded, ranges


class MMRefs(msgspec.Struct, frozen=True):
    """The pictures of one sample or micro batch.

    Attributes:
        images: distinct pictures, by `sha256`.
        refs: one per slot, in the order of the tokens.
    """

    images: tuple[InlineImage, ...] = ()
    refs: tuple[ImageRef, ...] = ()

    @classmethod
    def from_slots(cls, slots: Iterable[tuple[InlineImage, int, int]]) -> MMRefs:
        """Build from (picture, offset, length) slots in the order of the tokens; equal pictures are stored once."""
        images: dict[str, int] = {}
        table: list[InlineImage] = []
        refs: list[ImageRef] = []
        for image, offset, length in slots:
            index = images.setdefault(image.sha256, len(table))
            if index == len(table):
                table.append(image)
            refs.append(ImageRef(image=index, offset=offset, length=length))
        return cls(images=tuple(table), refs=tuple(refs))

    def slots(self, shift: int = 0) -> list[tuple[InlineImage, int, int]]:
        """Return (picture, offset + shift, length) of every slot; the inverse of `from_slots`."""
        return [(self.images[ref.image], ref.offset + shift, ref.length) for ref in self.refs]

    def mm_token_type_ids(self, num_tokens: int) -> np.ndarray:
        """Return [num_tokens] uint8: 1 where a picture fills the token, 0 for text."""
        types = np.zeros(num_tokens, dtype=np.uint8)
        for ref in self.refs:
            types[ref.offset : ref.offset + ref.length] = 1
        return types

    def validate(self, token_ids: np.ndarray, placeholder_ids: Sequence[int], *, where: str) -> None:
        """Check the invariants at the top of this module.

        Args:
            token_ids: [T] the expanded ids.
            placeholder_ids: the family's image placeholder ids.
            where: names the sample in the error.
        Raises:
            PlaceholderMismatch: the first thing that does not fit, with its numbers.
        """
        is_placeholder = np.isin(token_ids, np.asarray(placeholder_ids))
        end = 0
        for index, ref in enumerate(self.refs):
            if not 0 <= ref.image < len(self.images):
                raise PlaceholderMismatch(
                    f"{where}, slot {index}: image index {ref.image} is not in the table of {len(self.images)} "
                    "pictures."
                )
            if ref.length < 1 or ref.offset < end or ref.offset + ref.length > len(token_ids):
                raise PlaceholderMismatch(
                    f"{where}, slot {index}: range [{ref.offset}, {ref.offset + ref.length}) must be non-empty, start "
                    f"at or after {end} and end inside the {len(token_ids)} tokens."
                )
            end = ref.offset + ref.length
            if not is_placeholder[ref.offset : end].all():
                raise PlaceholderMismatch(
                    f"{where}, slot {index}: range [{ref.offset}, {end}) covers tokens that are not image placeholders."
                )
        num_covered = sum(ref.length for ref in self.refs)
        if num_covered != int(is_placeholder.sum()):
            raise PlaceholderMismatch(
                f"{where}: {int(is_placeholder.sum())} image placeholder tokens, but the {len(self.refs)} ranges cover "
                f"{num_covered}. Some pictures would be silently missing."
            )
