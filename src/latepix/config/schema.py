"""The settings of a run, declared where they are checked.

Every field has a reader; a field's range is in its type, its unit in its name or docstring. Unknown keys are errors.
`RunConfig` serves `rl`, `eval`, `serve`, `orchestrate` and `train`; `BudgetConfig`, `ParityConfig` and `DoctorConfig`
add to it what their commands need; `SftConfig` serves `sft`.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, Literal, TypeAlias

from pydantic import Field, model_validator

from latepix.config.losses import LossConfig
from latepix.config.section import Section

#: vLLM answers HTTP 400 above, and samples at the lower bound below.
_VLLM_TEMPERATURES = 0.01, 2.0
Positive = Annotated[int, Field(gt=0)]
Fraction = Annotated[float, Field(ge=0, le=1)]
Decay = Annotated[float, Field(ge=0, lt=1)]
AdvantageType: TypeAlias = Literal["grpo", "dr_grpo", "rloo", "max"]
WeightUpdate: TypeAlias = Literal["safetensors_dir", "reload_weights", "nccl"]
HostPattern = Annotated[str, Field(pattern=r"^(\*\.)?[A-Za-z0-9]([A-Za-z0-9._-]*[A-Za-z0-9])?$|^\[?[0-9A-Fa-f:.]+\]?$")]


class ModelConfig(Section):
    """The policy."""

    path: Path
    """Hugging Face model folder with tokenizer and image processor."""
    dtype: Literal["float32", "bfloat16"] = "float32"
    """Of the trainer and of the local engine."""


class EnvironmentConfig(Section):
    """What the policy acts in."""

    type: str = "digits"
    """`digits`, `digit-sum`, `codeword`, or `module:Class` for an environment of your own."""
    picture_px: Annotated[int, Field(ge=8, le=4096)] = 32
    """Side of the square pictures of the built-in environments, pixels."""
    blank_pictures: bool = False
    """Replace every picture by a grey one: a policy that still scores was not looking."""
    demonstration_noise: Fraction = 0.0
    """Share of demonstrations (SFT) whose answer is drawn at random, so that the warm start keeps exploring."""
    num_demonstrations: Annotated[int, Field(ge=0)] = 0
    """Training tasks that SFT may use, each with its answer; 0 means all."""


class ImagesConfig(Section):
    """The door every picture comes through."""

    fit: bool = True
    """Resize once, at ingress, to a size that the family's processor leaves alone."""
    max_bytes: Positive = 20_000_000
    """Of an encoded picture."""
    max_pixels: Annotated[int, Field(gt=0, le=178_956_970)] = 50_000_000
    """Width x height of a source picture; Pillow itself refuses more than the upper bound."""
    max_aspect_ratio: Annotated[float, Field(ge=1)] = 200.0
    """Longer side over shorter side."""
    max_per_prompt: Positive = 64
    """Pictures in one conversation."""
    allow_folders: tuple[Path, ...] = ()
    """Files below these folders may be pictures, after symbolic links are resolved; empty: no files."""
    allow_hosts: tuple[HostPattern, ...] = ()
    """Hosts (or `*.name`) that http(s) URLs of pictures may point to, without scheme or port; empty: none."""
    allow_private_addresses: bool = False
    """Also fetch from private and loopback addresses, for hosts that are listed literally."""
    fetch_timeout_s: Annotated[float, Field(gt=0)] = 10.0
    """For one picture from a URL, redirects included."""

    @model_validator(mode="after")
    def _check_access(self) -> ImagesConfig:
        for name in ("allow_private_addresses", "fetch_timeout_s"):
            if not self.allow_hosts and getattr(self, name) != type(self).model_fields[name].default:
                raise ValueError(f"{name} has no effect while images.allow_hosts is empty")
        return self


class SamplingConfig(Section):
    """How the policy's tokens are drawn during training."""

    temperature: Annotated[float, Field(ge=1e-3, le=10)] = 1.0
    """Logits are divided by it, in the server and in the trainer."""
    max_tokens: Positive = 16
    """New tokens per turn."""


class VllmConfig(Section):
    """How vLLM is started."""

    python: Path | None = None
    """Python of the environment that vLLM and latepix-vllm are installed in; None is this one."""
    args: str = ""
    """Further arguments of `vllm serve`, written as in a shell; they come after ours and win."""
    env: dict[str, str] = Field(default={})
    """Further environment variables; they win over ours."""
    data_parallel_size: Positive = 1
    """Ranks that share the requests; siblings of a group, and their turns, stay on one."""


class InferenceConfig(Section):
    """The server that samples."""

    engine: Literal["local", "vllm"] = "local"
    """The local engine needs nothing further; vLLM is an installation of its own (docs/vllm.md)."""
    url: Annotated[str, Field(pattern=r"^https?://[^/\s]+$")] | None = None
    """A server that runs already, such as `http://127.0.0.1:8000`; None starts one."""
    host: Annotated[str, Field(min_length=1)] = "127.0.0.1"
    """Address to bind and to connect to."""
    port: Annotated[int, Field(ge=0, le=65535)] = 0
    """0 takes a free port."""
    startup_timeout_s: Annotated[float, Field(gt=0)] = 300.0
    """How long the server may take to answer /health."""
    request_timeout_s: Annotated[float, Field(gt=0)] = 300.0
    """How long one request may take."""
    max_model_len: Positive = 4096
    """Prompt and answer together, in tokens."""
    max_batch_size: Positive = 256
    """Sequences that are decoded together."""
    num_threads: Positive = 1
    """OpenMP threads of the server."""
    batch_window_ms: Annotated[float, Field(ge=0, le=1000)] = 3.0
    """How long the local engine waits for company after a first request."""
    weight_update: WeightUpdate = "safetensors_dir"
    """How new weights reach the server: a folder (needs latepix-vllm beside vLLM), a folder by vLLM's own RPC, or a
    broadcast between GPUs (not run so far)."""
    priority: Annotated[int, Field(ge=-(2**63), lt=2**63)] = 0
    """Of our requests, lower is earlier; vLLM takes others than 0 only with `--scheduling-policy priority`."""
    kv_transfer_params: dict[str, Any] | None = None
    """Goes with every request to vLLM: disaggregated serving."""
    vllm: VllmConfig = VllmConfig()

    @model_validator(mode="after")
    def _check_engine(self) -> InferenceConfig:
        fields = type(self).model_fields
        if self.url is not None:
            for name in ("host", "port"):
                if getattr(self, name) != fields[name].default:
                    raise ValueError(f"{name} has no effect with inference.url, which names the address")
            for name in ("num_threads", "batch_window_ms"):
                if getattr(self, name) != fields[name].default:
                    raise ValueError(f"{name} has no effect with inference.url: that server runs already")
            for name in ("python", "args", "env"):
                if getattr(self.vllm, name) != VllmConfig.model_fields[name].default:
                    raise ValueError(f"vllm.{name} has no effect with inference.url: that server runs already")
        if self.engine == "local":
            for name in ("weight_update", "priority", "kv_transfer_params", "vllm"):
                if getattr(self, name) != fields[name].default:
                    raise ValueError(f"{name} has no effect with inference.engine = 'local'; set engine = 'vllm'")
        elif self.batch_window_ms != fields["batch_window_ms"].default:
            raise ValueError("batch_window_ms has no effect with inference.engine = 'vllm', which batches by itself")
        return self

    @property
    def base_url(self) -> str:
        """Address of the server; `port` must be known by now."""
        return self.url or f"http://{self.host}:{self.port}"


class OrchestratorConfig(Section):
    """How rollouts are played and turned into batches."""

    prompts_per_step: Positive = 32
    """Groups in one optimizer step."""
    group_size: Annotated[int, Field(ge=2)] = 8
    """Rollouts of one prompt."""
    max_off_policy_steps: Annotated[int, Field(ge=0, le=64)] = 0
    """How many steps old the sampling weights may be; 0 is strictly on-policy, 1 overlaps sampling and training."""
    rollout_timeout_s: Annotated[float, Field(gt=0)] = 600.0
    """How long one rollout may take; a longer one fails."""
    max_in_flight: Positive = 512
    """Rollouts played at the same time."""
    advantage: AdvantageType = "grpo"
    """How a reward compares with its group: less the mean, over the standard deviation (grpo) or as it is (dr_grpo);
    less the mean of the others (rloo); less the mean, over the largest distance from it (max)."""
    drop_zero_spread_groups: bool = False
    """Leave out groups whose rewards are all equal: they carry no policy gradient."""
    max_failed_frac: Fraction = 0.2
    """A step in which a larger share of rollouts fails stops the run."""
    seq_len: Positive = 4096
    """Longest sample in tokens; longer ones are cut before the first token or picture that does not fit."""
    micro_batch_tokens: Positive = 16384
    """Tokens in one forward-backward."""
    micro_batch_image_tokens: Positive | None = None
    """Tokens of distinct pictures in one forward-backward: the vision tower's work. Off by default."""


class OptimConfig(Section):
    """AdamW with linear warm-up and linear decay."""

    lr: Annotated[float, Field(gt=0)] = 1e-5
    """Peak learning rate."""
    betas: tuple[Decay, Decay] = (0.9, 0.99)
    """Decay of the first and the second moment."""
    weight_decay: Annotated[float, Field(ge=0)] = 0.0
    """Decoupled, per step and unit of learning rate."""
    max_grad_norm: Annotated[float, Field(gt=0)] = 1.0
    """Gradients are scaled down to this norm."""
    warmup_steps: Annotated[int, Field(ge=0)] = 0
    """Steps over which the learning rate rises from 0 to its peak."""
    final_lr_frac: Fraction = 1.0
    """Learning rate of the last step over its peak; 1 keeps it constant."""


class TrainStepConfig(Section):
    """One optimizer step, in `rl` and in `sft`."""

    optim: OptimConfig = OptimConfig()
    layout: Literal["auto", "packed", "padded"] = "auto"
    """Samples as one row, as padded rows, or whichever is cheaper and allowed by the family's policy."""
    attention: Literal["sdpa", "flash_attention_2", "flash_attention_3", "flex_attention"] = "sdpa"
    """Attention kernel; all but sdpa need a GPU and, flash attention, its package."""
    activation_checkpointing: bool = False
    """Keep only each layer's input and compute the layer again in the backward: less memory, about a third slower."""
    autocast: bool = False
    """Multiply matrices in bfloat16 while the weights stay in float32; with model.dtype = "float32" only."""
    logits_bytes: Positive = 256_000_000
    """Logits and what is computed from them take about this much at a time, however many tokens there are."""
    image_cache_bytes: Annotated[int, Field(ge=0)] = 256_000_000
    """Processed pictures kept between micro batches and steps."""
    image_workers: Positive = 2
    """Threads that decode and process pictures, one micro batch ahead."""
    num_threads: Positive = 1
    """OpenMP threads of the trainer."""


class TrainerConfig(TrainStepConfig):
    """The trainer process of `rl`."""

    loss: LossConfig = LossConfig()
    max_mismatch_kl: Annotated[float, Field(gt=0)] | None = 0.1
    """An on-policy step whose mean mismatch KL is not below it stops the run, in nats: what was sampled is not what is
    trained. None: never."""
    wait_timeout_s: Annotated[float, Field(gt=0)] = 1800.0
    """How long a process waits for another one's batch or weights."""


class EvalConfig(Section):
    """Greedy reward on tasks that are never trained."""

    every_steps: Annotated[int, Field(ge=0)] = 20
    """0: only before the first and after the last step."""
    split: Literal["validation", "test"] = "validation"
    """Measured along the way; tuning may look at it."""
    final_split: Literal["validation", "test"] = "test"
    """Measured only before the first and after the last step."""
    num_tasks: Annotated[int, Field(ge=0)] = 0
    """0: all tasks of the split."""


class _Command(Section):
    output_dir: Path
    """Run folder; made if it does not exist."""
    model: ModelConfig
    seed: Annotated[int, Field(ge=0, lt=2**31)] = 0
    """Of task order, sampling and the noise of demonstrations."""
    environment: EnvironmentConfig = EnvironmentConfig()
    images: ImagesConfig = ImagesConfig()
    dry_run: bool = False
    """Check the config and stop."""


class RunConfig(_Command):
    """The whole loop: `latepix rl`, and each of its parts."""

    steps: Positive = 100
    """Optimizer steps."""
    sampling: SamplingConfig = SamplingConfig()
    inference: InferenceConfig = InferenceConfig()
    orchestrator: OrchestratorConfig = OrchestratorConfig()
    trainer: TrainerConfig = TrainerConfig()
    eval: EvalConfig = EvalConfig()

    @model_validator(mode="after")
    def _check_lengths(self) -> RunConfig:
        if self.orchestrator.micro_batch_tokens < self.orchestrator.seq_len:
            raise ValueError(
                f"orchestrator.micro_batch_tokens ({self.orchestrator.micro_batch_tokens}) must be at least "
                f"orchestrator.seq_len ({self.orchestrator.seq_len}), or the longest samples fit nowhere"
            )
        if self.sampling.max_tokens >= self.inference.max_model_len:
            raise ValueError(
                f"sampling.max_tokens ({self.sampling.max_tokens}) must be below inference.max_model_len "
                f"({self.inference.max_model_len})"
            )
        if self.orchestrator.group_size > self.inference.max_batch_size:
            raise ValueError(
                f"orchestrator.group_size ({self.orchestrator.group_size}) must not exceed inference.max_batch_size "
                f"({self.inference.max_batch_size}): a group is one request"
            )
        low, high = _VLLM_TEMPERATURES
        if self.inference.engine == "vllm" and not low <= self.sampling.temperature <= high:
            raise ValueError(
                f"sampling.temperature ({self.sampling.temperature:g}) must lie in [{low:g}, {high:g}] with "
                "inference.engine = 'vllm': it raises lower ones in silence, and refuses higher ones"
            )
        if self.inference.weight_update == "nccl" and self.orchestrator.max_off_policy_steps:
            raise ValueError(
                "orchestrator.max_off_policy_steps must be 0 with inference.weight_update = 'nccl': the trainer hands "
                "weights over when it has them, not when the orchestrator asks"
            )
        _check_warmup(self.trainer.optim, self.steps)
        _check_autocast(self.trainer, self.model)
        return self


class BudgetConfig(RunConfig):
    """What pictures and turns cost: `latepix budget`. Takes every setting of `rl`, and how many tasks to look at."""

    num_tasks: Positive = 64
    """Training tasks, drawn at random, that are played without a server."""


class ParityOptions(Section):
    """What `latepix parity` measures, and what it lets pass."""

    steps: Positive = 20
    """Optimizer steps, each measured before it is taken."""
    batch: Positive = 64
    """Rollouts of one step; a multiple of orchestrator.group_size."""
    max_kl: Annotated[float, Field(gt=0)] = 0.015
    """A step whose mean mismatch KL is not below it fails, in nats."""


class ParityConfig(RunConfig):
    """Do server and trainer agree? `latepix parity`. Takes every setting of `rl`."""

    environment: EnvironmentConfig = EnvironmentConfig(type="digit-sum")
    parity: ParityOptions = ParityOptions()

    @model_validator(mode="after")
    def _check_batch(self) -> ParityConfig:
        if self.parity.batch % self.orchestrator.group_size:
            raise ValueError(
                f"parity.batch ({self.parity.batch}) must be a multiple of orchestrator.group_size "
                f"({self.orchestrator.group_size})"
            )
        return self


class DoctorOptions(Section):
    """What `latepix doctor` lets pass."""

    max_pixel_difference: Annotated[float, Field(ge=0)] = 1e-5
    """Between normalized pixels of server and trainer."""


class DoctorConfig(RunConfig):
    """Do server and trainer see the same pictures? `latepix doctor`. Takes every setting of `rl`."""

    doctor: DoctorOptions = DoctorOptions()


class SftConfig(_Command):
    """Supervised warm start: `latepix sft`. Writes a Hugging Face folder to `output_dir`/model."""

    steps: Positive = 30
    """Optimizer steps."""
    batch_size: Positive = 32
    """Samples in one step."""
    trainer: TrainStepConfig = TrainStepConfig()
    micro_batch_tokens: Positive = 16384
    """Tokens in one forward-backward."""

    @model_validator(mode="after")
    def _check_lengths(self) -> SftConfig:
        _check_warmup(self.trainer.optim, self.steps)
        _check_autocast(self.trainer, self.model)
        return self


def _check_warmup(optim: OptimConfig, steps: int) -> None:
    if optim.warmup_steps > steps:
        raise ValueError(f"trainer.optim.warmup_steps ({optim.warmup_steps}) must not exceed steps ({steps})")


def _check_autocast(trainer: TrainStepConfig, model: ModelConfig) -> None:
    if trainer.autocast and model.dtype != "float32":
        raise ValueError(
            f"trainer.autocast has no effect with model.dtype = '{model.dtype}': everything is in bfloat16 already"
        )
