"""Traces of `verifiers` (v1) -> branches that `trace_to_samples` reads like our own. `verifiers` is never imported.

In: a trace read by attribute (`nodes`, `branches`; per node `parent`, `message`, `token_ids`, `mask`, `logprobs`). Out:
`ForeignBranch`, with the arrays of `trace.graph.Branch`. What holds:

* a node's arrays fit each other, or the trace is refused: nothing is padded or cut;
* such a trace does not say where the server placed its pictures, so its pictures are paired in order with the runs of
  placeholder tokens; each must have exactly the tokens that a picture of its size takes, and none may be left over.

Worked example, placeholder id 9, pictures A and B of 2 and 4 tokens that touch, then A again::

    token_ids  [5, 9, 9, 9, 9, 9, 9, 6, 9, 9, 7]
    slots      (A, 1, 2) (B, 3, 4) (A, 8, 2)
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cached_property
from itertools import accumulate
from typing import Any, NamedTuple, Protocol, TypeAlias

import numpy as np

from latepix.errors import ConfigError, ImageError, PlaceholderMismatch, RolloutError
from latepix.families.model_info import ModelInfo
from latepix.trace.ingress import InlineImage, ingest_image
from latepix.trace.refs import MMRefs

Ingest: TypeAlias = Callable[[Any], InlineImage]

#: `type` of the content parts that hold a picture.
_PICTURE_TYPES = frozenset({"image_url", "input_image", "image"})


class ForeignTrace(Protocol):
    """What a foreign trace must have.

    Read where they are there: `has_error`, `agent.trainable`, `advantage` of the trace, `trainable` and
    `mm_token_type_ids` of a branch, `advantages` and `policy_version` of a node.
    """

    @property
    def id(self) -> str:
        """Names the trace in errors and samples."""
        ...

    @property
    def nodes(self) -> Sequence[Any]:
        """The messages, each with the tokens it adds."""
        ...

    @property
    def branches(self) -> Sequence[Any]:
        """Root-to-leaf paths; `branch.nodes` are objects of `nodes`."""
        ...


class _Picture(NamedTuple):
    """A picture of a branch, and how errors name it."""

    where: str
    image: InlineImage


def foreign_branches(
    trace: ForeignTrace, *, info: ModelInfo | None, ingest: Ingest | None
) -> Iterator[tuple[int, ForeignBranch]]:
    """Yield the branches of a foreign trace that may be trained, each with its place in `trace.branches`.

    None for a trace that failed or did not finish, or whose agent is not trained.

    Raises:
        PlaceholderMismatch: a node's arrays do not fit each other; names trace, branch and message.
        RolloutError: a value is NaN or infinite.
    """
    agent = getattr(trace, "agent", None)
    if getattr(trace, "has_error", False) or not getattr(agent, "trainable", True):
        return
    numbers = {id(node): index for index, node in enumerate(trace.nodes)}
    has_advantages = any(getattr(node, "advantages", None) is not None for node in trace.nodes)
    images: dict[int, list[InlineImage]] = {}
    for number, branch in enumerate(trace.branches):
        if not getattr(branch, "trainable", True):
            continue
        where = f"trace {trace.id}, branch {number}"
        unknown = [index for index, node in enumerate(branch.nodes) if id(node) not in numbers]
        if unknown:
            raise PlaceholderMismatch(
                f"{where}: message {unknown[0]} is none of the {len(trace.nodes)} objects in trace.nodes. Branches "
                "must share the nodes of their trace, or a shared answer would be trained several times."
            )
        yield (
            number,
            ForeignBranch(
                branch,
                node_indices=tuple(numbers[id(node)] for node in branch.nodes),
                where=where,
                has_advantages=has_advantages,
                info=info,
                ingest=ingest or ingest_image,
                images=images,
            ),
        )


class ForeignBranch:
    """One path of a foreign trace; `mm_refs` decodes its pictures when it is first asked for.

    Attributes:
        nodes: the path's nodes, root first.
        node_indices: their places in `trace.nodes`.
        node_starts: offset of each node's first token, and the total length at the end.
        token_ids: [T] int32: the ids the server saw.
        sampled_mask: [T] bool: tokens the policy sampled.
        logprobs: [T] float32, nats, by the server; 0 where the token was not sampled.
        advantages: [T] float32, 0 for a node that has none; None if no node of the trace has any.
    """

    def __init__(
        self,
        branch: Any,
        *,
        node_indices: tuple[int, ...],
        where: str,
        has_advantages: bool,
        info: ModelInfo | None,
        ingest: Ingest,
        images: dict[int, list[InlineImage]],
    ) -> None:
        self._branch = branch
        self._where = where
        self._info = info
        self._ingest = ingest
        # Of every node that was read, by its index: branches that share a node decode its pictures once.
        self._images = images
        self.nodes: list[Any] = list(branch.nodes)
        self.node_indices = node_indices
        self.node_starts = [0, *accumulate(len(node.token_ids) for node in self.nodes)]
        for index, node in enumerate(self.nodes):
            if len(node.mask) != len(node.token_ids):
                raise PlaceholderMismatch(
                    f"{self._name(index)}: {len(node.token_ids)} tokens, but a mask of {len(node.mask)} values."
                )
        self.token_ids = np.asarray([token for node in self.nodes for token in node.token_ids], dtype=np.int32)
        self.sampled_mask = np.asarray([sampled for node in self.nodes for sampled in node.mask], dtype=bool)
        self.logprobs = self._spread("logprobs", [node.logprobs for node in self.nodes])
        self.advantages: np.ndarray | None = None
        if has_advantages:
            values = [getattr(node, "advantages", None) for node in self.nodes]
            self.advantages = self._spread("advantages", values)

    @cached_property
    def mm_refs(self) -> MMRefs:
        """The pictures of the path and where they sit in `token_ids`.

        Raises:
            ImageError: ingress refuses a picture; names trace, branch, message and image.
            PlaceholderMismatch: pictures and placeholder tokens do not fit; names trace, branch, image, both numbers.
            ConfigError: there are pictures, but no `info` about the model.
        """
        sources = [list(iter_pictures(node.message)) for node in self.nodes]
        num_pictures = sum(len(inside) for inside in sources)
        if self._info is None:
            self._check_text_only(num_pictures)
            return MMRefs()
        pictures = self._pictures(sources)
        self._check_placeholders(self._info)
        return MMRefs.from_slots(_pair(pictures, self.token_ids, self._info, self._where))

    def _name(self, index: int) -> str:
        """Name a message in an error."""
        return f"{self._where}, message {index} ({_get(self.nodes[index].message, 'role')})"

    def _spread(self, field: str, values: Sequence[Sequence[float] | None]) -> np.ndarray:
        """Return [T] float32 from one value per sampled token of each node; 0 for a node with None."""
        spread = np.zeros(len(self.token_ids), dtype=np.float32)
        for index, (start, end, inside) in enumerate(
            zip(self.node_starts[:-1], self.node_starts[1:], values, strict=True)
        ):
            if inside is None:
                continue
            sampled = self.sampled_mask[start:end]
            if len(inside) != sampled.sum():
                raise PlaceholderMismatch(
                    f"{self._name(index)}: {sampled.sum()} sampled tokens, but {len(inside)} {field}. Ask the server "
                    "for one logprob per sampled token."
                )
            spread[start:end][sampled] = inside
        if not np.isfinite(spread).all():
            index = int(np.searchsorted(self.node_starts, np.flatnonzero(~np.isfinite(spread))[0], side="right")) - 1
            raise RolloutError(f"{self._name(index)}: {field} hold a value that is NaN or infinite.")
        return spread

    def _check_text_only(self, num_pictures: int) -> None:
        if num_pictures:
            raise ConfigError(
                f"{self._where} has {num_pictures} pictures, so `trace_to_samples` must know the model: pass "
                "info=read_model_info(model_folder)."
            )
        types = getattr(self._branch, "mm_token_type_ids", None)
        if types is not None and any(types):
            raise PlaceholderMismatch(
                f"{self._where}: 0 pictures, but {sum(map(bool, types))} placeholder tokens. The pictures were taken "
                "out of the messages; keep them inline."
            )

    def _check_placeholders(self, info: ModelInfo) -> None:
        """Refuse placeholders that the policy sampled, and those of other media."""
        is_placeholder = np.isin(self.token_ids, np.asarray(info.placeholder_ids))
        if (sampled := is_placeholder & self.sampled_mask).any():
            raise PlaceholderMismatch(
                f"{self._where}: the policy sampled {sampled.sum()} placeholder tokens, the first at "
                f"{np.flatnonzero(sampled)[0]}; pictures can no longer be told from them. Ban "
                f"{list(info.placeholder_ids)} in sampling."
            )
        if (other := is_placeholder & (self.token_ids != info.image_placeholder_id)).any():
            raise PlaceholderMismatch(
                f"{self._where}: {other.sum()} tokens stand for other media than pictures, the first at "
                f"{np.flatnonzero(other)[0]}; wanted 0."
            )

    def _pictures(self, sources: Sequence[Sequence[Any]]) -> list[_Picture]:
        """Return the canonical pictures of all messages, in order."""
        pictures: list[_Picture] = []
        for index, (number, inside) in enumerate(zip(self.node_indices, sources, strict=True)):
            names = [f"{self._name(index)}, image {len(pictures) + place}" for place in range(len(inside))]
            if number not in self._images:
                self._images[number] = [self._load(source, name) for source, name in zip(inside, names, strict=True)]
            pictures += map(_Picture, names, self._images[number])
        return pictures

    def _load(self, source: Any, name: str) -> InlineImage:
        try:
            return self._ingest(source)
        except ImageError as error:
            raise ImageError(f"{name}: {error}", error.reason) from error


def iter_pictures(message: Any) -> Iterator[Mapping[str, Any]]:
    """Yield the pictures of a foreign message in reading order, as `ingest_image` takes them.

    The one walker over foreign pictures. A message and its parts may be objects (pydantic) or mappings.
    """
    content = _get(message, "content")
    for part in () if content is None or isinstance(content, str) else content:
        plain = part.model_dump() if hasattr(part, "model_dump") else part
        if isinstance(plain, Mapping) and _is_picture(plain):
            yield plain


def _is_picture(part: Mapping[str, Any]) -> bool:
    kind = part.get("type")
    # Without a type it is a picture if it holds one, as the renderers see it.
    return kind in _PICTURE_TYPES or (kind is None and any(part.get(key) is not None for key in ("image", "image_url")))


def _get(item: Any, key: str) -> Any:
    return item.get(key) if isinstance(item, Mapping) else getattr(item, key, None)


def _pair(
    pictures: Sequence[_Picture], token_ids: np.ndarray, info: ModelInfo, where: str
) -> list[tuple[InlineImage, int, int]]:
    """Return (picture, offset, length) slots: each picture takes its tokens from the runs, in order.

    Args:
        pictures: all pictures of the branch, in order.
        token_ids: [T] of the branch.
    Raises:
        PlaceholderMismatch: the first picture or run that does not fit, with both numbers.
    """
    is_placeholder = token_ids == info.image_placeholder_id
    runs = np.flatnonzero(np.diff(is_placeholder, prepend=False, append=False)).reshape(-1, 2).tolist()
    counts = f"The branch has {len(pictures)} pictures and {len(runs)} placeholder runs."
    slots: list[tuple[InlineImage, int, int]] = []
    taken = 0  # tokens of the first run that is left
    for number, (name, image) in enumerate(pictures):
        length = info.num_image_tokens(image)
        needs = f"{name}: a picture of {image.width} x {image.height} needs {length} tokens"
        if not runs:
            raise PlaceholderMismatch(f"{needs}, 0 placeholder tokens are left. {counts} Was a picture left out?")
        start, end = runs[0]
        left = end - start - taken
        # Where more pictures than runs are left, another picture follows in the same run.
        touches = len(pictures) - number > len(runs)
        if left < length or (left > length and not touches):
            raise PlaceholderMismatch(
                f"{needs}, its placeholder run [{start + taken}, {end}) has {left}. {counts} The server resized it in "
                f"another way than {info.path} says, or pictures are missing."
            )
        slots.append((image, start + taken, length))
        taken += length
        if left == length:
            runs, taken = runs[1:], 0
    if runs:
        start, end = runs[0]
        raise PlaceholderMismatch(
            f"{where}, image {len(pictures)}: the placeholder run [{start + taken}, {end}) of {end - start - taken} "
            f"tokens has 0 pictures. {counts} Keep every picture inline in its message."
        )
    return slots
