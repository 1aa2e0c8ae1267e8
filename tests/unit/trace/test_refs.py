from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from latepix.errors import PlaceholderMismatch
from latepix.trace.refs import ImageRef, MMRefs, PlaceholderRange, expand_placeholders
from tests.tiny.pictures import make_image
from tests.tiny.traces import IMAGE_ID, VIDEO_ID

A, B = make_image(seed=1), make_image(seed=2)
# The worked example at the top of the module.
TOKENS = np.asarray([5, 9, 9, 6, 9, 9, 9, 9, 7], dtype=np.int32)
REFS = MMRefs.from_slots([(A, 1, 2), (B, 4, 2), (B, 6, 2)])


def validate(refs: MMRefs, token_ids: np.ndarray = TOKENS) -> None:
    refs.validate(token_ids, (IMAGE_ID, VIDEO_ID), where="trace t, branch 0")


def test_equal_pictures_are_stored_once_and_keep_their_slots() -> None:
    assert REFS.images == (A, B)
    assert REFS.refs == (ImageRef(0, 1, 2), ImageRef(1, 4, 2), ImageRef(1, 6, 2))
    validate(REFS)


def test_slots_undo_from_slots() -> None:
    assert MMRefs.from_slots(REFS.slots()) == REFS


def test_slots_can_be_shifted() -> None:
    assert REFS.slots(shift=10)[1] == (B, 14, 2)


def test_token_types_say_where_the_pictures_are() -> None:
    assert REFS.mm_token_type_ids(9).tolist() == [0, 1, 1, 0, 1, 1, 1, 1, 0]


@pytest.mark.parametrize(
    ("refs", "problem"),
    [
        ((ImageRef(2, 1, 2),), r"slot 0: image index 2 is not in the table of 2 pictures"),
        ((ImageRef(-1, 1, 2),), r"slot 0: image index -1"),
        ((ImageRef(0, 1, 2), ImageRef(1, 4, 0)), r"slot 1: range \[4, 4\) must be non-empty"),
        ((ImageRef(0, -1, 2),), r"slot 0: range \[-1, 1\).*at or after 0"),
        ((ImageRef(0, 1, 2), ImageRef(1, 2, 2)), r"slot 1: range \[2, 4\).*at or after 3"),
        ((ImageRef(0, 4, 2), ImageRef(1, 1, 2)), r"slot 1: range \[1, 3\).*at or after 6"),
        ((ImageRef(0, 6, 4),), r"slot 0: range \[6, 10\).*inside the 9 tokens"),
        ((ImageRef(0, 1, 3),), r"slot 0: range \[1, 4\) covers tokens that are not image placeholders"),
        ((ImageRef(0, 1, 2), ImageRef(1, 4, 2)), r"6 image placeholder tokens, but the 2 ranges cover 4"),
        ((), r"6 image placeholder tokens, but the 0 ranges cover 0"),
    ],
)
def test_what_does_not_fit_is_named(refs: tuple[ImageRef, ...], problem: str) -> None:
    with pytest.raises(PlaceholderMismatch, match=rf"^trace t, branch 0.*{problem}"):
        validate(MMRefs(images=(A, B), refs=refs))


def test_every_placeholder_id_of_the_family_counts() -> None:
    with pytest.raises(PlaceholderMismatch, match="7 image placeholder tokens, but the 3 ranges cover 6"):
        validate(REFS, np.append(TOKENS, np.int32(VIDEO_ID)))


def test_expansion_repeats_each_placeholder() -> None:
    expanded, ranges = expand_placeholders([5, 9, 6, 9, 7], [2, 3], {IMAGE_ID})
    assert expanded == [5, 9, 9, 6, 9, 9, 9, 7]
    assert ranges == [PlaceholderRange(1, 2), PlaceholderRange(4, 3)]


@pytest.mark.parametrize("lengths", [[], [2], [2, 3, 4]])
def test_expansion_names_both_counts(lengths: list[int]) -> None:
    with pytest.raises(PlaceholderMismatch, match=rf"2 media placeholders, but {len(lengths)} pictures"):
        expand_placeholders([5, 9, 6, 9, 7], lengths, {IMAGE_ID})


@given(
    st.lists(st.one_of(st.integers(10, 20), st.just(IMAGE_ID)), max_size=30).flatmap(
        lambda ids: st.tuples(
            st.just(ids), st.lists(st.integers(1, 9), min_size=ids.count(IMAGE_ID), max_size=ids.count(IMAGE_ID))
        )
    )
)
def test_expansion_can_be_undone(case: tuple[list[int], list[int]]) -> None:
    logical, lengths = case
    expanded, ranges = expand_placeholders(logical, lengths, {IMAGE_ID})
    assert [placed.length for placed in ranges] == lengths
    for placed in reversed(ranges):
        assert set(expanded[placed.offset : placed.offset + placed.length]) == {IMAGE_ID}
        expanded[placed.offset : placed.offset + placed.length] = [IMAGE_ID]
    assert expanded == logical
