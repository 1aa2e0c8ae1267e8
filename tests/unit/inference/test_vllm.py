from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest

from latepix.config.schema import RunConfig
from latepix.errors import ConfigError
from latepix.inference.vllm import VllmEnvironment, explain_log, find_vllm, vllm_command, vllm_environ


def make_config(*, vllm: dict[str, Any] | None = None, **inference: Any) -> RunConfig:
    return RunConfig.model_validate(
        {
            "output_dir": "unused",
            "seed": 5,
            "model": {"path": "/models/a", "dtype": "bfloat16"},
            "images": {"max_per_prompt": 7},
            "inference": {"engine": "vllm", "port": 8123, "max_batch_size": 32, **inference, "vllm": vllm or {}},
        }
    )


def make_environment(*, version: str = "0.32.0", is_cpu: bool = False) -> VllmEnvironment:
    return VllmEnvironment(python=Path("/env/bin/python"), version=version, is_cpu=is_cpu)


def command(config: RunConfig, **environment: Any) -> list[str]:
    return vllm_command(config, make_environment(**environment), max_model_len=512)


def flag(words: list[str], name: str) -> str:
    """Return the value of a flag; it must be there once."""
    assert words.count(name) == 1
    return words[words.index(name) + 1]


def test_the_command_runs_the_server_of_the_environment_on_the_model() -> None:
    words = command(make_config())
    assert words[:6] == ["/env/bin/python", "-P", "-m", "latepix_vllm.launch", "serve", "/models/a"]
    assert (flag(words, "--host"), flag(words, "--port")) == ("127.0.0.1", "8123")
    assert (flag(words, "--dtype"), flag(words, "--seed")) == ("bfloat16", "5")
    assert (flag(words, "--max-model-len"), flag(words, "--max-num-seqs")) == ("512", "32")
    assert json.loads(flag(words, "--limit-mm-per-prompt")) == {"image": 7, "video": 0}


def test_a_model_folder_is_named_in_full() -> None:
    config = make_config()
    relative = config.model_copy(update={"model": config.model.model_copy(update={"path": Path("models/b")})})
    assert command(relative)[5] == str(Path.cwd() / "models/b")


def test_logprobs_are_those_of_the_distribution_that_is_sampled_from() -> None:
    words = command(make_config())
    assert flag(words, "--logprobs-mode") == "processed_logprobs"
    assert flag(words, "--generation-config") == "vllm"


def test_no_pickle_is_ever_loaded() -> None:
    assert flag(command(make_config()), "--load-format") == "safetensors"


def test_the_users_arguments_come_last() -> None:
    words = command(make_config(vllm={"args": "--dtype float32 --hf-overrides '{\"a\": 1}'"}))
    assert words[-4:] == ["--dtype", "float32", "--hf-overrides", '{"a": 1}']
    assert words.index("--dtype") < len(words) - 4


@pytest.mark.parametrize(
    ("version", "expected"),
    [
        ("0.28.0", False),
        ("0.29.1", False),
        ("0.30.0", True),
        ("0.32.0+cpu", True),
        ("0.100.0", True),
        ("0.30.0rc1", True),
    ],
)
def test_the_token_route_is_asked_for_where_it_has_to_be(version: str, expected: bool) -> None:
    assert ("--enable-scale-out" in command(make_config(), version=version)) is expected


def test_the_cpu_build_runs_eager_in_one_process() -> None:
    words = command(make_config(), is_cpu=True)
    assert "--enforce-eager" in words
    assert flag(words, "--distributed-executor-backend") == "uni"
    others = command(make_config(), is_cpu=False)
    assert not {"--enforce-eager", "--distributed-executor-backend"} & set(others)


def test_ranks_are_processes_on_a_cpu_too() -> None:
    words = command(make_config(vllm={"data_parallel_size": 2}), is_cpu=True)
    assert flag(words, "--data-parallel-size") == "2"
    assert "--distributed-executor-backend" not in words


@pytest.mark.parametrize("weight_update", ["safetensors_dir", "nccl"])
def test_a_backend_for_weights_is_asked_for(weight_update: str) -> None:
    words = command(make_config(weight_update=weight_update))
    assert json.loads(flag(words, "--weight-transfer-config")) == {"backend": weight_update}


def test_reloading_needs_no_backend() -> None:
    assert "--weight-transfer-config" not in command(make_config(weight_update="reload_weights"))


def environ(config: RunConfig, *, base: dict[str, str] | None = None, is_cpu: bool = False) -> dict[str, str]:
    return vllm_environ(config, make_environment(is_cpu=is_cpu), base or {})


def test_the_environment_goes_on_top_of_the_one_that_is_there() -> None:
    got = environ(make_config(num_threads=3), base={"PATH": "/bin", "OMP_NUM_THREADS": "64"})
    assert got["PATH"] == "/bin"
    assert got["PYTHONUNBUFFERED"] == "1"
    assert got["OMP_NUM_THREADS"] == "3"
    assert (got["VLLM_SERVER_DEV_MODE"], got["HF_HUB_OFFLINE"], got["VLLM_NO_USAGE_STATS"]) == ("1", "1", "1")


@pytest.mark.parametrize(
    ("base", "expected"),
    [
        ({}, "latepix"),
        ({"VLLM_PLUGINS": ""}, "latepix"),
        ({"VLLM_PLUGINS": "other"}, "other,latepix"),
        ({"VLLM_PLUGINS": "latepix,other"}, "latepix,other"),
    ],
)
def test_our_plugin_joins_those_that_are_named_already(base: dict[str, str], expected: str) -> None:
    assert environ(make_config(), base=base)["VLLM_PLUGINS"] == expected


@pytest.mark.parametrize(("own", "expected"), [("cuda,mine", "cuda,mine,latepix"), ("", "latepix")])
def test_our_plugin_joins_those_that_the_user_names_instead(own: str, expected: str) -> None:
    config = make_config(vllm={"env": {"VLLM_PLUGINS": own}})
    assert environ(config, base={"VLLM_PLUGINS": "other"})["VLLM_PLUGINS"] == expected


def test_the_users_own_variables_win() -> None:
    own = {"VLLM_CPU_KVCACHE_SPACE": "8", "OMP_NUM_THREADS": "7", "MINE": "yes"}
    got = environ(make_config(vllm={"env": own}), base={"MINE": "no"}, is_cpu=True)
    assert own.items() <= got.items()


def test_the_cpu_build_gets_variables_of_its_own() -> None:
    names = {"VLLM_CPU_KVCACHE_SPACE", "TORCHDYNAMO_DISABLE", "VLLM_ENABLE_V1_MULTIPROCESSING"}
    assert names <= environ(make_config(), is_cpu=True).keys()
    assert not names & environ(make_config(), is_cpu=False).keys()


def fake_python(folder: Path, *, says: object = None, script: str = "") -> Path:
    """Write an interpreter that prints JSON, or runs a line of shell."""
    path = folder / "python"
    path.write_text("#!/bin/sh\n" + (script or f"echo '{json.dumps(says)}'") + "\n", encoding="utf-8")
    path.chmod(0o755)
    return path


def found(*, version: str | None = "0.32.0", is_cpu: bool = False, plugin: str | None = "0.1.0") -> dict[str, object]:
    """Return what the probe prints."""
    return {"version": version, "is_cpu": is_cpu, "plugin": plugin}


def refusal(python: Path) -> str:
    """Return why an interpreter is refused; it must."""
    with pytest.raises(ConfigError) as caught:
        find_vllm(python)
    message = str(caught.value)
    assert message.startswith(f"inference.vllm.python: {python} ") or f" of {python}" in message
    return message


def test_an_environment_with_vllm_and_the_plugin_is_found(tmp_path: Path) -> None:
    python = fake_python(tmp_path, says=found(version="0.32.0+cpu", is_cpu=True))
    environment = find_vllm(python)
    assert environment == VllmEnvironment(python=python, version="0.32.0+cpu", is_cpu=True)
    assert environment.release == (0, 32, 0)


def test_the_oldest_version_is_taken(tmp_path: Path) -> None:
    assert find_vllm(fake_python(tmp_path, says=found(version="0.28.0"))).release == (0, 28, 0)


@pytest.mark.parametrize("version", ["0.27.9", "0.9.2", "0.11.0+cu128"])
def test_a_version_that_is_too_old_is_named(tmp_path: Path, version: str) -> None:
    message = refusal(fake_python(tmp_path, says=found(version=version)))
    assert f"has vLLM {version}, wanted 0.28 or newer. Make one with `make vllm-env`" in message


def test_an_environment_without_vllm_is_named(tmp_path: Path) -> None:
    message = refusal(fake_python(tmp_path, says=found(version=None)))
    assert "there is no vLLM in the environment of" in message
    assert "make vllm-env" in message


def test_this_environment_is_asked_where_none_is_named() -> None:
    # The unit tests' environment has no vLLM; the probe itself runs.
    with pytest.raises(ConfigError, match=rf"there is no vLLM in the environment of {sys.executable}\. Make one"):
        find_vllm(None)


def test_an_environment_without_the_plugin_is_told_how_to_get_it(tmp_path: Path) -> None:
    python = fake_python(tmp_path, says=found(plugin=None))
    message = refusal(python)
    assert "latepix-vllm is not installed beside vLLM" in message
    assert f"{python} -m pip install --no-deps latepix-vllm" in message


def test_an_interpreter_that_does_not_exist_is_named(tmp_path: Path) -> None:
    message = refusal(tmp_path / "no-python")
    assert "is not a Python that runs: [Errno 2] No such file or directory" in message
    assert "set inference.vllm.python to its bin/python" in message


def test_an_interpreter_that_fails_is_told_with_its_own_words(tmp_path: Path) -> None:
    message = refusal(fake_python(tmp_path, script="echo libpython is missing >&2; exit 3"))
    assert "is not a Python that runs: libpython is missing. Make one" in message


def test_a_folder_is_no_interpreter(tmp_path: Path) -> None:
    assert "is not a Python that runs: [Errno 13] Permission denied" in refusal(tmp_path)


@pytest.mark.parametrize("script", ["echo hello", "true", "echo null", "echo '{}'", "echo [1]", r"printf '\377\376'"])
def test_an_interpreter_that_prints_something_else_is_named(tmp_path: Path, script: str) -> None:
    assert "is not a Python that runs: " in refusal(fake_python(tmp_path, script=script))


BIND = "OSError: [Errno 98] error while attempting to bind on address ('127.0.0.1', 8000): address already in use"
CACHE = (
    "ValueError: No available memory for the cache blocks. Try increasing `gpu_memory_utilization` when initializing "
    "the engine."
)
LONG = (
    "ValueError: To serve at least one request with the models's max seq len (131072), 16.0 GiB KV cache is needed, "
    "which is larger than the available KV cache memory (1.0 GiB)."
)
FREE = (
    "ValueError: Free memory on device (3.1/79.2 GiB) on startup is less than desired GPU memory utilization (0.9, "
    "71.3 GiB). Decrease GPU memory utilization."
)
CUDA = "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has a total capacity of 79.10 GiB"
ARGUMENT = "vllm: error: unrecognized arguments: --no-such-flag"
VALUE = "vllm serve: error: argument --dtype: invalid choice: 'float64'"
BACKEND = "ValueError: Invalid weight transfer backend: safetensors_dir. Available: ['nccl', 'ipc']"
MODULE = "ModuleNotFoundError: No module named 'torchvision'"


@pytest.mark.parametrize(
    ("line", "advice"),
    [
        (BIND, "set inference.port = 0 for a free one"),
        (CACHE, "lower inference.max_model_len or inference.max_batch_size"),
        (LONG, "lower inference.max_model_len or inference.max_batch_size"),
        (FREE, "inference.vllm.args = '--gpu-memory-utilization 0.6'"),
        (CUDA, "or use a smaller model"),
        ("RuntimeError: [enforce fail] Cannot allocate memory", "inference.vllm.env.VLLM_CPU_KVCACHE_SPACE"),
        (ARGUMENT, "look at inference.vllm.args"),
        (VALUE, "look at inference.vllm.args"),
        (BACKEND, "install it beside vLLM (make vllm-env)"),
        (MODULE, "vLLM's environment is not complete"),
        ("ImportError: libcudart.so.13: cannot open shared object file", "vLLM's environment is not complete"),
    ],
)
def test_a_log_is_explained_with_its_cause_the_remedy_and_its_end(line: str, advice: str) -> None:
    log = (
        "(APIServer pid=1) INFO 12-01 10:00:00 [api_server.py:1] vLLM API server version 0.32.0\n"
        "Traceback (most recent call last):\n"
        f"{line}\n\n"
        "RuntimeError: Engine core initialization failed. See root cause above.\n"
    )
    explained = explain_log(log)
    cause = line if "Error: " in line else "RuntimeError: Engine core initialization failed. See root cause above."
    assert explained.startswith(f"{cause}\n")
    assert advice in explained
    assert explained.endswith(
        "The last lines of its log:\n"
        "  | (APIServer pid=1) INFO 12-01 10:00:00 [api_server.py:1] vLLM API server version 0.32.0\n"
        "  | Traceback (most recent call last):\n"
        f"  | {line}\n"
        "  | RuntimeError: Engine core initialization failed. See root cause above."
    )


@pytest.mark.parametrize("prefix", ["", "(EngineCore pid=7) ", "(EngineCore pid=7) ERROR 12-01 10:00:00 [core.py:99] "])
def test_the_cause_is_the_first_error_whichever_process_wrote_it(prefix: str) -> None:
    log = f"{prefix}EngineCore failed to start.\n{prefix}{BACKEND}\n{MODULE}\n"
    assert explain_log(log).splitlines()[:2] == [
        BACKEND,
        "latepix-vllm is not loaded: install it beside vLLM (make vllm-env).",
    ]


def test_a_word_of_an_error_in_a_message_is_no_cause() -> None:
    log = "WARNING 12-01 [utils.py:3] Retrying after ConnectionError: no route\nValueError: the cause\n"
    assert explain_log(log).splitlines()[0] == "ValueError: the cause"


def test_an_optional_package_that_is_missing_is_no_remedy() -> None:
    log = f"WARNING 12-01 [utils.py:3] not used: {MODULE}\nValueError: something else\n"
    assert "is not complete" not in explain_log(log)


def test_a_log_that_nobody_knows_is_shown_at_its_end() -> None:
    explained = explain_log("".join(f"line {number}\n" for number in range(40)))
    assert explained == "The last lines of its log:\n" + "\n".join(f"  | line {number}" for number in range(28, 40))


@pytest.mark.parametrize("log", ["", "\n  \n"])
def test_a_log_without_a_word_is_told_as_such(log: str) -> None:
    assert explain_log(log) == "it wrote nothing"


def test_long_lines_are_cut() -> None:
    explained = explain_log(f"ValueError: {'x' * 5000}\n{'y' * 5000}\n")
    cause, *_, error_line, last = explained.splitlines()
    assert cause == f"ValueError: {'x' * 488}"
    assert (error_line, last) == (f"  | {'x' * 200}", f"  | {'y' * 200}")
