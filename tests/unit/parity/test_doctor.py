"""The doctor finds what differs, says both values, and tells the server's end from the end of one request."""

from __future__ import annotations

import asyncio
import base64
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest

from latepix.config.schema import DoctorConfig, RunConfig
from latepix.errors import ProcessFailed, SchemaMismatch
from latepix.families.facts import local_facts
from latepix.families.model_info import ModelInfo
from latepix.inference.client import ANYWHERE, InferenceClient, Prompt
from latepix.inference.contract import PixelsResponse, ProcessedPixels
from latepix.inference.control import ServerControl
from latepix.inference.facts import Difference
from latepix.parity.cases import Case, conversation_cases, picture_cases
from latepix.parity.compare import Mismatch, Pixels, Placement, compare_pixels, compare_placements, server_pixels
from latepix.parity.doctor import run_doctor
from latepix.parity.examine import Examiner, TrainerSide
from latepix.parity.findings import Findings, Row
from latepix.parity.pack import picture_pack
from latepix.trace.ingress import ingest_image
from latepix.trace.refs import PlaceholderRange
from tests.tiny.servers import ScriptedServer, scripted_server

TOLERANCE = 1e-5
#: Alters what the honest server is about to answer; the route and the answer go in.
Change = Callable[[str, Any], Any]


def placement(ids: list[int], *ranges: tuple[int, int]) -> Placement:
    return Placement(token_ids=ids, ranges=[PlaceholderRange(offset=at, length=n) for at, n in ranges])


def picture(*, grid: tuple[int, int, int] = (1, 4, 6), value: float = 0.5, rows: int = 24) -> Pixels:
    return Pixels(grid_thw=grid, values=np.full((rows, 8), value, dtype=np.float32))


OURS = placement([1, 9, 9, 2, 9, 9, 9, 3], (1, 2), (4, 3))


def kinds_of(found: list[Mismatch]) -> list[tuple[str, str, str, str]]:
    return [(one.kind, one.what, one.server, one.trainer) for one in found]


def test_equal_prompts_have_no_mismatch() -> None:
    assert compare_placements(placement([1, 9, 9, 2, 9, 9, 9, 3], (1, 2), (4, 3)), OURS) == []


@pytest.mark.parametrize(
    ("server", "wanted"),
    [
        (
            placement([1, 9, 9, 9, 2, 9, 9, 9, 3], (1, 3), (5, 3)),
            [
                ("places", "placeholder tokens of picture 0", "3", "2"),
                ("places", "placeholder start of picture 1", "5", "4"),
                ("ids", "length of the prompt", "9 tokens", "8 tokens"),
            ],
        ),
        (
            placement([1, 9, 9, 2, 9, 9, 9, 3], (0, 2), (4, 3)),
            [("places", "placeholder start of picture 0", "0", "1")],
        ),
        (
            placement([1, 9, 9, 2, 9, 9, 9, 3], (1, 2)),
            [("places", "number of placeholders", "1", "2")],
        ),
        (
            placement([1, 9, 9, 7, 9, 9, 9, 8], (1, 2), (4, 3)),
            [("ids", "token ids (2 differ, the first at 3)", "7", "2")],
        ),
    ],
    ids=["longer", "shifted", "fewer", "other_ids"],
)
def test_a_wrong_prompt_is_told_with_both_values(server: Placement, wanted: list[tuple[str, str, str, str]]) -> None:
    assert kinds_of(compare_placements(server, OURS)) == wanted


def compare_one(server: Pixels, trainer: Pixels) -> tuple[list[Mismatch], float | None]:
    return compare_pixels([server], [trainer], [(96, 64)], patch_size=16, tolerance=TOLERANCE)


def test_pixels_within_the_tolerance_pass_and_are_measured() -> None:
    found, largest = compare_one(picture(value=0.5 + 5e-6), picture())
    assert found == []
    assert largest == pytest.approx(5e-6, rel=0.1)
    assert compare_pixels([], [], [], patch_size=16, tolerance=TOLERANCE) == ([], None)


@pytest.mark.parametrize("value", [0.5 + 2e-5, np.nan, np.inf])
def test_pixels_beyond_the_tolerance_are_told(value: float) -> None:
    server = picture()
    server.values[3, 4] = value
    found, largest = compare_one(server, picture())
    assert [one.kind for one in found] == ["pixels"]
    assert "allowed 1e-05, at 28 of 192" in found[0].what
    assert (found[0].server, found[0].trainer) == (f"{np.float32(value):.6g}", "0.5")
    assert largest is not None
    assert not largest <= TOLERANCE


def test_one_picture_that_is_not_a_number_is_not_hidden_by_the_next() -> None:
    _, largest = compare_pixels(
        [picture(value=np.nan), picture()], [picture()] * 2, [(96, 64)] * 2, patch_size=16, tolerance=TOLERANCE
    )
    assert largest is not None
    assert np.isnan(largest)


def test_another_grid_of_as_many_patches_is_told() -> None:
    found, largest = compare_one(picture(grid=(1, 6, 4)), picture())
    assert kinds_of(found) == [
        ("grid", "grid", "1 x 6 x 4", "1 x 4 x 6"),
        ("grid", "decoded size", "64 x 96 pixels", "96 x 64 pixels"),
    ]
    assert largest == 0


def test_pixels_of_another_shape_or_number_are_not_measured() -> None:
    found, largest = compare_one(picture(grid=(1, 4, 8), rows=32), picture())
    assert [one.what for one in found] == ["grid", "decoded size", "shape of pixels"]
    assert largest is None
    found, largest = compare_pixels([], [picture()], [(96, 64)], patch_size=16, tolerance=TOLERANCE)
    assert kinds_of(found) == [("grid", "number of pictures", "0", "1")]


@pytest.mark.parametrize(
    "change", [{"dtype": "bfloat16"}, {"shape": [3, 8]}, {"data": "?"}, {"grid_thw": [4, 6]}], ids=lambda one: str(one)
)
def test_pixels_that_do_not_fit_their_shape_are_refused(change: dict[str, Any]) -> None:
    honest: dict[str, Any] = {"grid_thw": [1, 4, 6], "shape": [2, 8], "dtype": "float32", "data": encoded(np.ones(16))}
    assert server_pixels(PixelsResponse([], {}, [ProcessedPixels(**honest)]))[0].values.shape == (2, 8)
    with pytest.raises(SchemaMismatch, match="picture 0"):
        server_pixels(PixelsResponse([], {}, [ProcessedPixels(**(honest | change))]))


def encoded(values: np.ndarray[Any, Any]) -> str:
    return base64.b64encode(values.astype("<f4").tobytes()).decode()


@pytest.fixture(scope="module")
def config(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> DoctorConfig:
    return DoctorConfig.model_validate({"output_dir": tmp_path_factory.mktemp("doctor"), "model": {"path": tiny_model}})


@pytest.fixture(scope="module")
def trainer(config: DoctorConfig, info: ModelInfo) -> TrainerSide:
    return TrainerSide(config, info)


@pytest.fixture(scope="module")
def cases(info: ModelInfo) -> dict[str, Case]:
    every = [*picture_cases(picture_pack(info.grid, max_tokens=4000)), *conversation_cases(info.grid)]
    return {case.name: case for case in every}


class HonestServer:
    """Answers like a server that agrees with the trainer; `change` makes it lie."""

    def __init__(self, trainer: TrainerSide) -> None:
        self.trainer = trainer
        self.change: Change = lambda route, answer: answer
        facts = local_facts(trainer.info.path, engine="local", dtype="float32", weight_transfer="safetensors_dir")
        self.facts = msgspec.to_builtins(facts)

    def __call__(self, method: str, route: str, body: Any) -> tuple[int, Any]:
        if route == "/health":
            answer: Any = {"status": "ok"}
        elif route == "/latepix/facts":
            answer = self.facts
        else:
            images = tuple(ingest_image(part["url"]) for part in body.get("content_parts", []))
            prompt = Prompt(token_ids=tuple(body["token_ids"]), images=images)
            answer = self._generate(prompt) if route == "/inference/v1/generate" else self._pixels(prompt)
        answer = self.change(route, answer)
        return answer if isinstance(answer, tuple) else (200, answer)

    def _placed(self, prompt: Prompt) -> dict[str, Any]:
        expanded = self.trainer.placement(prompt)
        placed = [{"offset": one.offset, "length": one.length} for one in expanded.ranges]
        return {"prompt_token_ids": list(expanded.token_ids), "mm_placeholders": {"image": placed} if placed else {}}

    def _generate(self, prompt: Prompt) -> dict[str, Any]:
        logprobs = {"content": [{"token_id": 5, "logprob": -1.0}]}
        choice = {"index": 0, "token_ids": [5], "logprobs": logprobs, "finish_reason": "length"}
        return {"request_id": "r", "choices": [choice], **self._placed(prompt)}

    def _pixels(self, prompt: Prompt) -> dict[str, Any]:
        images = [
            {
                "grid_thw": list(one.grid_thw),
                "shape": list(one.values.shape),
                "dtype": "float32",
                "data": encoded(one.values),
            }
            for one in self.trainer.pixels(prompt.images)
        ]
        return {"images": images, **self._placed(prompt)}


@pytest.fixture
def honest(trainer: TrainerSide) -> HonestServer:
    return HonestServer(trainer)


@pytest.fixture
def server(honest: HonestServer) -> Iterator[ScriptedServer]:
    with scripted_server(honest) as running:
        yield running


def examine(trainer: TrainerSide, url: str, *asked: Case) -> tuple[list[Row], Examiner]:
    async def main() -> tuple[list[Row], Examiner]:
        client = InferenceClient(url, stop_ids=trainer.info.stop_ids, banned_ids=[], timeout_s=20)
        examiner = Examiner(trainer, client, ServerControl(client.connection), routing=ANYWHERE, tolerance=TOLERANCE)
        try:
            return [await examiner.examine(case) for case in asked], examiner
        finally:
            await client.close()

    return asyncio.run(main())


def test_a_case_that_agrees(trainer: TrainerSide, server: ScriptedServer, cases: dict[str, Case]) -> None:
    rows, examiner = examine(trainer, server.url, cases["two_pictures"], cases["text_only"])
    assert [(row.status, row.num_tokens, row.max_pixel_difference) for row in rows] == [
        ("ok", [6, 10], 0.0),
        ("ok", [], None),
    ]
    assert rows[0].sizes == [(96, 64), (64, 160)]
    assert rows[0].grids == [(1, 4, 6), (1, 10, 4)]
    assert examiner.has_pixels


def test_special_tokens_in_texts_stay_texts(trainer: TrainerSide, cases: dict[str, Case]) -> None:
    for name, num_pictures in (("literal_only", 0), ("literal_in_user_text", 1), ("literal_in_tool_text", 1)):
        ids = trainer.prompt(cases[name]).token_ids
        assert sum(token in trainer.info.placeholder_ids for token in ids) == num_pictures, name


def lengthen(route: str, answer: Any) -> Any:
    if answer.get("mm_placeholders"):
        answer["mm_placeholders"]["image"][0]["length"] += 1
        answer["prompt_token_ids"].insert(3, answer["prompt_token_ids"][3])
    return answer


def shift_pixels(route: str, answer: Any) -> Any:
    for image in answer.get("images", ()):
        values = np.frombuffer(base64.b64decode(image["data"]), "<f4") + np.float32(0.01)
        image["data"] = encoded(values)
    return answer


def another_pipeline(route: str, answer: Any) -> Any:
    if route == "/latepix/pixels":
        answer["prompt_token_ids"][0] += 1
    return answer


@pytest.mark.parametrize(
    ("change", "kinds"),
    [(lengthen, {"places", "ids"}), (shift_pixels, {"pixels"}), (another_pipeline, {"ids"})],
)
def test_a_wrong_server_is_caught(
    change: Change,
    kinds: set[str],
    honest: HonestServer,
    trainer: TrainerSide,
    server: ScriptedServer,
    cases: dict[str, Case],
) -> None:
    honest.change = change
    rows, _ = examine(trainer, server.url, cases["png_rgba"])
    assert rows[0].status == "failed"
    assert {one.kind for one in rows[0].mismatches} == kinds


def test_a_server_without_the_route_is_compared_by_its_prompts(
    honest: HonestServer, trainer: TrainerSide, server: ScriptedServer, cases: dict[str, Case]
) -> None:
    honest.change = lambda route, answer: (404, {"detail": "Not Found"}) if route == "/latepix/pixels" else answer
    rows, examiner = examine(trainer, server.url, cases["png_rgba"], cases["flat"])
    assert [(row.status, row.grids, row.max_pixel_difference) for row in rows] == [("ok", [], None)] * 2
    assert not examiner.has_pixels
    assert server.routes.count("POST /latepix/pixels") == 1


@pytest.mark.parametrize("status", [400, 422, 500])
def test_a_request_that_fails_is_a_row(
    status: int, honest: HonestServer, trainer: TrainerSide, server: ScriptedServer, cases: dict[str, Case]
) -> None:
    error = (status, {"error": {"message": "no such picture"}})
    honest.change = lambda route, answer: error if route.startswith("/inference/") else answer
    rows, _ = examine(trainer, server.url, cases["flat"], cases["text_only"])
    assert [row.status for row in rows] == ["failed", "failed"]
    assert f"HTTP {status}: no such picture" in rows[0].note


def test_a_server_that_dies_is_the_end(
    honest: HonestServer, trainer: TrainerSide, server: ScriptedServer, cases: dict[str, Case]
) -> None:
    honest.change = lambda route, answer: (503, {"error": {"message": "the engine is dead"}})
    with pytest.raises(ProcessFailed, match=r"(?s)server is gone.*engine is dead"):
        examine(trainer, server.url, cases["flat"])


def test_refusals_that_must_be_and_one_that_is_missing(
    trainer: TrainerSide, server: ScriptedServer, cases: dict[str, Case]
) -> None:
    wrong = Case("flat", "picture", "", cases["flat"].build, refusal="truncated")
    other = Case("cut", "picture", "", cases["cut_jpeg"].build)
    rows, _ = examine(trainer, server.url, cases["cut_jpeg"], cases["system_picture"], wrong, other)
    assert [row.status for row in rows] == ["refused", "refused", "failed", "failed"]
    assert rows[0].note == "truncated"
    assert "let through" in rows[2].note
    assert "must pass" in rows[3].note
    assert server.requests == []


def test_limits_of_the_config_are_no_failures(
    config: DoctorConfig, info: ModelInfo, server: ScriptedServer, cases: dict[str, Case]
) -> None:
    images = {"max_per_prompt": 1, "max_pixels": 60_000, "max_aspect_ratio": 10.0}
    tight = RunConfig.model_validate(
        config.model_dump(exclude={"doctor"}) | {"images": images, "inference": {"max_model_len": 80}}
    )
    asked = [cases[name] for name in ("two_pictures", "at_max_pixels", "very_wide", "several_turns", "flat")]
    rows, _ = examine(TrainerSide(tight, info), server.url, *asked)
    assert [(row.status, row.note) for row in rows[:4]] == [
        ("refused", "too_many_images"),
        ("refused", "too_many_pixels"),
        ("refused", "aspect_ratio"),
        ("refused", "too_many_images"),
    ]
    assert rows[4].status == "ok"


def test_what_does_not_fit_into_the_context_is_not_sent(
    config: DoctorConfig, info: ModelInfo, server: ScriptedServer, cases: dict[str, Case]
) -> None:
    short = RunConfig.model_validate(config.model_dump(exclude={"doctor"}) | {"inference": {"max_model_len": 500}})
    rows, _ = examine(TrainerSide(short, info), server.url, cases["at_max_pixels"])
    assert rows[0].status == "too long"
    assert "room for 499" in rows[0].note
    assert server.requests == []


def at(config: DoctorConfig, url: str, folder: Path) -> DoctorConfig:
    changed = {"output_dir": folder, "inference": {"url": url}}
    return DoctorConfig.model_validate(config.model_dump() | changed)


def test_a_fatal_setting_fails_the_doctor_and_the_cases_are_examined(
    config: DoctorConfig,
    honest: HonestServer,
    server: ScriptedServer,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    (tmp_path / "metrics.jsonl").write_text("a run's own\n")
    honest.facts["dtype"] = "bfloat16"
    honest.facts["weight_version"] = "step-7"
    assert run_doctor(at(config, server.url, tmp_path)) == 1
    found = json.loads((tmp_path / "doctor" / "doctor.json").read_text())
    assert (found["is_ok"], found["num_failed"], len(found["rows"])) == (False, 1, 49)
    assert [one["setting"] for one in found["differences"] if one["is_fatal"]] == ["dtype"]
    shown = capsys.readouterr().out
    assert "| dtype | bfloat16 | float32 | FAILED." in shown
    assert "46 of 49 cases agree, 3 are rightly refused, 1 of the settings DIFFER; pixels at most 0 apart" in shown
    assert shown.startswith((tmp_path / "doctor" / "doctor.md").read_text())
    assert (tmp_path / "metrics.jsonl").read_text() == "a run's own\n"


def test_facts_that_cannot_be_had_fail_the_doctor(
    config: DoctorConfig, honest: HonestServer, server: ScriptedServer, tmp_path: Path
) -> None:
    honest.change = lambda route, answer: (500, {"error": {"message": "boom"}}) if "facts" in route else answer
    assert run_doctor(at(config, server.url, tmp_path)) == 1
    found = json.loads((tmp_path / "doctor" / "doctor.json").read_text())
    assert "boom" in found["differences"][0]["server"]


def findings(rows: list[Row], *, has_pixels: bool = True, is_fitted: bool = True) -> Findings:
    return Findings(
        server="http://127.0.0.1:1",
        model="m",
        is_fitted=is_fitted,
        has_pixels=has_pixels,
        max_pixel_difference=TOLERANCE,
        differences=[Difference(setting="version of torch", server="1", trainer="2", is_fatal=False)],
        rows=rows,
        wall_s=1.0,
    )


def failed(*mismatches: Mismatch) -> Row:
    return Row(name="flat", kind="picture", about="one colour", mismatches=list(mismatches))


def test_a_failing_row_says_both_values_and_what_to_do() -> None:
    row = failed(Mismatch("places", "placeholder tokens", "24", "12"), Mismatch("pixels", "pixels", "0.1", "0.2"))
    page = findings([row]).to_markdown()
    assert "FAILED: placeholder tokens: server 24, trainer 12; pixels: server 0.1, trainer 0.2" in page
    assert "preprocessor_config.json" in page
    assert "no picture is resized" in page
    assert "images.fit = true" in findings([row], is_fitted=False).to_markdown()
    assert "| version of torch | 1 | 2 | noted |" in page
    assert findings([row]).num_failed == 1


def test_a_missing_route_is_one_sentence_and_a_bar_does_not_break_the_table() -> None:
    row = Row(name="flat", kind="picture", about="one colour", note="got <|image_pad|>\nwanted text")
    page = findings([row], has_pixels=False).to_markdown()
    assert page.count("install latepix-vllm") == 1
    assert "got <\\|image_pad\\|> wanted text" in page
    assert "pixels not measured" in page


def test_on_a_terminal_reasons_stand_below_the_table(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setenv("COLUMNS", "200")
    findings([failed(Mismatch("ids", "token ids", "7", "8"))]).show()
    shown = capsys.readouterr().out
    assert "token ids: server 7, trainer 8" in shown
    assert "| flat" not in shown
