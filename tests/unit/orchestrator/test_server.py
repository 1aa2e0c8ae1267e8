"""The orchestrator's side of the server's weights, against a scripted server and a trainer that only left files."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest

from latepix.config.schema import RunConfig
from latepix.errors import HandshakeFailed, SchemaMismatch, StaleWeights, TransportError
from latepix.families.model_info import ModelInfo
from latepix.inference.canary import canary_prompts, prompts_sha256
from latepix.inference.client import ANYWHERE, InferenceClient, Prompt, Routing, Sampling
from latepix.inference.facts import Facts
from latepix.inference.render import MessageRenderer
from latepix.orchestrator.loop import check_measured
from latepix.orchestrator.server import ServedWeights, client_of, routing_of
from latepix.trace.refs import expand_placeholders
from latepix.transport.handshake import HandshakeFolder
from tests.tiny.servers import ScriptedServer, closed_url, scripted_server
from tests.tiny.traces import make_trace

Use = Callable[[ServedWeights, InferenceClient], Awaitable[None]]
SERVER = Facts(
    engine="local",
    model="/models/a",
    model_type="qwen3_vl",
    dtype="float32",
    weight_version="step-0",
    weight_transfer="safetensors_dir",
)
TRAINER = Facts(engine="trainer", model="/models/a", model_type="qwen3_vl", dtype="float32")


def make_logprobs(info: ModelInfo, *, seed: int = 0, by: float = 0.0) -> np.ndarray:
    """Return [6, V] float32 log-probabilities, `by` along one fixed direction from those of the seed."""
    shape = (6, info.vocab_size)
    logits = np.random.default_rng(seed).normal(size=shape) + by * np.random.default_rng(99).normal(size=shape)
    logits[:, list(info.banned_ids)] = -1e30
    return (logits - np.log(np.exp(logits).sum(axis=1, keepdims=True))).astype(np.float32)


def all_prompts(renderer: MessageRenderer) -> tuple[Prompt, ...]:
    return canary_prompts(renderer, max_images=64, max_tokens=4096)


class PlayedServer:
    """Samples the canary from given distributions; an update takes those of the folder, unless it is stuck.

    Attributes:
        facts: as it tells them.
        label: of the weights that it says it serves.
        served: [K, V] of the weights that it serves.
        folders: what lies in a weights folder, by path.
        is_stuck: says done and keeps its weights.
    """

    def __init__(self, renderer: MessageRenderer, *, facts: Facts, served: np.ndarray) -> None:
        self.facts, self.served = facts, served
        self.label = str(facts.weight_version)
        self.folders: dict[str, np.ndarray] = {}
        self.is_stuck = False
        self._info = renderer.info
        self._prompts = all_prompts(renderer)
        self._rows = {
            self._key(prompt.token_ids, prompt.images[0].url if prompt.images else ""): row
            for row, prompt in enumerate(self._prompts)
        }

    @staticmethod
    def _key(token_ids: Sequence[int], url: str) -> tuple[tuple[int, ...], str]:
        """Name a prompt: two of them have the same tokens and their pictures in another order."""
        return tuple(token_ids), url

    def answer(self, method: str, path: str, body: Any) -> tuple[int, Any]:
        if path == "/latepix/facts":
            return 200, msgspec.to_builtins(self.facts)
        if path == "/weight_info":
            return 200, {"weight_version": self.label}
        if path == "/inference/v1/generate":
            return 200, self._generate(body)
        if path == "/update_weights" and not self.is_stuck:
            self.served = self.folders[body["update_info"]["path"]]
        if path in ("/finish_weight_update", "/update_weight_version"):
            self.label = body.get("weight_version") or body["new_version"]
        return 200, {}

    def _generate(self, body: Any) -> dict[str, Any]:
        parts = body.get("content_parts") or [{"url": ""}]
        row = self._rows[self._key(body["token_ids"], parts[0]["url"])]
        lengths = [self._info.num_image_tokens(image) for image in self._prompts[row].images]
        expanded, ranges = expand_placeholders(body["token_ids"], lengths, self._info.placeholder_ids)
        sampling = body["sampling_params"]
        probabilities = np.exp(self.served[row].astype(np.float64))
        choices = []
        for index in range(sampling.get("n", 1)):
            rng = np.random.default_rng(sampling["seed"] + index)
            token = int(rng.choice(len(probabilities), p=probabilities / probabilities.sum()))
            choices.append(
                {
                    "index": index,
                    "token_ids": [token],
                    "logprobs": {"content": [{"token_id": token, "logprob": float(self.served[row, token])}]},
                    "finish_reason": "length",
                    "weight_versions": [{"version": self.label, "start": 0, "end": 1}],
                }
            )
        return {
            "request_id": "r",
            "choices": choices,
            "prompt_token_ids": expanded,
            "mm_placeholders": {"image": [{"offset": one.offset, "length": one.length} for one in ranges]},
        }


@pytest.fixture
def played(renderer: MessageRenderer, info: ModelInfo) -> PlayedServer:
    return PlayedServer(renderer, facts=SERVER, served=make_logprobs(info))


@pytest.fixture
def server(played: PlayedServer) -> Iterator[ScriptedServer]:
    with scripted_server(lambda *request: played.answer(*request)) as running:
        yield running


@pytest.fixture
def trainer(tmp_path: Path, info: ModelInfo, renderer: MessageRenderer) -> HandshakeFolder:
    """Return what a trainer that has just started has left."""
    folder = HandshakeFolder(tmp_path)
    folder.publish_canary(0, make_logprobs(info))
    folder.publish_facts(msgspec.structs.replace(TRAINER, canary_sha256=prompts_sha256(all_prompts(renderer))))
    return folder


def make_config(model: Path, out: Path, *, url: str = "http://127.0.0.1:9", **inference: Any) -> RunConfig:
    return RunConfig.model_validate(
        {
            "output_dir": out,
            "model": {"path": model},
            "inference": {"url": url, **inference},
            "trainer": {"wait_timeout_s": 0.05},
        }
    )


def with_weights(config: RunConfig, renderer: MessageRenderer, use: Use) -> ServedWeights:
    async def main() -> ServedWeights:
        client = client_of(config, renderer.info)
        try:
            weights = ServedWeights(config, client, renderer)
            await use(weights, client)
            return weights
        finally:
            await client.close()

    return asyncio.run(main())


async def greet(weights: ServedWeights, client: InferenceClient) -> None:
    await weights.greet()


def test_a_server_of_the_same_model_is_accepted(
    renderer: MessageRenderer, server: ScriptedServer, trainer: HandshakeFolder, tmp_path: Path
) -> None:
    versions = []

    async def use(weights: ServedWeights, client: InferenceClient) -> None:
        await weights.greet()
        versions.append(client.policy_version)

    weights = with_weights(make_config(renderer.info.path, tmp_path, url=server.url), renderer, use)
    assert versions == [0]
    assert 0 <= weights.metrics["canary/kl"] < 1e-9
    assert "POST /init_weight_transfer_engine" in server.routes
    assert "POST /update_weight_version" not in server.routes
    assert server.routes.count("POST /inference/v1/generate") == 6


def test_a_server_that_has_no_version_yet_is_labelled(
    renderer: MessageRenderer, server: ScriptedServer, trainer: HandshakeFolder, played: PlayedServer, tmp_path: Path
) -> None:
    played.label = "default"
    played.facts = msgspec.structs.replace(SERVER, weight_version="default")
    with_weights(make_config(renderer.info.path, tmp_path, url=server.url), renderer, greet)
    assert ("POST", "/update_weight_version", {"new_version": "step-0"}) in server.requests
    assert played.label == "step-0"


def test_harmless_differences_are_told_and_passed(
    renderer: MessageRenderer,
    server: ScriptedServer,
    trainer: HandshakeFolder,
    played: PlayedServer,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    played.facts = msgspec.structs.replace(SERVER, model="/models/b")
    with_weights(make_config(renderer.info.path, tmp_path, url=server.url), renderer, greet)
    said = capsys.readouterr()
    assert "handshake: model folder: server /models/b, trainer /models/a (harmless)" in said.out + said.err


def test_what_is_waited_for_is_told(
    renderer: MessageRenderer,
    server: ScriptedServer,
    trainer: HandshakeFolder,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    with_weights(make_config(renderer.info.path, tmp_path, url=server.url), renderer, greet)
    stages = ["latepix: waiting for the trainer", "latepix: checking that the server serves the trainer's weights"]
    assert [line for line in capsys.readouterr().out.splitlines() if line in stages] == stages


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"dtype": "bfloat16"}, "dtype: server bfloat16, trainer float32"),
        ({"weight_version": "step-7"}, "weight version: server step-7"),
        ({"max_num_seqs": 2}, "max_num_seqs: server 2, trainer needs at least 8"),
    ],
)
def test_a_server_that_does_not_fit_is_refused_before_anything_is_sampled(
    renderer: MessageRenderer,
    server: ScriptedServer,
    trainer: HandshakeFolder,
    played: PlayedServer,
    tmp_path: Path,
    changes: dict[str, Any],
    message: str,
) -> None:
    played.facts = msgspec.structs.replace(SERVER, **changes)
    with pytest.raises(HandshakeFailed, match=message):
        with_weights(make_config(renderer.info.path, tmp_path, url=server.url), renderer, greet)
    assert server.routes == ["GET /latepix/facts"]


def test_a_server_of_other_weights_is_refused(
    renderer: MessageRenderer, server: ScriptedServer, trainer: HandshakeFolder, played: PlayedServer, tmp_path: Path
) -> None:
    played.served = make_logprobs(renderer.info, seed=5)
    with pytest.raises(StaleWeights, match=r"are not the trainer's at step-0: mean mismatch KL"):
        with_weights(make_config(renderer.info.path, tmp_path, url=server.url), renderer, greet)


def test_a_trainer_with_other_canary_prompts_is_refused(
    renderer: MessageRenderer, server: ScriptedServer, trainer: HandshakeFolder, tmp_path: Path
) -> None:
    trainer.publish_facts(msgspec.structs.replace(TRAINER, canary_sha256="0" * 64))
    with pytest.raises(SchemaMismatch, match=r"canary prompts are not the orchestrator's .* Start both from the same"):
        with_weights(make_config(renderer.info.path, tmp_path, url=server.url), renderer, greet)


def test_every_rank_is_asked(
    renderer: MessageRenderer, server: ScriptedServer, trainer: HandshakeFolder, tmp_path: Path
) -> None:
    config = make_config(renderer.info.path, tmp_path, url=server.url, engine="vllm", vllm={"data_parallel_size": 2})
    with_weights(config, renderer, greet)
    ranks = [headers.get("X-data-parallel-rank") for headers in server.headers]
    assert (ranks.count("0"), ranks.count("1")) == (6, 6)


def test_a_server_that_is_down_is_named(renderer: MessageRenderer, trainer: HandshakeFolder, tmp_path: Path) -> None:
    url = closed_url()
    with pytest.raises(TransportError, match=rf"^{url}/latepix/facts did not answer"):
        with_weights(make_config(renderer.info.path, tmp_path, url=url), renderer, greet)


def test_a_trainer_that_never_says_a_word_is_named(
    renderer: MessageRenderer, server: ScriptedServer, tmp_path: Path
) -> None:
    wanted = rf"^Waited 0\.05 s for the trainer \({tmp_path}/handshake/trainer\.json\), in vain \(trainer\.wait_timeout"
    with pytest.raises(TransportError, match=wanted):
        with_weights(make_config(renderer.info.path, tmp_path, url=server.url), renderer, greet)


def test_new_weights_are_loaded_and_checked(
    renderer: MessageRenderer, server: ScriptedServer, trainer: HandshakeFolder, played: PlayedServer, tmp_path: Path
) -> None:
    versions = []

    async def use(weights: ServedWeights, client: InferenceClient) -> None:
        await weights.greet()
        played.folders["/w/1"] = make_logprobs(renderer.info, seed=1)
        trainer.publish_canary(1, played.folders["/w/1"])
        await weights.update(Path("/w/1"), 1)
        versions.append(client.policy_version)

    weights = with_weights(make_config(renderer.info.path, tmp_path, url=server.url), renderer, use)
    assert versions == [1]
    assert played.label == "step-1"
    assert weights.metrics["canary/kl"] < 1e-9
    assert weights.metrics["time/update_weights_s"] > 0


def test_a_server_that_says_done_and_keeps_its_weights_is_refused(
    renderer: MessageRenderer, server: ScriptedServer, trainer: HandshakeFolder, played: PlayedServer, tmp_path: Path
) -> None:
    async def use(weights: ServedWeights, client: InferenceClient) -> None:
        await weights.greet()
        played.is_stuck = True
        trainer.publish_canary(1, make_logprobs(renderer.info, seed=1))
        with pytest.raises(
            StaleWeights, match=r"^The server said that it serves step-1, but .* the update did nothing"
        ):
            await weights.update(Path("/w/1"), 1)

    with_weights(make_config(renderer.info.path, tmp_path, url=server.url), renderer, use)


def test_a_server_that_keeps_its_weights_over_tiny_steps_is_found_out(
    renderer: MessageRenderer, server: ScriptedServer, trainer: HandshakeFolder, played: PlayedServer, tmp_path: Path
) -> None:
    passed = []

    async def use(weights: ServedWeights, client: InferenceClient) -> None:
        await weights.greet()
        played.is_stuck = True
        for version in range(1, 20):
            trainer.publish_canary(version, make_logprobs(renderer.info, by=1e-6 * version))
            await weights.update(Path("/w"), version)
            passed.append(version)

    with pytest.raises(StaleWeights, match="the update did nothing"):
        with_weights(make_config(renderer.info.path, tmp_path, url=server.url), renderer, use)
    # One step says nothing; against the version before each time, none ever would.
    assert 1 <= len(passed) < 10


def test_a_step_as_small_as_the_rounding_that_was_measured_passes(
    renderer: MessageRenderer, server: ScriptedServer, trainer: HandshakeFolder, played: PlayedServer, tmp_path: Path
) -> None:
    played.served = make_logprobs(renderer.info, by=3e-4)

    async def use(weights: ServedWeights, client: InferenceClient) -> None:
        await weights.greet()
        # Closer to the version before, but by less than three times what they differed in at the start.
        played.is_stuck = True
        trainer.publish_canary(1, make_logprobs(renderer.info, by=-4e-4))
        await weights.update(Path("/w"), 1)
        trainer.publish_canary(2, make_logprobs(renderer.info, by=-1.5e-3))
        with pytest.raises(StaleWeights, match="the update did nothing"):
            await weights.update(Path("/w"), 2)

    with_weights(make_config(renderer.info.path, tmp_path, url=server.url), renderer, use)


def test_weights_whose_canary_never_comes_are_named(
    renderer: MessageRenderer, server: ScriptedServer, trainer: HandshakeFolder, played: PlayedServer, tmp_path: Path
) -> None:
    async def use(weights: ServedWeights, client: InferenceClient) -> None:
        played.folders["/w/1"] = make_logprobs(renderer.info, seed=1)
        await weights.greet()
        await weights.update(Path("/w/1"), 1)

    with pytest.raises(TransportError, match=r"for the trainer's canary \(.*step_000001\.npy\), in vain"):
        with_weights(make_config(renderer.info.path, tmp_path, url=server.url), renderer, use)


def test_a_run_of_one_picture_has_a_canary_of_one_picture(
    renderer: MessageRenderer, server: ScriptedServer, trainer: HandshakeFolder, tmp_path: Path
) -> None:
    config = make_config(renderer.info.path, tmp_path, url=server.url)
    config = config.model_copy(update={"images": config.images.model_copy(update={"max_per_prompt": 1})})
    # The fourth and the fifth prompt have two pictures.
    trainer.publish_canary(0, make_logprobs(renderer.info)[[0, 1, 2, 5]])
    prompts = canary_prompts(renderer, max_images=1, max_tokens=4096)
    trainer.publish_facts(msgspec.structs.replace(TRAINER, canary_sha256=prompts_sha256(prompts)))
    with_weights(config, renderer, greet)
    parts = [len(body.get("content_parts", ())) for _, path, body in server.requests if path.endswith("generate")]
    assert sorted(parts) == [0, 1, 1, 1]


def test_a_client_tells_the_server_its_models_stops_and_bans(
    renderer: MessageRenderer, server: ScriptedServer, tmp_path: Path
) -> None:
    info = renderer.info
    config = make_config(info.path, tmp_path, url=server.url)

    async def main() -> None:
        client = client_of(config, info)
        try:
            await client.generate(all_prompts(renderer)[1], Sampling(temperature=1.0, max_tokens=1))
        finally:
            await client.close()

    asyncio.run(main())
    ((_, _, body),) = server.requests
    assert body["sampling_params"]["stop_token_ids"] == list(info.stop_ids)
    assert body["sampling_params"]["logit_bias"].keys() == {str(token) for token in info.banned_ids}


@pytest.mark.parametrize(("num_ranks", "ranks"), [(1, [None] * 5), (2, [0, 1, 0, 1, 0]), (3, [0, 1, 2, 0, 1])])
def test_a_group_stays_on_its_rank(tmp_path: Path, num_ranks: int, ranks: list[int | None]) -> None:
    config = make_config(tmp_path, tmp_path, engine="vllm", vllm={"data_parallel_size": num_ranks})
    assert [routing_of(config, group_id).data_parallel_rank for group_id in range(5)] == ranks


def test_requests_carry_what_the_config_says(tmp_path: Path) -> None:
    config = make_config(tmp_path, tmp_path, engine="vllm", priority=-2, kv_transfer_params={"a": 1})
    assert routing_of(config, 7) == Routing(priority=-2, kv_transfer_params={"a": 1})
    assert routing_of(make_config(tmp_path, tmp_path), 7) == ANYWHERE


def test_an_evaluation_of_other_weights_is_refused() -> None:
    nodes = make_trace().nodes
    sampled = tuple(
        msgspec.structs.replace(node, policy_version=2) if node.policy_version is not None else node for node in nodes
    )
    trace = make_trace(nodes=sampled)
    check_measured([trace], 2)
    with pytest.raises(StaleWeights, match=r"Evaluation of version 3, trace s0-g0-r0: an answer came from version 2"):
        check_measured([trace], 3)
