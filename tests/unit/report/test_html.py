"""The page: numbers, pictures, curves; nothing of a rollout can run or break it."""

from __future__ import annotations

import base64
import hashlib
import re
from html.parser import HTMLParser
from pathlib import Path

import msgspec
import pytest

from latepix.errors import ConfigError, TransportError
from latepix.report.html import write_report
from latepix.trace.graph import RolloutFailure
from latepix.trace.store import TraceWriter
from tests.unit.report.builders import draw_digit, make_run, make_trace, write_quarantine

HOSTILE = "<script>alert(1)</script></script><!--<img src=x onerror=alert(2)>\"'"


class _Page(HTMLParser):
    """Collects start tags with their attributes, and the text outside of scripts and styles."""

    def __init__(self, html: str) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.text = ""
        self._skip = False
        self.feed(html)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))
        self._skip = tag in ("script", "style")

    def handle_endtag(self, tag: str) -> None:
        self._skip = False

    def handle_data(self, data: str) -> None:
        self.text += "" if self._skip else data

    def all(self, tag: str, class_name: str = "") -> list[dict[str, str | None]]:
        """Return the attributes of the tags of one kind that carry a class."""
        return [a for name, a in self.tags if name == tag and class_name in f" {a.get('class') or ''} "]


def _report(run_dir: Path) -> _Page:
    return _Page(write_report(run_dir).read_text(encoding="utf-8"))


def test_page_has_the_headline_numbers(tmp_path: Path) -> None:
    page = _report(make_run(tmp_path / "first-run"))
    for text in (
        "first-run",
        "out/tiny-qwen3-vl",
        "digits",
        "0.548",
        "0.944",
        "1.2e-09",
        "4.5e-07",
        "312 B",
        "1.83 GB",
        "3 min 7 s",
        "of 20,480 rollouts",
    ):
        assert text in page.text, text


def test_page_shows_each_picture_of_the_selection_as_a_data_url(tmp_path: Path) -> None:
    image = draw_digit(4)
    TraceWriter(tmp_path).write("step_000000", [make_trace(image=image, rollout=index) for index in range(3)])
    page = _report(tmp_path)
    (shown,) = page.all("img")
    assert shown["src"] == image.url
    assert shown["width"] == "96"
    assert shown["class"] == "pixelated"
    assert "4 image tokens" in page.text


def test_page_draws_every_chart_and_loads_nothing(tmp_path: Path) -> None:
    page = _report(make_run(tmp_path / "run"))
    assert len(page.all("figure", "chart")) == 12
    assert all(len(path["d"] or "") > 20 for path in page.all("path"))
    for tag, attributes in page.tags:
        for name in ("src", "href"):
            assert (attributes.get(name) or "data:").startswith("data:"), (tag, attributes)


def test_policy_allows_only_the_pages_own_script(tmp_path: Path) -> None:
    html = write_report(make_run(tmp_path / "run")).read_text(encoding="utf-8")
    (script,) = re.findall(r"<script>(.*?)</script>", html, flags=re.DOTALL)
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    policy = next(a["content"] for a in _Page(html).all("meta") if a.get("http-equiv") == "Content-Security-Policy")
    assert policy is not None
    assert f"script-src 'sha256-{digest}'" in policy
    assert policy.startswith("default-src 'none'")


def test_script_in_rollouts_and_config_is_only_text(tmp_path: Path) -> None:
    run_dir = make_run(tmp_path / "run", num_steps=1)
    clean = _report(run_dir)
    traces = [
        make_trace(image=draw_digit(1), prompt=HOSTILE, reply=HOSTILE, answer=HOSTILE, rollout=i) for i in range(12)
    ]
    TraceWriter(run_dir).write("step_000000", traces)
    failed = make_trace(image=draw_digit(1), prompt=HOSTILE, failure=RolloutFailure(HOSTILE, HOSTILE))
    write_quarantine(run_dir, [failed])
    (run_dir / "config.json").write_text('{"model": {"path": "<script>alert(3)</script>"}}')
    html = (write_report(run_dir)).read_text(encoding="utf-8")
    page = _Page(html)
    assert len(page.all("script")) == len(clean.all("script")) == 2
    assert "<script>alert" not in html
    assert all("onerror" not in attributes for _, attributes in page.tags)
    assert page.text.count(HOSTILE) >= 14


def test_metric_names_cannot_leave_the_embedded_data(tmp_path: Path) -> None:
    html = write_report(make_run(tmp_path / "run")).read_text(encoding="utf-8")
    data = re.findall(r'<script type="application/json" id="hover">(.*?)</script>', html, flags=re.DOTALL)
    assert len(data) == 1
    assert "<" not in data[0]


def test_right_to_left_and_emoji_survive(tmp_path: Path) -> None:
    texts = ("ما هذا الرقم؟", "👩‍🔬🏳️‍🌈", "数字は何", "a\u2028b")
    traces = [make_trace(image=draw_digit(1), reply=text, rollout=index) for index, text in enumerate(texts)]
    TraceWriter(tmp_path).write("step_000000", traces)
    page = _report(tmp_path)
    for text in texts:
        assert text in page.text
    assert all(attributes.get("dir") == "auto" for attributes in page.all("p", "text"))


def test_rollouts_carry_outcome_reward_advantage_and_failure(tmp_path: Path) -> None:
    rewards = (1.0, 0.5, 0.0)
    traces = [
        make_trace(image=draw_digit(1), rollout=i, reward=reward, advantage=reward - 0.5, is_truncated=i == 2)
        for i, reward in enumerate(rewards)
    ]
    traces.append(make_trace(image=draw_digit(1), rollout=3, failure=RolloutFailure("timed_out", "after 300 s")))
    TraceWriter(tmp_path).write("step_000000", traces)
    page = _report(tmp_path)
    assert [a["data-outcome"] for a in page.all("article")] == ["correct", "partial", "wrong", "failed"]
    for text in ("+0.50", "\N{MINUS SIGN}0.50", "cut at the token limit", "timed_out: after 300 s", "expected"):
        assert text in page.text, text


def test_sampled_tokens_carry_their_logprobs(tmp_path: Path) -> None:
    TraceWriter(tmp_path).write("step_000000", [make_trace(image=draw_digit(1), logprobs=(-0.105, -0.002))])
    hints = [a["title"] for a in _report(tmp_path).all("span") if a.get("style", "").startswith("--p")]  # type: ignore
    assert hints == [
        "token 55 · logprob -0.105 · probability 0.9",
        "token 7 · logprob -0.002 · probability 0.998",
    ]


def test_missing_picture_is_shown_as_missing(tmp_path: Path) -> None:
    image = draw_digit(4)
    TraceWriter(tmp_path).write("step_000000", [make_trace(image=image)])
    (tmp_path / "images" / f"{image.sha256}.png").unlink()
    page = _report(tmp_path)
    assert page.all("img") == []
    assert "picture missing" in page.text


def test_half_written_run_gives_a_page_with_the_numbers_so_far(tmp_path: Path) -> None:
    run_dir = make_run(tmp_path / "run", num_steps=5)
    (run_dir / "summary.json").unlink()
    path = run_dir / "traces" / "step_000004.jsonl"
    path.write_bytes(path.read_bytes()[:-10])
    page = _report(run_dir)
    assert "summary.json is missing" in page.text
    assert "1 line was cut off or damaged" in page.text
    assert "0.944" in page.text
    assert "1.83 GB" in page.text


def test_run_that_only_has_a_config_gives_a_page(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"steps": 10}')
    page = _report(tmp_path)
    assert "No metrics were written yet." in page.text
    assert "No rollouts were written yet." in page.text
    assert "0 of 10 steps" in page.text


def test_report_replaces_an_earlier_one(tmp_path: Path) -> None:
    run_dir = make_run(tmp_path / "run", num_steps=1)
    assert write_report(run_dir) == write_report(run_dir) == run_dir / "report.html"
    assert not list(run_dir.glob("*.tmp"))


def test_not_a_run_folder_is_a_config_error_and_writes_nothing(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="is not a run folder"):
        write_report(tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_page_that_cannot_be_written_names_its_path(tmp_path: Path) -> None:
    run_dir = make_run(tmp_path / "run", num_steps=1)
    (run_dir / "report.html").mkdir()
    with pytest.raises(TransportError, match=r"Cannot write the report to .*report\.html"):
        write_report(run_dir)


def test_tool_calls_are_written_as_calls(tmp_path: Path) -> None:
    trace = make_trace(image=draw_digit(1))
    calls = (
        {"function": {"name": "zoom", "arguments": '{"box": [0, 8]}'}},
        {"function": {"name": "stop", "arguments": {}}},
    )
    message = msgspec.structs.replace(trace.nodes[1].message, tool_calls=(*calls, {"odd": 1}))
    nodes = (trace.nodes[0], msgspec.structs.replace(trace.nodes[1], message=message))
    TraceWriter(tmp_path).write("step_000000", [msgspec.structs.replace(trace, nodes=nodes)])
    assert 'zoom({"box": [0, 8]})\nstop({})\n{"odd": 1}' in _report(tmp_path).text


def test_what_siblings_share_is_shown_once(tmp_path: Path) -> None:
    traces = [make_trace(image=draw_digit(1), reply=str(index), rollout=index) for index in range(4)]
    other = make_trace(image=draw_digit(2), prompt="Another question", group_id=1)
    TraceWriter(tmp_path).write("step_000000", [*traces, other])
    page = _report(tmp_path)
    assert page.text.count("Which digit is this?") == 1
    assert len(page.all("img")) == 2
    assert len(page.all("article")) == 5
