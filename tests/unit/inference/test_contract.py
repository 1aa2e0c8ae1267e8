from __future__ import annotations

import msgspec
import pytest

from latepix.inference.contract import (
    GenerateRequest,
    GenerateResponse,
    SamplingParams,
    TokenLogprob,
    policy_version_of,
    version_label,
)


@pytest.mark.parametrize(
    ("spelling", "token"),
    [
        ('{"logprob": -0.5, "token_id": 17}', 17),
        ('{"logprob": -0.5, "token": "token_id:17", "bytes": null, "top_logprobs": []}', 17),
        ('{"logprob": -0.5, "token_id": 0, "token": "token_id:17"}', 0),
        ('{"logprob": -0.5, "token": "seven"}', None),
        ('{"logprob": -0.5, "token": "token_id:"}', None),
        ('{"logprob": -0.5}', None),
    ],
)
def test_both_spellings_of_a_tokens_logprob_are_read(spelling: str, token: int | None) -> None:
    entry = msgspec.json.decode(spelling, type=TokenLogprob)
    assert (entry.id, entry.logprob) == (token, -0.5)


def test_the_answer_may_hold_more_than_we_read() -> None:
    answer = b"""{
        "request_id": "r", "choices": [{"index": 0, "token_ids": [1], "routed_experts": [[1, 2]]}],
        "prompt_token_ids": [5, 9], "mm_placeholders": {"image": [{"offset": 1, "length": 1, "is_embed": null}]},
        "prompt_logprobs": null
    }"""
    response = msgspec.json.decode(answer, type=GenerateResponse)
    assert response.mm_placeholders is not None
    assert (response.mm_placeholders["image"][0].offset, response.choices[0].finish_reason) == (1, "stop")


def test_a_request_survives_json_and_leaves_defaults_out() -> None:
    request = GenerateRequest(token_ids=[1, 2], sampling_params=SamplingParams(temperature=0.5, n=3, seed=7))
    data = msgspec.json.encode(request)
    assert msgspec.json.decode(data) == {
        "token_ids": [1, 2],
        "sampling_params": {"temperature": 0.5, "n": 3, "seed": 7},
    }
    assert msgspec.json.decode(data, type=GenerateRequest) == request


@pytest.mark.parametrize("version", [0, 3, 120])
def test_a_version_is_read_from_its_label(version: int) -> None:
    assert policy_version_of(version_label(version)) == version


@pytest.mark.parametrize("label", ["default", "step-", "step-x", "3", "step--1"])
def test_labels_of_others_are_no_version(label: str) -> None:
    assert policy_version_of(label) is None
