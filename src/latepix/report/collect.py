"""Run folder -> plain data, also while the run goes on or after it was cut off.

In: what `latepix rl` (or `sft`) wrote so far. Out: a `RunReport`, read by `report/html.py`. What holds:

* everything in it is frozen and bounded: rollouts are a selection of whole groups from a few steps;
* whatever is missing or damaged is left out, and said in `notes`; only a folder that is no run at all is an error;
* pictures are data URLs, small ones byte for byte, large ones as thumbnails.
"""

from __future__ import annotations

import base64
import io
import json
import math
import re
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any, Literal

import msgspec
from PIL import Image

from latepix.errors import ConfigError
from latepix.metrics import MetricsTail
from latepix.trace.graph import Trace
from latepix.trace.ingress import InlineImage
from latepix.trace.messages import iter_images
from latepix.trace.store import image_path

#: Pictures with a longer side than this are embedded as thumbnails.
THUMBNAIL_PX = 512
_MAX_REASONS = 50
_SHA256 = re.compile(r"[0-9a-f]{64}")
_TRACE_DECODER = msgspec.json.Decoder(Trace)


class Series(msgspec.Struct, frozen=True):
    """One metric over the steps that have it; finite numbers only.

    Attributes:
        steps: in rising order.
        values: parallel to `steps`.
    """

    steps: tuple[int, ...] = ()
    values: tuple[float, ...] = ()


class RolloutGroup(msgspec.Struct, frozen=True):
    """Siblings of one prompt; pictures in `traces` carry no bytes, see `RunReport.pictures`."""

    group_id: int
    traces: tuple[Trace, ...]


class RolloutSource(msgspec.Struct, frozen=True):
    """Rollouts of one training step, one evaluation, or the quarantine.

    Attributes:
        kind: where they come from.
        step: training step, or policy version for an evaluation.
        groups: the selection, in the order of the file.
        num_rollouts: in the file, selected or not.
        reward_mean: over the whole file; None if nothing was rewarded.
    """

    kind: Literal["train", "eval", "quarantine"]
    step: int
    groups: tuple[RolloutGroup, ...]
    num_rollouts: int
    reward_mean: float | None = None

    @property
    def num_shown(self) -> int:
        """Rollouts of the selection."""
        return sum(len(group.traces) for group in self.groups)


class QuarantineReason(msgspec.Struct, frozen=True):
    """Failed rollouts that share a reason.

    Attributes:
        reason: the stable code.
        count: how many.
        first_step: the earliest step it was seen in.
        examples: a few of the messages, without repeats.
    """

    reason: str
    count: int
    first_step: int
    examples: tuple[str, ...]


class RunReport(msgspec.Struct, frozen=True):
    """Everything the page shows of one run.

    Attributes:
        name: of the run folder.
        config: the resolved settings, `{}` if unreadable.
        summary: `summary.json`, `{}` while the run goes on.
        series: by metric key.
        sources: selected rollouts: training steps, then evaluations, then the quarantine.
        pictures: data URL by sha256; None for a picture that is missing.
        quarantine: by falling count.
        notes: what was missing or damaged, one sentence each.
    """

    name: str
    config: dict[str, Any]
    summary: dict[str, Any]
    series: dict[str, Series]
    sources: tuple[RolloutSource, ...]
    pictures: dict[str, str | None]
    quarantine: tuple[QuarantineReason, ...]
    notes: tuple[str, ...]


def collect_run(run_dir: Path, *, max_rollouts: int = 240) -> RunReport:
    """Read a run folder.

    Args:
        run_dir: the folder; it may be half written.
        max_rollouts: rollouts to select, over all steps and evaluations together; at least 1.
    Raises:
        ConfigError: `run_dir` is not a run folder.
    """
    if max_rollouts < 1:
        raise ConfigError(f"max_rollouts must be at least 1, got {max_rollouts}.")
    _check_is_run(run_dir)
    notes: list[str] = []
    config = _read_object(run_dir / "config.json", "The settings are not shown.", notes)
    summary = _read_object(
        run_dir / "summary.json", "The run has not finished, or was cut off; numbers are those so far.", notes
    )
    series = _read_series(run_dir / "metrics.jsonl", notes)
    sources = _select_sources(run_dir, max_rollouts, notes)
    quarantine, failed = _read_quarantine(run_dir / "quarantine.jsonl", max_rollouts, notes)
    if failed is not None:
        sources.append(failed)
    return RunReport(
        name=run_dir.resolve().name,
        config=config,
        summary=summary,
        series=series,
        sources=tuple(sources),
        pictures=_read_pictures(run_dir / "images", sources, notes),
        quarantine=quarantine,
        notes=tuple(notes),
    )


def _check_is_run(run_dir: Path) -> None:
    signs = ("config.json", "metrics.jsonl", "traces")
    if not run_dir.is_dir():
        problem = "it is not a folder" if run_dir.exists() else "it does not exist"
    elif not any((run_dir / sign).exists() for sign in signs):
        problem = f"it has none of {', '.join(signs)}"
    else:
        return
    raise ConfigError(
        f"{run_dir} is not a run folder: {problem}. Give the `output_dir` of a `latepix rl` or `latepix sft` run."
    )


def _read_object(path: Path, consequence: str, notes: list[str]) -> dict[str, Any]:
    try:
        value = json.loads(path.read_bytes())
    except FileNotFoundError:
        notes.append(f"{path.name} is missing. {consequence}")
        return {}
    except (OSError, ValueError) as error:
        notes.append(f"{path.name} cannot be read ({error}). {consequence}")
        return {}
    if isinstance(value, dict):
        return value
    notes.append(f"{path.name} is not a JSON object. {consequence}")
    return {}


def _read_series(path: Path, notes: list[str]) -> dict[str, Series]:
    tail = MetricsTail(path)
    try:
        rows = tail.read()
    except OSError as error:
        notes.append(f"{path.name} cannot be read ({error.strerror}); no curves are drawn.")
        return {}
    if tail.num_skipped:
        notes.append(f"{path.name} holds {tail.num_skipped} lines that are no rows of metrics; they were skipped.")
    points: dict[str, list[tuple[int, float]]] = defaultdict(list)
    for row in rows:
        for key, value in row.items():
            if key != "step" and isinstance(value, int | float) and math.isfinite(value):
                points[key].append((int(row["step"]), float(value)))
    return {
        key: Series(steps=tuple(step for step, _ in pairs), values=tuple(value for _, value in pairs))
        for key, pairs in points.items()
    }


def _read_traces(path: Path, notes: list[str]) -> list[Trace]:
    # `trace.store.read_traces` stops at the first damaged line, which is right for training and wrong for looking.
    traces, num_skipped = [], 0
    try:
        with path.open("rb") as lines:
            for line in lines:
                try:
                    traces.append(_TRACE_DECODER.decode(line))
                except (msgspec.MsgspecError, UnicodeDecodeError):
                    num_skipped += 1
    except OSError as error:
        notes.append(f"{path.name} cannot be read ({error.strerror}).")
    if num_skipped:
        lines_were = "1 line was" if num_skipped == 1 else f"{num_skipped} lines were"
        notes.append(f"{path.name}: {lines_were} cut off or damaged, and skipped.")
    return traces


def _select_sources(run_dir: Path, max_rollouts: int, notes: list[str]) -> list[RolloutSource]:
    steps = _numbered_files(run_dir / "traces", "step")
    evals = _numbered_files(run_dir / "traces", "eval")
    chosen: list[tuple[Literal["train", "eval"], int, Path]] = []
    chosen += [("train", *item) for item in _evenly(steps, 3)]
    chosen += [("eval", *item) for item in _evenly(evals, 2)]
    # The last ones say most: they survive a small budget.
    order = sorted(range(len(chosen)), key=lambda index: (chosen[index][1], index), reverse=True)
    kept = sorted(order[:max_rollouts])
    sources = []
    for index in kept:
        kind, step, path = chosen[index]
        share = max_rollouts // len(kept)
        traces = _read_traces(path, notes)
        rewards = [trace.reward for trace in traces if trace.reward is not None]
        groups = _select_groups(traces, share, wrong_first=kind == "eval")
        sources.append(
            RolloutSource(
                kind=kind,
                step=step,
                groups=tuple(groups),
                num_rollouts=len(traces),
                reward_mean=sum(rewards) / len(rewards) if rewards else None,
            )
        )
    return sources


def _numbered_files(folder: Path, prefix: str) -> list[tuple[int, Path]]:
    pattern = re.compile(rf"{prefix}_(\d+)\.jsonl")
    matches = ((pattern.fullmatch(path.name), path) for path in folder.glob(f"{prefix}_*.jsonl"))
    return sorted((int(match[1]), path) for match, path in matches if match)


def _select_groups(traces: Iterable[Trace], share: int, *, wrong_first: bool) -> list[RolloutGroup]:
    by_id: dict[int, list[Trace]] = defaultdict(list)
    for trace in traces:
        by_id[trace.group_id].append(trace)
    groups = [RolloutGroup(group_id=key, traces=tuple(siblings)) for key, siblings in by_id.items()]
    if not groups:
        return []
    group_size = max(len(group.traces) for group in groups)
    room = max(1, share // group_size)
    picked: list[RolloutGroup] = []
    if wrong_first:
        # A good policy's misses are rare and the most worth looking at: they get up to half of the room.
        missed = [group for group in groups if any((trace.reward or 0) <= 0 for trace in group.traces)]
        picked = _evenly(missed, room // 2)
    chosen = {group.group_id for group in picked}
    rest = [group for group in groups if group.group_id not in chosen]
    picked += _evenly(rest, room - len(picked))
    return [
        msgspec.structs.replace(group, traces=group.traces[:share])
        for group in sorted(picked, key=lambda group: group.group_id)
    ]


def _evenly(items: Sequence[Any], count: int) -> list[Any]:
    """Pick up to `count` items, evenly spaced, the last one always among them and the first from two on."""
    if count <= 0 or not items:
        return []
    if count == 1:
        return [items[-1]]
    if count >= len(items):
        return list(items)
    return [items[round(index * (len(items) - 1) / (count - 1))] for index in range(count)]


def _read_quarantine(
    path: Path, max_rollouts: int, notes: list[str]
) -> tuple[tuple[QuarantineReason, ...], RolloutSource | None]:
    if not path.exists():
        return (), None
    traces = _read_traces(path, notes)
    by_reason: dict[str, list[Trace]] = defaultdict(list)
    for trace in traces:
        by_reason[trace.failure.reason if trace.failure else "unknown"].append(trace)
    counts = Counter({reason: len(group) for reason, group in by_reason.items()})
    reasons, groups = [], []
    for reason, count in counts.most_common(_MAX_REASONS):
        messages = dict.fromkeys(trace.failure.message for trace in by_reason[reason] if trace.failure)
        reasons.append(
            QuarantineReason(
                reason=reason,
                count=count,
                first_step=min(trace.step for trace in by_reason[reason]),
                examples=tuple(messages)[:3],
            )
        )
        groups += [RolloutGroup(group_id=trace.group_id, traces=(trace,)) for trace in by_reason[reason][:4]]
    if not traces:
        return (), None
    source = RolloutSource(
        kind="quarantine",
        step=min(trace.step for trace in traces),
        groups=tuple(groups[: max(1, max_rollouts // 4)]),
        num_rollouts=len(traces),
    )
    return tuple(reasons), source


def _read_pictures(images_dir: Path, sources: Iterable[RolloutSource], notes: list[str]) -> dict[str, str | None]:
    pictures: dict[str, str | None] = {}
    traces = (trace for source in sources for group in source.groups for trace in group.traces)
    for trace in traces:
        for image in iter_images(node.message for node in trace.nodes):
            if image.sha256 not in pictures:
                pictures[image.sha256] = _data_url(images_dir, image)
    num_missing = sum(url is None for url in pictures.values())
    if num_missing:
        pictures_are = "1 picture is" if num_missing == 1 else f"{num_missing} pictures are"
        notes.append(f"{pictures_are} missing from images/, or damaged; their places are marked.")
    return pictures


def _data_url(images_dir: Path, image: InlineImage) -> str | None:
    if not _SHA256.fullmatch(image.sha256) or image.media_type not in ("image/png", "image/jpeg"):
        return None
    try:
        data = image_path(images_dir, image).read_bytes()
        with Image.open(io.BytesIO(data), formats=["PNG", "JPEG"]) as picture:
            if max(picture.size) <= THUMBNAIL_PX:
                picture.verify()
                return _encode_url(image.media_type, data)
            picture.thumbnail((THUMBNAIL_PX, THUMBNAIL_PX))
            buffer = io.BytesIO()
            picture.convert("RGB").save(buffer, format="JPEG", quality=85)
    except (OSError, ValueError, SyntaxError, Image.DecompressionBombError):
        return None
    return _encode_url("image/jpeg", buffer.getvalue())


def _encode_url(media_type: str, data: bytes) -> str:
    return f"data:{media_type};base64,{base64.b64encode(data).decode('ascii')}"


def token_writer(model_path: str | None) -> Callable[[int], str] | None:
    """Return a function from token id to text, or None where the model's `tokenizer.json` cannot be read."""
    path = Path(model_path or "") / "tokenizer.json"
    if not model_path or not path.is_file():
        return None
    from tokenizers import Tokenizer  # only here: a report can be made without it

    try:
        tokenizer = Tokenizer.from_file(str(path))
    except Exception:
        # The library raises bare Exception for a damaged file; ids are shown in place of texts.
        return None
    return lambda token_id: tokenizer.decode([token_id], skip_special_tokens=False)
