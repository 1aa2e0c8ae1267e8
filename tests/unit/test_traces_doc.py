"""`docs/traces.md` says how traces lie on disk: its example is read, and its tables name every field."""

from __future__ import annotations

import base64
import re
from pathlib import Path

import msgspec
import pytest

from latepix import TrainingSample, read_traces, trace_to_samples
from latepix.trace.graph import MessageNode, RolloutFailure, Trace
from latepix.trace.ingress import InlineImage, ingest_image
from latepix.trace.messages import Message
from latepix.trace.refs import PlaceholderRange
from latepix.trace.store import TraceWriter

TEXT = (Path(__file__).parents[2] / "docs" / "traces.md").read_text(encoding="utf-8")


def block(language: str) -> str:
    """Return the only code block of the page in a language."""
    (content,) = re.findall(rf"^```{language}\n(.*?)^```$", TEXT, re.MULTILINE | re.DOTALL)
    return content


@pytest.fixture
def example(tmp_path: Path) -> Path:
    """Lay the page's line and picture down as a run folder does."""
    (name,) = re.findall(r"`images/([0-9a-f]{64}\.png)`", TEXT)
    (tmp_path / "images").mkdir()
    (tmp_path / "images" / name).write_bytes(base64.b64decode(block("text")))
    (tmp_path / "traces").mkdir()
    path = tmp_path / "traces" / "step_000003.jsonl"
    path.write_text(block("json"), encoding="utf-8")
    return path


def test_the_example_gives_the_sample_it_is_said_to_give(example: Path) -> None:
    (trace,) = read_traces(example)
    (sample,) = trace_to_samples(trace)
    arrays = {
        name: [float(value) for value in values.split()]
        for name, values in re.findall(r"^\| `(\w+)` \| `([-\d. ]+)` \|$", TEXT, re.MULTILINE)
    }
    assert arrays.keys() == {"token_ids", "loss_mask", "inference_logprobs", "advantages"} < set(fields(TrainingSample))
    for name, values in arrays.items():
        assert getattr(sample, name).tolist() == values, name
    ((image, offset, length),) = sample.mm_refs.slots()
    assert (offset, length) == (1, 2)
    assert image == ingest_image(image.url)
    assert (sample.temperature, sample.policy_version, sample.group_id) == (0.7, 3, 7)


def test_our_writer_writes_the_example_as_it_stands(example: Path, tmp_path: Path) -> None:
    written = TraceWriter(tmp_path / "again").write("step_000003", read_traces(example))
    assert written.read_text(encoding="utf-8") == block("json")


@pytest.mark.parametrize("struct", [Trace, MessageNode, Message, InlineImage, PlaceholderRange, RolloutFailure])
def test_the_page_names_every_field(struct: type[msgspec.Struct]) -> None:
    missing = [name for name in fields(struct) if f"`{name}`" not in TEXT]
    # The bytes of a picture are never in a line.
    assert missing == (["data"] if struct is InlineImage else [])


def fields(struct: type[msgspec.Struct]) -> list[str]:
    """Return the names of a struct's fields."""
    return [field.name for field in msgspec.structs.fields(struct)]
