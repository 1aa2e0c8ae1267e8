"""How far server and trainer are apart, token by token, and in tables. Pure: arrays in, numbers out.

In: micro batches with the server's logprobs, and the trainer's logprobs of the same tokens. Out: `TokenRecords`, one
entry a trained token, and from them one `Agreement` a step, a number of pictures, a distance or a turn.

What is compared is `log_ratio = trainer - inference` in nats; the mismatch KL of a token is
`exp(log_ratio) - log_ratio - 1`, which is 0 where both agree and positive everywhere else.

Worked example, one sample of 8 tokens, a picture of 2 tokens at 1, answers at 4 and at 6 to 7::

    token_ids        [11, 9, 9, 12, 31, 13, 32, 33]
    trained          [ 0, 0, 0,  0,  1,  0,  1,  1]
    num_images                       1       1   1
    image_distances                  2       4   5     from 2, the last token of the picture
    turns                            1       2   2

A category without tokens has no numbers: None, and never 0, which would read as perfect agreement.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import msgspec
import numpy as np

from latepix.trace.training import MicroBatch

#: One version explains the server's logprobs better than another if its mean KL is below this share of the other's.
_CLEARLY_LESS = 0.5
#: ... and the other's is this many times the rounding of the first step, and more than float32 ever showed, nats.
_BEYOND_NOISE, _LEAST_SHOWN = 10.0, 1e-11
#: The mean KL grew with the updates if every later step has this many times that of the first, and more than float32
#: rounding explains, nats. (Observed from rounding alone: 40 times, and 1e-12.)
_GREW, _ROUNDING = 1000.0, 1e-6
_LOOK_AT_UPDATES = "look at how new weights reach the server (inference.weight_update, the server's log)"
#: Last distance of each bin, in tokens; what is farther makes up one more bin.
_DISTANCE_BINS = (8, 16, 32, 64, 128, 256, 512, 1024)


class TokenRecords(msgspec.Struct, frozen=True):
    """Trained tokens, N of them, in the order of their batches.

    Attributes:
        inference_logprobs, trainer_logprobs: [N] float32, nats.
        entropies: [N] float32, nats, by the trainer, of the distribution each token was drawn from.
        num_images: [N] int32, pictures before the token in its sample; one that is shown twice counts twice.
        image_distances: [N] int32, tokens from the last token of the nearest picture before it; 0 without one.
        turns: [N] int32, which sampled stretch of the conversation it lies in, from 1.
        names: of the samples.
        sample_of: [N] int32, index into `names`.
        positions: [N] int32, of the token in its sample.
    """

    inference_logprobs: np.ndarray
    trainer_logprobs: np.ndarray
    entropies: np.ndarray
    num_images: np.ndarray
    image_distances: np.ndarray
    turns: np.ndarray
    names: tuple[str, ...]
    sample_of: np.ndarray
    positions: np.ndarray

    @property
    def num_tokens(self) -> int:
        """How many tokens are compared, N."""
        return len(self.positions)

    def log_ratios(self) -> np.ndarray:
        """Return [N] float64, nats: trainer minus inference."""
        return self.trainer_logprobs.astype(np.float64) - self.inference_logprobs.astype(np.float64)

    def mismatch_kls(self) -> np.ndarray:
        """Return [N] float64, nats: `ratio - log_ratio - 1`."""
        log_ratio = self.log_ratios()
        # An overflow and its consequences are results: they count as disagreement.
        with np.errstate(over="ignore", invalid="ignore"):
            return np.expm1(log_ratio) - log_ratio


class Agreement(msgspec.Struct, frozen=True):
    """How well server and trainer agree on some tokens; None everywhere if there are none.

    Attributes:
        num_tokens: how many were compared.
        mismatch_kl_mean, mismatch_kl_max: nats.
        abs_log_ratio_mean: mean of |trainer - inference|, nats.
    """

    num_tokens: int
    mismatch_kl_mean: float | None
    mismatch_kl_max: float | None
    abs_log_ratio_mean: float | None


class Category(msgspec.Struct, frozen=True):
    """A row of a table: tokens that have something in common."""

    name: str
    agreement: Agreement


class WorstToken(msgspec.Struct, frozen=True):
    """The token on which server and trainer differ most.

    Attributes:
        sample: `trace/branch`, as in `traces/` of the run folder.
        position: in the sample, from 0, pictures expanded.
        turn, num_images, image_distance: as in `TokenRecords`.
        inference_logprob, trainer_logprob: nats.
        mismatch_kl: nats.
    """

    sample: str
    position: int
    turn: int
    num_images: int
    image_distance: int
    inference_logprob: float
    trainer_logprob: float
    mismatch_kl: float


class StepAgreement(msgspec.Struct, frozen=True):
    """One step, measured before it was taken.

    Attributes:
        step: from 0; the weights version that both sides held.
        agreement: over its trained tokens.
        num_rollouts, num_failed: played, and how many of those failed.
        num_pictures: shown in the compared samples; one shown twice counts twice.
        reward_mean: of the rollouts that succeeded.
        entropy_mean: of the distributions the tokens were drawn from, nats: near its maximum, the logarithm of the
            vocabulary, any two models agree.
        mismatch_kl_mean_before: the same tokens, against the trainer's weights one version before; None in the first
            step. It is near 0 if the server did not take the last update, and `mismatch_kl_mean` is not.
        worst: the token that differs most.
    """

    step: int
    agreement: Agreement
    num_rollouts: int
    num_failed: int
    num_pictures: int
    reward_mean: float
    entropy_mean: float
    mismatch_kl_mean_before: float | None
    worst: WorstToken


class Tables(msgspec.Struct, frozen=True):
    """The tokens of all steps, split in three ways.

    Attributes:
        by_images: by the number of pictures before a token.
        by_distance: by the distance to the nearest of them.
        by_turn: by the turn it was sampled in.
    """

    by_images: tuple[Category, ...]
    by_distance: tuple[Category, ...]
    by_turn: tuple[Category, ...]


def turn_numbers(sampled_mask: np.ndarray) -> np.ndarray:
    """Number the stretches of sampled tokens of a branch.

    Args:
        sampled_mask: [T] bool, of the whole branch: what another branch trains is a turn, too.
    Returns:
        [T] int32: 1 in the first stretch, 2 in the second; 0 where nothing was sampled.
    """
    begins = np.diff(sampled_mask.astype(np.int8), prepend=np.int8(0)) == 1
    return np.where(sampled_mask, np.cumsum(begins), 0).astype(np.int32)


def token_records(
    micro_batch: MicroBatch, trainer_logprobs: np.ndarray, entropies: np.ndarray, turns: Mapping[str, np.ndarray]
) -> TokenRecords:
    """Describe the trained tokens of a micro batch.

    Args:
        micro_batch: S samples with N trained tokens; its `trace_ids` name each sample, no two alike.
        trainer_logprobs, entropies: [N] float32, nats, in the order of the tokens.
        turns: name -> [T or more] int32, from `turn_numbers`; a sample that was cut has fewer tokens than its branch.
    """
    trained = np.flatnonzero(micro_batch.loss_mask)
    starts = micro_batch.sample_starts
    sample_of = np.repeat(np.arange(micro_batch.num_samples), micro_batch.sample_lengths)[trained]
    positions = trained - starts[sample_of]
    # Index of the last token of every slot; slots lie in the order of the tokens.
    ends = np.asarray([ref.offset + ref.length - 1 for ref in micro_batch.mm_refs.refs], dtype=np.int64)
    before_token = np.searchsorted(ends, trained)
    num_images = before_token - np.searchsorted(ends, starts[sample_of])
    nearest = np.append(ends, 0)[before_token - 1]
    return TokenRecords(
        inference_logprobs=micro_batch.inference_logprobs[trained],
        trainer_logprobs=trainer_logprobs,
        entropies=entropies,
        num_images=num_images.astype(np.int32),
        image_distances=np.where(num_images > 0, trained - nearest, 0).astype(np.int32),
        turns=np.asarray(
            [
                turns[micro_batch.trace_ids[sample]][position]
                for sample, position in zip(sample_of, positions, strict=True)
            ],
            dtype=np.int32,
        ),
        names=micro_batch.trace_ids,
        sample_of=sample_of.astype(np.int32),
        positions=positions.astype(np.int32),
    )


def join_records(parts: Sequence[TokenRecords]) -> TokenRecords:
    """Lay records end to end.

    Args:
        parts: at least one.
    """
    starts = np.cumsum([0, *(len(part.names) for part in parts)])
    columns = {
        name: np.concatenate([getattr(part, name) for part in parts])
        for name in TokenRecords.__struct_fields__
        if name not in ("names", "sample_of")
    }
    return TokenRecords(
        **columns,
        names=tuple(name for part in parts for name in part.names),
        sample_of=np.concatenate([part.sample_of + start for part, start in zip(parts, starts, strict=False)]),
    )


def agreement_of(records: TokenRecords, where: np.ndarray | None = None) -> Agreement:
    """Boil tokens down; NaN among them makes every number NaN.

    Args:
        records: N tokens.
        where: [N] bool, which of them; None is all.
    """
    kls, log_ratios = records.mismatch_kls(), records.log_ratios()
    if where is not None:
        kls, log_ratios = kls[where], log_ratios[where]
    if not len(kls):
        return Agreement(num_tokens=0, mismatch_kl_mean=None, mismatch_kl_max=None, abs_log_ratio_mean=None)
    return Agreement(
        num_tokens=len(kls),
        mismatch_kl_mean=float(kls.mean()),
        mismatch_kl_max=float(kls.max()),
        abs_log_ratio_mean=float(np.abs(log_ratios).mean()),
    )


def worst_token(records: TokenRecords) -> WorstToken:
    """Return the token with the largest mismatch KL; one that is NaN comes first.

    Args:
        records: of at least one token.
    """
    kls = records.mismatch_kls()
    at = int(np.argmax(np.where(np.isnan(kls), np.inf, kls)))
    return WorstToken(
        sample=records.names[records.sample_of[at]],
        position=int(records.positions[at]),
        turn=int(records.turns[at]),
        num_images=int(records.num_images[at]),
        image_distance=int(records.image_distances[at]),
        inference_logprob=float(records.inference_logprobs[at]),
        trainer_logprob=float(records.trainer_logprobs[at]),
        mismatch_kl=float(kls[at]),
    )


def tables_of(records: TokenRecords) -> Tables:
    """Split tokens by pictures, by distance and by turn; every token is in exactly one row of each table."""
    images, distances, turns = records.num_images, records.image_distances, records.turns
    by_images = {"none": images == 0, "one": images == 1, "several": images > 1}
    by_distance = {"no picture": images == 0}
    first = 1
    for last in _DISTANCE_BINS:
        by_distance[f"{first} to {last}"] = (images > 0) & (first <= distances) & (distances <= last)
        first = last + 1
    by_distance[f"{first} or more"] = distances >= first
    by_turn = {str(turn): turns == turn for turn in range(1, int(turns.max(initial=0)) + 1)}
    return Tables(
        *(
            tuple(Category(name, agreement_of(records, where)) for name, where in table.items())
            for table in (by_images, by_distance, by_turn)
        )
    )


def is_below(value: float | None, limit: float) -> bool:
    """Say whether a number is below the limit: NaN, None and the limit itself are not."""
    return value is not None and value < limit


def failed_steps(steps: Sequence[StepAgreement], *, max_kl: float) -> list[StepAgreement]:
    """Return the steps whose mean mismatch KL is not below `max_kl`, nats."""
    return [step for step in steps if not is_below(step.agreement.mismatch_kl_mean, max_kl)]


def is_passed(steps: Sequence[StepAgreement], *, max_kl: float) -> bool:
    """Say whether every step is below `max_kl`, and the weights of every update arrived as a whole."""
    return not (failed_steps(steps, max_kl=max_kl) or stale_steps(steps) or is_partly_updated(steps))


def num_updates_shown(steps: Sequence[StepAgreement]) -> int:
    """Count the steps in which the server clearly serves the newest version, and not the one before.

    Where none shows, agreement says nothing about updates: the weights hardly moved, or as little as both sides differ.

    Returns:
        At most one less than there are steps: the first has no version before.
    """
    noise = _noise_of(steps)
    return sum(_explains(step.agreement.mismatch_kl_mean, step.mismatch_kl_mean_before, noise) for step in steps)


def stale_steps(steps: Sequence[StepAgreement]) -> list[int]:
    """Return the steps in which the server clearly serves the version before the newest."""
    noise = _noise_of(steps)
    return [
        step.step for step in steps if _explains(step.mismatch_kl_mean_before, step.agreement.mismatch_kl_mean, noise)
    ]


def is_partly_updated(steps: Sequence[StepAgreement]) -> bool:
    """Say whether every step after an update is so much worse than the first that no rounding explains it."""
    if len(steps) < 2:
        return False
    first, *later = (step.agreement.mismatch_kl_mean or 0.0 for step in steps)
    return min(later) > max(_ROUNDING, _GREW * first)


def _noise_of(steps: Sequence[StepAgreement]) -> float:
    """Return what rounding does: the mean KL of the first step, which no update came before, nats."""
    first = steps[0].agreement.mismatch_kl_mean if steps else None
    return first if first is not None and np.isfinite(first) else 0.0


def _explains(kl: float | None, other_kl: float | None, noise: float) -> bool:
    """Say whether a version with mean KL `kl` explains the server's logprobs clearly better than another."""
    if kl is None or other_kl is None:
        return False
    return kl < _CLEARLY_LESS * other_kl and other_kl > max(_LEAST_SHOWN, _BEYOND_NOISE * noise)


def verdict(steps: Sequence[StepAgreement], tables: Tables, *, max_kl: float) -> str:
    """Say in a sentence or two whether server and trainer agree, and if not, where and what to look at.

    Args:
        steps: at least one.
        tables: of their tokens.
        max_kl: nats; a step's mean mismatch KL must be below it.
    """
    failed = failed_steps(steps, max_kl=max_kl)
    stale = stale_steps(steps)
    if stale and not failed:
        return (
            f"Server and trainer disagree: in step {_listed(stale)} the server's logprobs are those of the weights one "
            f"version before, although all steps are below {max_kl:g} (parity.max_kl): the update did nothing. "
            f"{_LOOK_AT_UPDATES.capitalize()}."
        )
    if is_partly_updated(steps) and not failed:
        first, *later = (step.agreement.mismatch_kl_mean or 0.0 for step in steps)
        return (
            f"Server and trainer disagree: with the updates the KL grew from {first:.1e} to {min(later):.1e} and more, "
            f"although all steps are below {max_kl:g} (parity.max_kl): they arrive in part. "
            f"{_LOOK_AT_UPDATES.capitalize()}."
        )
    if not failed:
        largest = max(step.agreement.mismatch_kl_mean or 0.0 for step in steps)
        return (
            f"Server and trainer agree: the largest mean mismatch KL of a step is {largest:.1e}, below {max_kl:g} "
            f"(parity.max_kl) in all {len(steps)} steps.{_doubts(steps)}"
        )
    named = ", ".join(f"{step.step} ({step.agreement.mismatch_kl_mean:.3g})" for step in failed[:5])
    more = f" and {len(failed) - 5} more" if len(failed) > 5 else ""
    return (
        f"Server and trainer disagree: {len(failed)} of {len(steps)} steps have a mean mismatch KL that is not below "
        f"{max_kl:g} (parity.max_kl): step {named}{more}. {_what_to_look_at(steps, failed, tables, max_kl)}"
    )


def _doubts(steps: Sequence[StepAgreement]) -> str:
    """Say, with a space in front, if steps that all pass do not show that updates reach the server; else nothing."""
    if len(steps) < 2 or num_updates_shown(steps):
        return ""
    return (
        " But it does not show that updates arrive: the version before explains the logprobs nearly as well. Take "
        "larger steps (trainer.optim.lr)."
    )


def _listed(steps: Sequence[int]) -> str:
    return ", ".join(map(str, steps[:5])) + (f" and {len(steps) - 5} more" if len(steps) > 5 else "")


def _what_to_look_at(
    steps: Sequence[StepAgreement], failed: Sequence[StepAgreement], tables: Tables, max_kl: float
) -> str:
    if not all(np.isfinite(step.agreement.mismatch_kl_mean or 0.0) for step in failed):
        return (
            "Numbers that are not finite come from the trainer's logprobs, or from a token that it gives no "
            "probability at all: compare the ids that are banned on both sides."
        )
    # Of all steps: the first one, which tells what rounding does, may have passed.
    stale = sorted(set(stale_steps(steps)) & {step.step for step in failed})
    if stale:
        return (
            f"In step {_listed(stale)} the server's logprobs are those of the weights one version before: the update "
            f"did nothing. {_LOOK_AT_UPDATES.capitalize()}."
        )
    if failed[0].step != steps[0].step:
        return f"Step {steps[0].step}, at the weights as they were loaded, is below it: {_LOOK_AT_UPDATES}."
    text, *pictures = (category.agreement for category in tables.by_images)
    seen = [one for one in pictures if one.num_tokens]
    if is_below(text.mismatch_kl_mean, max_kl) and not all(is_below(one.mismatch_kl_mean, max_kl) for one in seen):
        return (
            "Tokens without a picture before them are below it: look at the pictures, `latepix doctor` compares what "
            "both sides make of them."
        )
    return (
        "It begins with the weights as they were loaded: look at model folder, dtype, temperature and, for vLLM, "
        "--logprobs-mode processed_logprobs; `latepix doctor` compares the pictures."
    )
