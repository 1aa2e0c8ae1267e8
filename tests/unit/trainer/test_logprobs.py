"""Tiles = plain autograd = the closed form; and how much memory tiles take."""

from __future__ import annotations

import subprocess
import sys
from typing import Any

import pytest
import torch
from torch import nn

from latepix.errors import ConfigError
from latepix.trainer import logprobs
from latepix.trainer.logprobs import logprobs_and_entropies, output_weight, tile_shape

#: Everything fits; nothing does.
PLAIN, ONE_LOGIT = 1 << 40, 0


def make_inputs(
    *, tokens: int = 9, vocabulary: int = 23, features: int = 5, dtype: torch.dtype = torch.float64, seed: int = 0
) -> dict[str, torch.Tensor]:
    """Make inputs in which some targets lie in the last tile of any tiling, and some ids are banned."""
    rng = torch.Generator().manual_seed(seed)
    targets = torch.randint(0, vocabulary, (tokens,), generator=rng)
    banned = torch.tensor([0, 1, vocabulary // 2, vocabulary - 2])
    targets[torch.isin(targets, banned)] = vocabulary - 1
    return {
        "hidden_ND": torch.randn(tokens, features, generator=rng, dtype=torch.float64).to(dtype),
        "weight_VD": torch.randn(vocabulary, features, generator=rng, dtype=torch.float64).to(dtype),
        "targets_N": targets,
        "temperatures_N": (0.5 + torch.rand(tokens, generator=rng, dtype=torch.float64)).to(dtype),
        "banned": banned,
    }


def bytes_of(num_logits: int, itemsize: int = 8) -> int:
    """Return a budget whose tiles have that many logits."""
    return num_logits * itemsize * 2


def run(inputs: dict[str, torch.Tensor], logits_bytes: int, *, of_entropies: float = 0.7) -> tuple[torch.Tensor, ...]:
    """Return logprobs, entropies, and the gradients of hidden states and weight of a sum with uneven weights."""
    leaves = {name: inputs[name].clone().requires_grad_() for name in ("hidden_ND", "weight_VD")}
    found, entropies = logprobs_and_entropies(**(inputs | leaves), logits_bytes=logits_bytes)
    weights = torch.linspace(-1, 2, len(found), dtype=found.dtype)
    loss = (weights * found).sum()
    if of_entropies:
        loss = loss + of_entropies * (weights.flip(0) * entropies).sum()
    loss.backward()
    gradients = [leaf.grad for leaf in leaves.values()]
    assert all(gradient is not None for gradient in gradients)
    return found.detach(), entropies.detach(), *(g for g in gradients if g is not None)


def assert_close(one: tuple[torch.Tensor, ...], other: tuple[torch.Tensor, ...], *, rtol: float) -> None:
    """Compare each tensor against the size of its own largest entry."""
    for ours, wanted in zip(one, other, strict=True):
        assert ours.shape == wanted.shape
        assert float((ours - wanted).abs().max()) <= rtol * float(wanted.abs().max())


# Budgets that cut tokens, vocabulary, or both, evenly and unevenly; the last one tiles tokens alone.
@pytest.mark.parametrize("num_logits", [1, 7, 9, 30, 50, 100, 23 * 4, 23 * 8])
def test_tiles_equal_plain_autograd(num_logits: int, monkeypatch: pytest.MonkeyPatch) -> None:
    inputs = make_inputs()
    for tokens in (1, 3, 4, 1024):
        monkeypatch.setattr(logprobs, "_TILE_TOKENS", tokens)
        for of_entropies in (0.7, 0.0):
            wanted = run(inputs, PLAIN, of_entropies=of_entropies)
            assert_close(run(inputs, bytes_of(num_logits), of_entropies=of_entropies), wanted, rtol=1e-12)


def test_float32_tiles_equal_plain_autograd_to_float_tolerance() -> None:
    inputs = make_inputs(tokens=40, vocabulary=330, features=32, dtype=torch.float32)
    # Other orders of additions: some units in the last place of 24 bits.
    assert_close(run(inputs, bytes_of(700, 4)), run(inputs, PLAIN), rtol=5e-6)


@pytest.mark.parametrize("seed", range(6))
def test_the_gradient_of_random_tiles_is_that_of_finite_differences(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    rng = torch.Generator().manual_seed(seed)
    tokens, vocabulary, tile_tokens = (int(torch.randint(2, 12, (), generator=rng)) + n for n in (0, 6, 0))
    monkeypatch.setattr(logprobs, "_TILE_TOKENS", tile_tokens)
    inputs = make_inputs(tokens=tokens, vocabulary=vocabulary, features=3, seed=seed)
    budget = bytes_of(int(torch.randint(1, tokens * vocabulary, (), generator=rng)))
    inputs["targets_N"][0] = vocabulary - 1

    def both(hidden: torch.Tensor, weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return logprobs_and_entropies(
            **(inputs | {"hidden_ND": hidden, "weight_VD": weight}), logits_bytes=min(budget, bytes_of(40))
        )

    leaves = [inputs[name].clone().requires_grad_() for name in ("hidden_ND", "weight_VD")]
    assert both(*leaves)[0].grad_fn is not None
    assert type(both(*leaves)[0].grad_fn).__name__ == "_TiledBackward"
    assert torch.autograd.gradcheck(both, leaves)


def test_a_worked_example() -> None:
    # Two of three ids may be drawn; z = (2, 0) at temperature 0.5, so p = (0.8808, 0.1192).
    inputs = {
        "hidden_ND": torch.tensor([[1.0]]),
        "weight_VD": torch.tensor([[1.0], [9.0], [0.0]]),
        "targets_N": torch.tensor([0]),
        "temperatures_N": torch.tensor([0.5]),
        "banned": torch.tensor([1]),
    }
    for budget in (PLAIN, ONE_LOGIT):
        found, entropies, of_hidden, of_weight = run(inputs, budget, of_entropies=0.0)
        assert float(found) == pytest.approx(-0.126928, abs=1e-6)
        assert float(entropies) == pytest.approx(0.365334, abs=2e-6)
        # -1 is the weight of the only token: -(1 - p) / 0.5 for the target, p / 0.5 for the other.
        assert of_weight[:, 0].tolist() == pytest.approx([-0.238406, 0.0, 0.238406], abs=1e-6)
        assert float(of_hidden) == pytest.approx(-0.238406, abs=1e-6)


@pytest.mark.parametrize("budget", [PLAIN, bytes_of(11)])
def test_a_banned_id_has_no_probability_and_no_gradient(budget: int) -> None:
    inputs = make_inputs()
    inputs["targets_N"][2] = int(inputs["banned"][2])
    inputs["weight_VD"][inputs["banned"]] *= 50
    found, entropies, of_hidden, of_weight = run(inputs, budget)
    assert float(found[2].exp()) == 0.0
    assert (of_weight[inputs["banned"]] == 0).all()
    assert torch.isfinite(of_hidden).all()
    # What the banned ids would have said changes nothing for the others.
    others = inputs | {"weight_VD": inputs["weight_VD"].index_fill(0, inputs["banned"], 0.0)}
    assert torch.equal(run(others, budget)[1], entropies)


def test_a_tile_of_nothing_but_banned_ids_weighs_nothing() -> None:
    for temperature in (1e-3, 1.0, 10.0):
        inputs = make_inputs(dtype=torch.float32) | {"banned": torch.tensor([0, 1, 2, 3, 20, 21])}
        inputs["temperatures_N"] = torch.full((9,), temperature)
        inputs["targets_N"] = torch.arange(9) + 5
        assert_close(run(inputs, bytes_of(9 * 2, 4)), run(inputs, PLAIN), rtol=1e-5)


@pytest.mark.parametrize("budget", [PLAIN, ONE_LOGIT])
@pytest.mark.parametrize("tokens", [0, 1])
def test_no_token_and_one_token(tokens: int, budget: int) -> None:
    inputs = make_inputs(tokens=tokens)
    found, entropies, of_hidden, of_weight = run(inputs, budget)
    assert len(found) == len(entropies) == len(of_hidden) == tokens
    assert bool((of_weight != 0).any()) == (tokens == 1)


def test_bfloat16_gradients_are_summed_in_float32() -> None:
    inputs = make_inputs(tokens=400, vocabulary=40, features=16, dtype=torch.bfloat16)
    inputs["temperatures_N"] = inputs["temperatures_N"].float()
    tiled = run(inputs, bytes_of(3 * 40, 4))
    assert [tensor.dtype for tensor in tiled] == [torch.float32] * 2 + [torch.bfloat16] * 2
    exact = {name: value.double() if value.is_floating_point() else value for name, value in inputs.items()}
    # The logits are rounded to 8 bits and the gradient twice, once for a tile and once at the end: 2^-7 in all. Over
    # 133 tiles, sums in bfloat16 would lose about ten times as much.
    wanted = run(exact, PLAIN)
    assert_close(tuple(t.double() for t in tiled[2:]), wanted[2:], rtol=2**-7)
    assert_close(tuple(t.double() for t in tiled[:2]), wanted[:2], rtol=2**-6)


def test_only_what_is_trained_gets_a_gradient() -> None:
    inputs = make_inputs()
    hidden = inputs["hidden_ND"].requires_grad_()
    found, _ = logprobs_and_entropies(**inputs, logits_bytes=ONE_LOGIT)
    found.sum().backward()
    assert hidden.grad is not None
    assert inputs["weight_VD"].grad is None


@pytest.mark.parametrize(
    ("tokens", "vocabulary", "num_logits", "wanted"),
    [
        (8192, 151_936, 32_000_000, (1024, 31_250)),
        (8192, 1000, 32_000_000, (8192, 1000)),
        (10_000, 30_000, 900_000, (1024, 878)),
        (5, 7, 0, (1, 1)),
        (0, 7, 100, (14, 7)),
    ],
)
def test_a_tile_fits_into_its_budget(tokens: int, vocabulary: int, num_logits: int, wanted: tuple[int, int]) -> None:
    shape = tile_shape(tokens, vocabulary, num_logits=num_logits)
    assert shape[0] * shape[1] <= max(1, num_logits)
    assert shape == wanted if tokens else shape[1] == 7


class _Model(nn.Module):
    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer = layer

    def get_output_embeddings(self) -> nn.Module:
        return self.layer


def test_an_output_layer_that_is_more_than_a_matrix_is_refused_by_name() -> None:
    plain: Any = _Model(nn.Linear(3, 5, bias=False))
    assert output_weight(plain) is plain.layer.weight
    biased: Any = _Model(nn.Linear(3, 5))
    with pytest.raises(ConfigError, match=r"output layer of _Model has a bias; wanted a plain matrix"):
        output_weight(biased)
    other: Any = _Model(nn.Sequential())
    with pytest.raises(ConfigError, match=r"output layer of _Model is a Sequential"):
        output_weight(other)


_MEASURE = """
import torch
from latepix.metrics import peak_rss_bytes
from latepix.trainer.logprobs import logprobs_and_entropies
torch.set_num_threads(1)

def step(tokens, vocabulary, logits_bytes):
    hidden = torch.randn(tokens, 16, requires_grad=True)
    weight = torch.randn(vocabulary, 16, requires_grad=True)
    before = peak_rss_bytes()
    found, entropies = logprobs_and_entropies(
        hidden, weight, torch.zeros(tokens, dtype=torch.long), torch.ones(tokens), torch.tensor([1]),
        logits_bytes=logits_bytes,
    )
    (found.sum() + entropies.sum()).backward()
    return peak_rss_bytes() - before

step(8, 1000, 0)
print(step(1000, 20_000, 16_000_000), step(2000, 160_000, 16_000_000), step(1000, 20_000, 1 << 40))
"""


def test_memory_does_not_grow_with_tokens_times_vocabulary() -> None:
    command = [sys.executable, "-c", _MEASURE]
    small, large, plain = map(int, subprocess.run(command, check=True, capture_output=True, text=True).stdout.split())
    # All logits would be 80 and 1,280 MB, several times over in autograd; the budget is 16 MB. What is above it are the
    # weight and its gradient (20 MB), buffers of the matrix products, and memory the allocator has not given back:
    # 25 to 97 MB in all, run by run.
    assert small + large < 200e6
    # The measurement could tell.
    assert plain > 250e6
