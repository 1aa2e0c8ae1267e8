"""The orchestrator's side of the server's weights: handshake at start, updates, and the canary after each.

What holds: no rollout is played before the server has shown, by its logprobs, that it serves the version it was given.
"""

from __future__ import annotations

import time
from pathlib import Path

import numpy as np

from latepix.config.schema import RunConfig
from latepix.errors import SchemaMismatch
from latepix.families.model_info import ModelInfo
from latepix.inference.canary import judge, prompts_of, prompts_sha256, read_canary
from latepix.inference.client import InferenceClient, Routing
from latepix.inference.contract import policy_version_of, version_label
from latepix.inference.control import ServerControl
from latepix.inference.facts import Difference, Facts, check_handshake, needs_of
from latepix.inference.render import MessageRenderer
from latepix.transport.handshake import HandshakeFolder


def client_of(config: RunConfig, info: ModelInfo) -> InferenceClient:
    """Return a client of the run's server, for the run's model."""
    return InferenceClient(
        config.inference.base_url,
        stop_ids=info.stop_ids,
        banned_ids=info.banned_ids,
        placeholder_ids=info.placeholder_ids,
        timeout_s=config.inference.request_timeout_s,
    )


def routing_of(config: RunConfig, group_id: int) -> Routing:
    """Return where a group's requests go: siblings and their turns share prompts, so they stay on one rank."""
    inference = config.inference
    num_ranks = inference.vllm.data_parallel_size
    return Routing(
        data_parallel_rank=group_id % num_ranks if num_ranks > 1 else None,
        priority=inference.priority,
        kv_transfer_params=inference.kv_transfer_params,
    )


class ServedWeights:
    """Keeps the server at the trainer's weights, and checks that it is.

    Attributes:
        control: the server's routes beside sampling.
        metrics: of the last update: `canary/kl`, `time/canary_s`, `time/update_weights_s`.
    """

    def __init__(self, config: RunConfig, client: InferenceClient, renderer: MessageRenderer) -> None:
        self.control = ServerControl(client.connection, weight_update=config.inference.weight_update)
        self.metrics: dict[str, float] = {}
        self._config = config
        self._client = client
        self._prompts = prompts_of(config, renderer)
        self._handshake = HandshakeFolder(config.output_dir)
        self._info = renderer.info
        self._told_apart: np.ndarray | None = None
        self._noise = 0.0

    async def greet(self) -> None:
        """Compare the server with the trainer, and check that it serves the weights the run starts from.

        Raises:
            HandshakeFailed: a setting differs in a way that changes pixels, tokens or logprobs.
            StaleWeights: it serves other weights.
            TransportError: the trainer or the server does not answer.
        """
        print("latepix: waiting for the trainer", flush=True)
        trainer = self._handshake.receive_facts(timeout_s=self._config.trainer.wait_timeout_s)
        if trainer.canary_sha256 != prompts_sha256(self._prompts):
            raise SchemaMismatch(
                f"The trainer's canary prompts are not the orchestrator's ({trainer.canary_sha256}, wanted "
                f"{prompts_sha256(self._prompts)}). Start both from the same config, with the same latepix."
            )
        _, harmless = await self.shake_hands(trainer)
        for difference in harmless:
            print(
                f"latepix: handshake: {difference.setting}: server {difference.server}, trainer {difference.trainer} "
                "(harmless)",
                flush=True,
            )
        print("latepix: checking that the server serves the trainer's weights", flush=True)
        await self._check_canary(0)

    async def shake_hands(self, trainer: Facts) -> tuple[Facts, list[Difference]]:
        """Compare the server with a trainer and with what the run needs, and let it begin at version 0.

        Returns:
            The server's facts, and the harmless differences.
        Raises:
            HandshakeFailed: a setting differs in a way that changes pixels, tokens or logprobs.
            TransportError: the server does not answer.
        """
        server = await self.control.facts()
        harmless = check_handshake(server, trainer, needs_of(self._config, self._info))
        if policy_version_of(str(server.weight_version)) is None:
            await self.control.set_weight_version(version_label(0))
        await self.control.init_weight_transfer()
        self._client.policy_version = 0
        return server, harmless

    async def load(self, path: Path, policy_version: int) -> None:
        """Let the server load a version.

        Raises:
            TransportError: the server refused; its old weights go on serving.
            StaleWeights: it reports another version.
        """
        started = time.monotonic()
        await self.control.update_weights(path, policy_version)
        self._client.policy_version = policy_version
        self.metrics["time/update_weights_s"] = time.monotonic() - started

    async def update(self, path: Path, policy_version: int) -> None:
        """Let the server load a version, and check by the canary that it did.

        Raises:
            TransportError: the server refused; its old weights go on serving.
            StaleWeights: it serves something else.
        """
        await self.load(path, policy_version)
        await self._check_canary(policy_version)

    async def _check_canary(self, policy_version: int) -> None:
        started = time.monotonic()
        config = self._config
        published = self._handshake.receive_canary(
            policy_version,
            shape=(len(self._prompts), self._info.vocab_size),
            timeout_s=config.trainer.wait_timeout_s,
        )
        verdicts = []
        # Each rank has weights of its own, and the first ones' updates say nothing about the others'.
        for rank in range(config.inference.vllm.data_parallel_size):
            reading = await read_canary(
                self._client,
                self._prompts,
                temperature=config.sampling.temperature,
                policy_version=policy_version,
                num_samples=config.orchestrator.group_size,
                routing=routing_of(config, rank),
            )
            verdicts.append(
                judge(
                    reading,
                    published,
                    self._told_apart,
                    dtype=config.model.dtype,
                    temperature=config.sampling.temperature,
                    policy_version=policy_version,
                    noise=self._noise,
                )
            )
        self.metrics["canary/kl"] = max(verdict.kl for verdict in verdicts)
        self.metrics["time/canary_s"] = time.monotonic() - started
        if all(verdict.is_clear for verdict in verdicts):
            self._told_apart = published
            self._noise = max(self._noise, *(verdict.error for verdict in verdicts))
