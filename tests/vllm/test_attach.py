"""Runs that are attached to a vLLM that somebody else started."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from safetensors.torch import load_file, save_file

from latepix.errors import StaleWeights
from latepix.inference.canary import judge, prompts_of, read_canary
from latepix.inference.client import InferenceClient
from latepix.inference.control import ServerControl
from latepix.inference.render import MessageRenderer
from latepix.trainer.canary import Canary
from latepix.trainer.loss import cross_entropy
from latepix.trainer.step import TrainStep
from tests.integration.cli import finish, latepix, start
from tests.tiny.running import RunningServer

pytestmark = [pytest.mark.vllm, pytest.mark.slow]


def rl_command(server: RunningServer, out: Path, *settings: object) -> tuple[object, ...]:
    return (
        *("rl", "--model.path", server.model, "--output_dir", out, "--steps", 2, "--sampling.max_tokens", 4),
        *("--inference.engine", "vllm", "--inference.url", server.base_url, "--inference.max_model_len", 512),
        *("--inference.max_batch_size", 64, "--orchestrator.prompts_per_step", 2, "--orchestrator.group_size", 4),
        *("--eval.num_tasks", 4, "--trainer.optim.lr", 1e-3, *settings),
    )


def test_a_run_uses_a_server_that_runs_already_and_leaves_it_running(
    vllm_server: RunningServer, tmp_path: Path
) -> None:
    latepix(*rl_command(vllm_server, tmp_path / "run"))
    summary = json.loads((tmp_path / "run" / "summary.json").read_text())
    assert (summary["steps"], summary["num_quarantined"]) == (2, 0)
    assert summary["mismatch_kl_max"] < 1e-6
    assert not (tmp_path / "run" / "logs" / "inference.log").exists()
    # It is there, and serves the run's last weights: the next run has to begin with another server.
    code, _, err = finish(start(*rl_command(vllm_server, tmp_path / "again")))
    assert code == 1
    assert "weight version: server step-2, trainer starts at step-0. It serves another run" in err


def write_scaled(model: Path, folder: Path, *, embedding: bool) -> Path:
    """Write weights of which all are smaller, the tied embedding only where asked for."""
    folder.mkdir()
    tensors = {
        name: tensor * (0.9 if embedding or "embed_tokens" not in name else 1.0)
        for name, tensor in load_file(model / "model.safetensors").items()
    }
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


@pytest.mark.parametrize("embedding", [False, True])
def test_a_reload_that_takes_only_a_part_is_caught_by_the_canary(
    vllm_server: RunningServer, tmp_path: Path, embedding: bool
) -> None:
    # vLLM's own RPC, without our plugin's part: on a CPU it leaves the output layer of tied embeddings as it was.
    weights = write_scaled(vllm_server.model, tmp_path / "weights", embedding=embedding)
    config = vllm_server.config
    trainer = TrainStep(config.model, config.trainer, loss=cross_entropy, total_steps=1)
    prompts = prompts_of(config, MessageRenderer(vllm_server.info))
    canary = Canary(trainer, prompts, temperature=1.0)
    before = canary.logprobs()
    trainer.adapter.load_hub_state_dict(trainer.model, load_file(weights / "model.safetensors"))
    published = canary.logprobs()
    trainer.close()

    async def use(client: InferenceClient, control: ServerControl) -> None:
        await ServerControl(client.connection, weight_update="reload_weights").update_weights(weights, 1)
        reading = await read_canary(client, prompts, temperature=1.0, policy_version=1)
        if embedding:
            with pytest.raises(StaleWeights, match="not the trainer's at step-1"):
                judge(reading, published, before, dtype="float32", temperature=1.0, policy_version=1)
        else:
            assert judge(reading, published, before, dtype="float32", temperature=1.0, policy_version=1).is_clear

    vllm_server.use(use)
