from __future__ import annotations

import json
from pathlib import Path

import pytest

from latepix.errors import TransportError
from latepix.trace.graph import RolloutFailure
from latepix.trace.store import TraceWriter, image_path, read_traces
from tests.tiny.pictures import draw_picture, encode, make_image
from tests.tiny.traces import make_reply_node, make_trace, make_user_node

A, B = make_image(seed=1), make_image(seed=2)


def test_what_was_written_is_what_is_read(tmp_path: Path) -> None:
    nodes = [
        make_user_node(images=(A, B)),
        make_reply_node(parent=0),
        make_user_node(parent=1, images=(A,)),
        make_reply_node(parent=2, finish_reason="length", policy_version=3),
    ]
    traces = [make_trace(nodes=nodes, trace_id="one"), make_trace(trace_id="two", reward=-0.5, advantage=None)]
    path = TraceWriter(tmp_path).write("step_000001", traces)
    assert path == tmp_path / "traces" / "step_000001.jsonl"
    assert list(read_traces(path)) == traces


def test_each_picture_is_stored_once(tmp_path: Path) -> None:
    writer = TraceWriter(tmp_path)
    writer.write("step_000001", [make_trace(images=(A, B)), make_trace(images=(A,))])
    writer.write("step_000002", [make_trace(images=(B,))])
    TraceWriter(tmp_path).write("step_000003", [make_trace(images=(A,))])
    files = {path.name: path.read_bytes() for path in (tmp_path / "images").iterdir()}
    assert files == {f"{image.sha256}.png": image.data for image in (A, B)}


def test_lines_hold_no_picture_bytes(tmp_path: Path) -> None:
    path = TraceWriter(tmp_path).write("step_000001", [make_trace(images=(A,))])
    (line,) = path.read_text(encoding="utf-8").splitlines()
    (picture,) = [part["image"] for part in json.loads(line)["nodes"][0]["message"]["content"] if "image" in part]
    assert picture == {"sha256": A.sha256, "media_type": "image/png", "width": 32, "height": 32}


def test_a_jpeg_keeps_its_bytes_and_its_ending(tmp_path: Path) -> None:
    from latepix.trace.ingress import ingest_image

    image = ingest_image(encode(draw_picture(), file_format="JPEG"))
    path = TraceWriter(tmp_path).write("step_000001", [make_trace(images=(image,))])
    assert image_path(tmp_path / "images", image).name == f"{image.sha256}.jpg"
    assert next(iter(read_traces(path))) == make_trace(images=(image,))


def test_pictures_can_be_left_out(tmp_path: Path) -> None:
    path = TraceWriter(tmp_path).write("step_000001", [make_trace(images=(A,))])
    (trace,) = read_traces(path, with_images=False)
    (image,) = trace.branches[0].mm_refs.images
    assert (image.sha256, image.width, image.data) == (A.sha256, A.width, b"")


def test_a_step_replaces_its_file(tmp_path: Path) -> None:
    writer = TraceWriter(tmp_path)
    writer.write("step_000001", [make_trace(trace_id="old")])
    path = writer.write("step_000001", [make_trace(trace_id="new")])
    assert [trace.id for trace in read_traces(path)] == ["new"]
    assert [file.name for file in path.parent.iterdir()] == ["step_000001.jsonl"]


def test_quarantine_grows_and_is_read_back(tmp_path: Path) -> None:
    writer = TraceWriter(tmp_path)
    traces = [
        make_trace(trace_id=str(number), images=(A,), failure=RolloutFailure("environment_raised", "boom"))
        for number in range(3)
    ]
    writer.append_quarantine(traces[:1])
    writer.append_quarantine(traces[1:])
    assert list(read_traces(tmp_path / "quarantine.jsonl")) == traces


@pytest.mark.parametrize("damage", ["cut off", "not JSON", "not a trace"])
def test_a_damaged_line_is_named(tmp_path: Path, damage: str) -> None:
    path = TraceWriter(tmp_path).write("step_000001", [make_trace(trace_id="one"), make_trace(trace_id="two")])
    first, second = path.read_bytes().splitlines()
    path.write_bytes(first + b"\n" + {"cut off": second[:-30], "not JSON": b"oops", "not a trace": b"[]"}[damage])
    traces = read_traces(path)
    assert next(traces).id == "one"
    with pytest.raises(TransportError, match=r"step_000001.jsonl, line 2: "):
        next(traces)


def test_a_missing_picture_is_named(tmp_path: Path) -> None:
    path = TraceWriter(tmp_path).write("step_000001", [make_trace(images=(A,))])
    image_path(tmp_path / "images", A).unlink()
    with pytest.raises(TransportError, match=rf"line 1: .*{A.sha256}.png"):
        list(read_traces(path))


def test_a_full_disk_is_told_and_leaves_nothing(tmp_path: Path) -> None:
    writer = TraceWriter(tmp_path)
    (tmp_path / "traces" / "step_000001.jsonl.tmp").symlink_to("/dev/full")
    with pytest.raises(TransportError, match=r"step_000001.jsonl: No space left on device"):
        writer.write("step_000001", [make_trace()])
    assert list((tmp_path / "traces").iterdir()) == []
    assert Path("/dev/full").is_char_device()


def test_a_picture_that_was_not_stored_in_full_is_stored_later(tmp_path: Path) -> None:
    partial = image_path(tmp_path / "images", A).with_suffix(".tmp")
    writer = TraceWriter(tmp_path)
    partial.symlink_to("/dev/full")
    with pytest.raises(TransportError, match="No space left"):
        writer.write("step_000001", [make_trace(images=(A,))])
    assert list((tmp_path / "images").iterdir()) == []
    # The next run of the same folder, after a crash that left a part of a picture.
    partial.write_bytes(A.data[:10])
    path = TraceWriter(tmp_path).write("step_000001", [make_trace(images=(A,))])
    assert list(read_traces(path)) == [make_trace(images=(A,))]


def test_a_full_disk_stops_the_quarantine(tmp_path: Path) -> None:
    writer = TraceWriter(tmp_path)
    (tmp_path / "quarantine.jsonl").symlink_to("/dev/full")
    with pytest.raises(TransportError, match=r"quarantine.jsonl: No space left on device"):
        writer.append_quarantine([make_trace()])


def test_a_line_whose_lists_do_not_fit_each_other_is_named(tmp_path: Path) -> None:
    path = TraceWriter(tmp_path).write("step_000000", [make_trace()])
    lines = json.loads(path.read_text())
    lines["nodes"][0]["mask"].append(False)
    path.write_text(json.dumps(lines))
    with pytest.raises(TransportError, match=r"line 1: trace .*, node 0: .* do not fit each other"):
        list(read_traces(path))


def test_a_picture_that_was_changed_is_noticed(tmp_path: Path) -> None:
    picture = make_image(seed=3)
    path = TraceWriter(tmp_path).write("step_000000", [make_trace(nodes=[make_user_node(images=[picture])])])
    (stored,) = (tmp_path / "images").iterdir()
    stored.write_bytes(make_image(seed=4).data)
    with pytest.raises(TransportError, match="was changed after it was stored"):
        list(read_traces(path))
