"""Rules of how the server is reached and started: what has no effect is refused by name."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from pydantic import ValidationError

from latepix.config.loader import load_config
from latepix.config.schema import InferenceConfig, ParityConfig, RunConfig
from latepix.errors import ConfigError

URL = "http://127.0.0.1:8000"


def make_config(
    *, cls: type[RunConfig] = RunConfig, inference: dict[str, Any] | None = None, **sections: Any
) -> RunConfig:
    settings = {"output_dir": "unused", "model": {"path": "m"}, "inference": inference or {}, **sections}
    return cls.model_validate(settings)


def refusal(inference: dict[str, Any]) -> str:
    """Return why these settings are refused; they must be."""
    with pytest.raises(ValidationError) as caught:
        InferenceConfig.model_validate(inference)
    (problem,) = caught.value.errors()
    return problem["msg"]


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("weight_update", "reload_weights"),
        ("weight_update", "nccl"),
        ("priority", 1),
        ("kv_transfer_params", {}),
        ("vllm", {"python": "/env/bin/python"}),
        ("vllm", {"data_parallel_size": 2}),
    ],
)
def test_settings_of_vllm_have_no_effect_on_the_local_engine(name: str, value: object) -> None:
    assert f"{name} has no effect with inference.engine = 'local'; set engine = 'vllm'" in refusal({name: value})
    assert InferenceConfig.model_validate({"engine": "vllm", name: value}).engine == "vllm"


def test_settings_of_the_local_engine_have_no_effect_on_vllm() -> None:
    message = refusal({"engine": "vllm", "batch_window_ms": 5.0})
    assert "batch_window_ms has no effect with inference.engine = 'vllm'" in message
    assert InferenceConfig(engine="local", batch_window_ms=5.0).batch_window_ms == 5.0


@pytest.mark.parametrize(("name", "value"), [("host", "0.0.0.0"), ("port", 8000)])
def test_an_address_has_no_effect_beside_a_url(name: str, value: object) -> None:
    assert f"{name} has no effect with inference.url, which names the address" in refusal({"url": URL, name: value})


@pytest.mark.parametrize(
    ("name", "inference"),
    [
        ("num_threads", {"num_threads": 2}),
        ("batch_window_ms", {"batch_window_ms": 5.0}),
        ("vllm.python", {"engine": "vllm", "vllm": {"python": "/env/bin/python"}}),
        ("vllm.args", {"engine": "vllm", "vllm": {"args": "--x"}}),
        ("vllm.env", {"engine": "vllm", "vllm": {"env": {"A": "1"}}}),
    ],
)
def test_how_a_server_is_started_has_no_effect_on_one_that_runs(name: str, inference: dict[str, Any]) -> None:
    assert f"{name} has no effect with inference.url: that server runs already" in refusal({"url": URL, **inference})


def test_how_requests_are_sent_has_an_effect_on_a_server_that_runs() -> None:
    config = InferenceConfig.model_validate(
        {
            "engine": "vllm",
            "url": URL,
            "priority": -3,
            "kv_transfer_params": {"do_remote_decode": True},
            "weight_update": "reload_weights",
            "vllm": {"data_parallel_size": 2},
        }
    )
    assert (config.url, config.priority, config.vllm.data_parallel_size) == (URL, -3, 2)


def test_what_is_written_as_it_is_anyway_is_no_mistake() -> None:
    config = InferenceConfig.model_validate({"url": URL, "host": "127.0.0.1", "port": 0, "num_threads": 1})
    assert config.url == URL


@pytest.mark.parametrize("url", ["http://127.0.0.1:8000", "https://gpu-7.cluster:443", "http://[::1]:8000"])
def test_an_address_of_a_server_is_taken(url: str) -> None:
    assert InferenceConfig(url=url).base_url == url


@pytest.mark.parametrize(
    "url", ["127.0.0.1:8000", "ftp://h:1", "http://", "http://h:8000/", "http://h:8000/v1", "http://h :8000", ""]
)
def test_something_else_is_no_address(url: str) -> None:
    assert refusal({"url": url}).startswith("String should match pattern")


def test_without_a_url_the_address_is_host_and_port() -> None:
    assert InferenceConfig(host="10.0.0.7", port=8123).base_url == "http://10.0.0.7:8123"


def test_a_mistake_is_told_with_its_section() -> None:
    args = ["--output-dir", "o", "--model.path", "m", "--inference.url", URL, "--inference.port", "8000"]
    with pytest.raises(ConfigError, match=r"inference.*port has no effect with inference\.url"):
        load_config(RunConfig, args)


def test_vllm_bounds_the_temperature() -> None:
    assert make_config(inference={"engine": "vllm"}, sampling={"temperature": 2.0}).sampling.temperature == 2.0
    for temperature in (2.01, 0.009):
        wanted = rf"sampling\.temperature \({temperature:g}\) must lie in \[0\.01, 2\] with"
        with pytest.raises(ValidationError, match=wanted):
            make_config(inference={"engine": "vllm"}, sampling={"temperature": temperature})


def test_a_broadcast_is_strictly_on_policy() -> None:
    broadcast = {"engine": "vllm", "weight_update": "nccl"}
    assert make_config(inference=broadcast).inference.weight_update == "nccl"
    with pytest.raises(ValidationError, match=r"max_off_policy_steps must be 0 with inference\.weight_update = 'nccl'"):
        make_config(inference=broadcast, orchestrator={"max_off_policy_steps": 1})


def test_the_local_engine_does_not_bound_the_temperature_at_vllms() -> None:
    assert make_config(sampling={"temperature": 5.0}).sampling.temperature == 5.0


def test_a_group_has_to_fit_into_a_batch_of_the_server() -> None:
    assert make_config(inference={"max_batch_size": 8}).orchestrator.group_size == 8
    with pytest.raises(ValidationError, match=r"group_size \(8\) must not exceed inference\.max_batch_size \(7\)"):
        make_config(inference={"max_batch_size": 7})


def test_an_answer_has_to_be_shorter_than_the_longest_sequence() -> None:
    assert make_config(inference={"max_model_len": 17}, sampling={"max_tokens": 16}).sampling.max_tokens == 16
    with pytest.raises(ValidationError, match=r"max_tokens \(16\) must be below inference\.max_model_len \(16\)"):
        make_config(inference={"max_model_len": 16}, sampling={"max_tokens": 16})


@pytest.mark.parametrize(("batch", "is_fine"), [(64, True), (8, True), (60, False), (4, False)])
def test_a_parity_batch_is_whole_groups(batch: int, is_fine: bool) -> None:
    if is_fine:
        assert make_config(cls=ParityConfig, parity={"batch": batch}).orchestrator.group_size == 8
        return
    with pytest.raises(ValidationError, match=rf"parity\.batch \({batch}\) must be a multiple of .*group_size \(8\)"):
        make_config(cls=ParityConfig, parity={"batch": batch})


def test_a_path_of_a_python_is_kept_as_it_was_written() -> None:
    config = InferenceConfig.model_validate({"engine": "vllm", "vllm": {"python": "env/bin/python"}})
    assert config.vllm.python == Path("env/bin/python")
