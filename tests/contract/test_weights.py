"""New weights for a running server: nothing in flight is lost, no cache survives, a failed update changes nothing."""

from __future__ import annotations

import asyncio
import shutil
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from latepix.errors import StaleWeights, TransportError
from latepix.families.facts import local_facts
from latepix.inference.canary import Reading, judge, prompts_of, read_canary
from latepix.inference.client import Generation, InferenceClient, Prompt, Sampling
from latepix.inference.control import ServerControl
from latepix.inference.facts import Facts, check_handshake, needs_of
from latepix.inference.render import MessageRenderer
from latepix.trainer.canary import Canary
from latepix.trainer.loss import cross_entropy
from latepix.trainer.step import TrainStep
from tests.contract.test_generate import ONE, TWO, make_prompt, trainer_logprobs
from tests.tiny.policy import Policy, load_policy
from tests.tiny.running import RunningServer


def write_other(model: Path, folder: Path, *, scale: float = 0.9, seed: int = 0) -> Path:
    """Write weights that differ from a model's everywhere, the vision tower included."""
    folder.mkdir(parents=True)
    generator = torch.Generator().manual_seed(seed)
    tensors = {
        name: scale * tensor + 0.02 * torch.randn(tensor.shape, generator=generator)
        for name, tensor in load_file(model / "model.safetensors").items()
    }
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


@pytest.fixture
def other_weights(server: RunningServer, tmp_path: Path) -> Path:
    return write_other(server.model, tmp_path / "weights" / "step_000001")


@pytest.fixture
def other_policy(server: RunningServer, other_weights: Path, tmp_path: Path) -> Policy:
    """Return the new weights as the trainer holds them."""
    folder = tmp_path / "other"
    shutil.copytree(server.model, folder)
    shutil.copyfile(other_weights / "model.safetensors", folder / "model.safetensors")
    return load_policy(folder)


async def ask(client: InferenceClient, prompts: list[Prompt], *, max_tokens: int = 8) -> list[Generation]:
    return await asyncio.gather(
        *(client.generate(p, Sampling(1.0, max_tokens, seed=100 * i)) for i, p in enumerate(prompts))
    )


async def update(control: ServerControl, path: Path, version: int) -> float:
    await control.init_weight_transfer()
    started = time.monotonic()
    await control.update_weights(path, version)
    return time.monotonic() - started


def error_of(policy: Policy, prompts: list[Prompt], answers: list[Generation]) -> float:
    ours = trainer_logprobs(policy, prompts, answers, 1.0)
    return max(
        abs(float(a) - b)
        for logs, answer in zip(ours, answers, strict=True)
        for a, b in zip(logs, answer.logprobs, strict=True)
    )


def test_after_an_update_the_same_prompt_gives_the_new_models_logprobs(
    server: RunningServer, policy: Policy, other_policy: Policy, other_weights: Path
) -> None:
    # The same pictures and prompts before and after: prefix, multimodal and encoder caches all hold them.
    prompts = [make_prompt(server, 40, ONE, 5), make_prompt(server, 2, ONE, 3, TWO, 140), make_prompt(server, 150)]

    async def use(client: InferenceClient, control: ServerControl) -> tuple[list[Generation], list[Generation]]:
        before = [*await ask(client, prompts), *await ask(client, prompts)]
        await update(control, other_weights, 1)
        client.policy_version = 1
        return before, await ask(client, prompts)

    before, after = server.use(use)
    assert error_of(policy, prompts * 2, before) < 2e-4
    assert error_of(other_policy, prompts, after) < 2e-4
    assert {answer.policy_version for answer in after} == {1}
    # The new weights are far from the old ones: a stale cache would show.
    assert error_of(policy, prompts, after) > 0.1


def test_requests_in_flight_survive_an_update(server: RunningServer, other_weights: Path) -> None:
    prompts = [make_prompt(server, 3, ONE, 5, seed=seed) for seed in range(64)]

    async def use(client: InferenceClient, control: ServerControl) -> tuple[list[Generation], float]:
        await control.set_weight_version("step-0")
        flying = asyncio.create_task(ask(client, prompts, max_tokens=200))
        await asyncio.sleep(0.3)
        assert not flying.done()
        seconds = await update(control, other_weights, 1)
        return await flying, seconds

    answers, seconds = server.use(use)
    assert len(answers) == 64
    for answer in answers:
        spans = answer.policy_spans
        assert [span.start for span in spans] == [0, *(span.end for span in spans[:-1])]
        assert spans[-1].end == len(answer.token_ids)
        assert {span.policy_version for span in spans} <= {0, 1}
        assert answer.policy_version == spans[0].policy_version
    assert 0 in {span.policy_version for answer in answers for span in answer.policy_spans}
    if server.engine == "vllm":
        # The local engine updates between batches; vLLM freezes its requests and goes on with the new weights.
        assert any(len(answer.policy_spans) == 2 for answer in answers)
        assert seconds < 5


def cut_off(folder: Path) -> None:
    file = folder / "model.safetensors"
    file.write_bytes(file.read_bytes()[: file.stat().st_size // 2])


def lose_a_tensor(folder: Path) -> None:
    tensors = load_file(folder / "model.safetensors")
    tensors.pop(sorted(tensors)[-1])
    save_file(tensors, folder / "model.safetensors")


def bend_a_tensor(folder: Path) -> None:
    tensors = load_file(folder / "model.safetensors")
    name = sorted(tensors)[-1]
    tensors[name] = torch.zeros(3, 5)
    save_file(tensors, folder / "model.safetensors")


@pytest.mark.parametrize("spoil", [shutil.rmtree, cut_off, lose_a_tensor, bend_a_tensor])
def test_a_failed_update_leaves_the_old_weights_serving_and_the_next_one_works(
    server: RunningServer, other_weights: Path, spoil: Callable[[Path], None], tmp_path: Path
) -> None:
    prompts = [make_prompt(server, 40, ONE, 5), make_prompt(server, 9)]
    bad = tmp_path / "bad"
    shutil.copytree(other_weights, bad)
    spoil(bad)

    async def use(client: InferenceClient, control: ServerControl) -> tuple[list[Generation], ...]:
        before = await ask(client, prompts)
        with pytest.raises(TransportError, match=r"answered HTTP \d+: .*\w") as caught:
            await update(control, bad, 1)
        assert str(bad) in str(caught.value)
        assert await control.weight_version() in ("step-0", "default")
        after = await ask(client, prompts)
        await update(control, other_weights, 2)
        return before, after, await ask(client, prompts)

    before, after, then = server.use(use)
    assert [answer.logprobs for answer in after] == [answer.logprobs for answer in before]
    assert [answer.logprobs for answer in then] != [answer.logprobs for answer in before]
    assert {answer.policy_version for answer in then} == {2}


def test_the_canary_knows_new_weights_from_old_ones(
    server: RunningServer, other_policy: Policy, other_weights: Path
) -> None:
    config = server.config
    renderer = MessageRenderer(server.info)
    prompts = prompts_of(config, renderer)
    trainer = TrainStep(config.model, config.trainer, loss=cross_entropy, total_steps=1)
    other = TrainStep(
        config.model.model_copy(update={"path": other_policy.path}), config.trainer, loss=cross_entropy, total_steps=1
    )
    published, then = (Canary(step, prompts, temperature=0.7).logprobs() for step in (trainer, other))

    async def use(client: InferenceClient, control: ServerControl) -> None:
        async def reading(version: int) -> Reading:
            return await read_canary(client, prompts, temperature=0.7, policy_version=version)

        await control.set_weight_version("step-0")
        verdict = judge(await reading(0), published, None, dtype="float32", temperature=0.7, policy_version=0)
        assert verdict.kl < 1e-7
        # The server says step-1 and did nothing.
        await control.set_weight_version("step-1")
        with pytest.raises(StaleWeights, match="the update did nothing"):
            judge(await reading(1), then, published, dtype="float32", temperature=0.7, policy_version=1)
        await update(control, other_weights, 1)
        verdict = judge(await reading(1), then, published, dtype="float32", temperature=0.7, policy_version=1)
        assert verdict.kl < 1e-7
        assert verdict.is_clear

    try:
        server.use(use)
    finally:
        trainer.close()
        other.close()


def test_server_and_trainer_shake_hands(server: RunningServer) -> None:
    async def use(client: InferenceClient, control: ServerControl) -> Facts:
        return await control.facts()

    facts = server.use(use)
    ours = local_facts(server.model, engine="trainer", dtype="float32")
    harmless = check_handshake(facts, ours, needs_of(server.config, server.info))
    assert all(one.setting.startswith(("version of", "image processor: class")) for one in harmless), harmless
