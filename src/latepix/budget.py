"""`latepix budget`: what an environment's pictures and turns take of the model's length and of a request.

In: the config of a run. Training tasks are played against `DryPolicy`, which has no server: it renders and expands the
prompts as a run does, and says the task's answer. Out: a `Budget`, printed as a table and as one JSON object. Every
answer counts in full, `sampling.max_tokens`: a policy that talks as long as it may is the worst case.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
import statistics
from collections import Counter
from collections.abc import Iterable, Sequence

import msgspec
import numpy as np
from rich.console import Console
from rich.table import Table
from rich.text import Text

from latepix.config.schema import BudgetConfig, RunConfig
from latepix.environments.base import Environment, load_environment
from latepix.errors import ConfigError, LatepixError
from latepix.families.model_info import ModelInfo, read_model_info
from latepix.inference.contract import MAX_BODY_BYTES
from latepix.inference.render import MessageRenderer
from latepix.orchestrator.dry import DryRollout, DryTurn, MeasuringDoor, Resize, max_model_len_of, play_dry
from latepix.report.numbers import format_bytes, format_value

#: A warning is due when the pictures of a rollout take more than this share of `orchestrator.seq_len`.
MAX_IMAGE_FRAC = 0.9
#: A warning is due when a picture's sides are changed by more than this factor on the way in.
MAX_RESIZE = 2.0


class Spread(msgspec.Struct, frozen=True):
    """Smallest, middle and largest of some numbers."""

    min: float
    median: float
    max: float

    @classmethod
    def of(cls, values: Iterable[float]) -> Spread | None:
        """Boil numbers down; None if there are none."""
        ordered = sorted(values)
        return cls(ordered[0], statistics.median(ordered), ordered[-1]) if ordered else None


class Budget(msgspec.Struct, frozen=True):
    """What was found; the JSON object that `latepix budget` ends with has these keys.

    A spread is `{"min", "median", "max"}` over the rollouts that could be measured, null if there is none.

    Attributes:
        environment, model: name, and model folder.
        num_tasks: training tasks that were played.
        failed: reason code -> number of tasks that failed.
        turns: spread of the turns of a rollout.
        images: spread of the pictures in a rollout's longest conversation; a picture shown twice counts twice.
        image_tokens: spread over all those pictures of the tokens that one takes.
        first_prompt_tokens, last_prompt_tokens: spread of the tokens of the first and the last prompt, expanded.
        rollout_tokens: spread of the tokens of the longest conversation, its last answer included.
        image_frac: spread of the share of them that pictures take.
        seq_len: `orchestrator.seq_len`.
        max_model_len: `inference.max_model_len`, or the model's own limit if that is lower.
        seq_len_frac: spread of `rollout_tokens` over `seq_len`.
        turns_that_fit: spread of the turns that fit into both limits, going on growing as the turns that were played;
            null where rollouts have a single turn or do not grow.
        max_request_bytes: the largest request.
        max_body_bytes: the largest that the server takes.
        wire_bytes_per_sample: mean bytes of a training sample on its way to the trainer; its share of the pictures of
            its group is in it. Null if no sample has a trained token within `seq_len`.
        warnings: what should be changed, in words.
    """

    environment: str
    model: str
    num_tasks: int
    failed: dict[str, int]
    turns: Spread | None
    images: Spread | None
    image_tokens: Spread | None
    first_prompt_tokens: Spread | None
    last_prompt_tokens: Spread | None
    rollout_tokens: Spread | None
    image_frac: Spread | None
    seq_len: int
    max_model_len: int
    seq_len_frac: Spread | None
    turns_that_fit: Spread | None
    max_request_bytes: int
    max_body_bytes: int
    wire_bytes_per_sample: float | None
    warnings: tuple[str, ...]


def measure_budget(config: RunConfig, *, num_tasks: int, time_limit_s: float | None = None) -> Budget:
    """Play training tasks without a server and sum up what they take.

    Args:
        config: of the run; its model and its environment are checked on the way.
        num_tasks: most tasks that are played, drawn at random with the run's seed.
        time_limit_s: no further task is begun after so many seconds, and one that waits for something is given up.
    Raises:
        ConfigError: a setting, the model folder or the environment is wrong.
    """
    info = read_model_info(config.model.path)
    door = MeasuringDoor(config.images, info)
    environment = load_environment(config.environment, door)
    rng = np.random.default_rng([config.seed, 3])
    available = _num_tasks(environment)
    indices = [int(index) for index in rng.choice(available, size=min(num_tasks, available), replace=False)]
    rollouts = asyncio.run(_play_tasks(environment, MessageRenderer(info), config, indices, time_limit_s))
    return sum_up(rollouts, door.resizes, config, info, environment=environment.name)


def _num_tasks(environment: Environment) -> int:
    try:
        number = int(environment.num_tasks("train"))
    except LatepixError:
        raise
    except Exception as error:
        # The user's own code, like the constructor in `load_environment`.
        raise ConfigError(
            f"environment.type: {environment.name}.num_tasks raised {type(error).__name__}: {error}."
        ) from error
    if number < 1:
        raise ConfigError(f"environment.type: {environment.name} has {number} tasks in split train, wanted at least 1.")
    return number


async def _play_tasks(
    environment: Environment,
    renderer: MessageRenderer,
    config: RunConfig,
    indices: Sequence[int],
    time_limit_s: float | None,
) -> list[DryRollout]:
    rollouts = []
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(time_limit_s):
            for index in indices:
                rollouts.append(await play_dry(environment, renderer, config, index))
                await asyncio.sleep(0)
    return rollouts


def sum_up(
    rollouts: Sequence[DryRollout], resizes: Sequence[Resize], config: RunConfig, info: ModelInfo, *, environment: str
) -> Budget:
    """Boil the rollouts that were played down to one budget. Pure."""
    measured = [rollout for rollout in rollouts if rollout.turns]
    answer_tokens = config.sampling.max_tokens
    seq_len, max_model_len = config.orchestrator.seq_len, max_model_len_of(config, info)
    lengths = [rollout.longest.prompt_tokens + answer_tokens for rollout in measured]
    fitting = [
        turns_that_fit(rollout.turns, answer_tokens=answer_tokens, limit=min(seq_len, max_model_len))
        for rollout in measured
    ]
    wire_bytes = [rollout.wire_bytes for rollout in rollouts if rollout.wire_bytes is not None]
    budget = Budget(
        environment=environment,
        model=str(config.model.path),
        num_tasks=len(rollouts),
        failed=dict(Counter(rollout.failure.reason for rollout in rollouts if rollout.failure).most_common()),
        turns=Spread.of(len(rollout.turns) for rollout in measured),
        images=Spread.of(len(rollout.longest.image_tokens) for rollout in measured),
        image_tokens=Spread.of(tokens for rollout in measured for tokens in rollout.longest.image_tokens),
        first_prompt_tokens=Spread.of(rollout.turns[0].prompt_tokens for rollout in measured),
        last_prompt_tokens=Spread.of(rollout.turns[-1].prompt_tokens for rollout in measured),
        rollout_tokens=Spread.of(lengths),
        image_frac=Spread.of(
            sum(rollout.longest.image_tokens) / length for rollout, length in zip(measured, lengths, strict=True)
        ),
        seq_len=seq_len,
        max_model_len=max_model_len,
        seq_len_frac=Spread.of(length / seq_len for length in lengths),
        turns_that_fit=Spread.of(turns for turns in fitting if turns is not None),
        max_request_bytes=max((turn.request_bytes for rollout in measured for turn in rollout.turns), default=0),
        max_body_bytes=MAX_BODY_BYTES,
        wire_bytes_per_sample=statistics.fmean(wire_bytes) if wire_bytes else None,
        warnings=(),
    )
    return msgspec.structs.replace(budget, warnings=tuple(_warnings(budget, rollouts, lengths, resizes)))


def turns_that_fit(turns: Sequence[DryTurn], *, answer_tokens: int, limit: int) -> int | None:
    """Return how many turns fit, answers included, if the conversation goes on growing as it did.

    Worked example: prompts of 30, 50 and 70 tokens grow by 20 a turn; with answers of 4 and a limit of 100, the fourth
    turn (90 + 4) is the last that fits.

    Returns:
        The number of turns; None for a single turn, or for a conversation that does not grow.
    """
    if len(turns) < 2:
        return None
    first = turns[0].prompt_tokens
    growth = (turns[-1].prompt_tokens - first) / (len(turns) - 1)
    if growth <= 0:
        return None
    return max(0, 1 + math.floor((limit - answer_tokens - first) / growth))


def _warnings(
    budget: Budget, rollouts: Sequence[DryRollout], lengths: Sequence[int], resizes: Sequence[Resize]
) -> list[str]:
    of_all = f"of {budget.num_tasks} rollouts"
    warnings = []
    if failures := [rollout.failure for rollout in rollouts if rollout.failure]:
        reasons = ", ".join(f"{reason} {count}" for reason, count in budget.failed.items())
        warnings.append(f"{len(failures)} {of_all} failed ({reasons}), for example: {failures[0].message}")
    longest = f"the longest needs {max(lengths, default=0):,} tokens"
    if num_long := sum(length > budget.seq_len for length in lengths):
        warnings.append(
            f"{num_long} {of_all} may exceed orchestrator.seq_len ({budget.seq_len:,}); {longest}. What lies behind is "
            "not trained: raise it, or show fewer or smaller pictures."
        )
    if num_long := sum(length > budget.max_model_len for length in lengths):
        warnings.append(
            f"{num_long} {of_all} may exceed inference.max_model_len ({budget.max_model_len:,}, or the model's own "
            f"limit); {longest}. Answers behind it are cut or empty: raise it, or show fewer or smaller pictures."
        )
    image_tokens = [sum(rollout.longest.image_tokens) for rollout in rollouts if rollout.turns]
    if num_full := sum(tokens > MAX_IMAGE_FRAC * budget.seq_len for tokens in image_tokens):
        warnings.append(
            f"In {num_full} {of_all} the pictures take more than {MAX_IMAGE_FRAC:.0%} of orchestrator.seq_len (up to "
            f"{max(image_tokens):,} of {budget.seq_len:,} tokens): raise it, or show fewer or smaller pictures."
        )
    if strong := [resize for resize in resizes if resize.factor > MAX_RESIZE]:
        worst = max(strong, key=lambda resize: resize.factor)
        warnings.append(
            f"images.fit resizes {len(strong)} of {len(resizes)} pictures looked at by more than a factor of "
            f"{MAX_RESIZE:g}, {_size(worst.source)} to {_size(worst.fitted)} pixels at worst: check that the policy "
            "can still see what matters, or make pictures of a size that the model takes."
        )
    if budget.max_request_bytes > budget.max_body_bytes:
        warnings.append(
            f"The largest request has {format_bytes(budget.max_request_bytes)}, the server takes "
            f"{format_bytes(budget.max_body_bytes)}: show fewer or smaller pictures."
        )
    return warnings


def _size(size: tuple[int, int]) -> str:
    return f"{size[0]} x {size[1]}"


def run_budget(config: BudgetConfig) -> None:
    """Measure, and print a table, the warnings, and one JSON object as the last line."""
    budget = measure_budget(config, num_tasks=config.num_tasks)
    print_budget(budget)
    print(msgspec.json.encode(budget).decode())


def print_budget(budget: Budget, console: Console | None = None) -> None:
    """Print a budget and its warnings; `console` None is standard output."""
    console = console or Console(highlight=False, soft_wrap=True)
    table = Table(box=None, padding=(0, 2, 0, 0), pad_edge=False, header_style="dim")
    table.add_column(Text(f"{budget.environment}, {budget.num_tasks} tasks"), style="dim")
    for title in ("min", "median", "max"):
        table.add_column(title, justify="right")
    rows: list[tuple[str, Spread | None, bool]] = [
        ("turns", budget.turns, False),
        ("pictures per rollout", budget.images, False),
        ("tokens per picture", budget.image_tokens, False),
        ("prompt tokens, first turn", budget.first_prompt_tokens, False),
        ("prompt tokens, last turn", budget.last_prompt_tokens, False),
        ("tokens of a rollout", budget.rollout_tokens, False),
        ("pictures' share of them", budget.image_frac, True),
        (f"share of seq_len ({budget.seq_len:,})", budget.seq_len_frac, True),
        ("turns that fit", budget.turns_that_fit, False),
    ]
    for label, spread, is_frac in rows:
        table.add_row(label, *_cells(spread, is_frac=is_frac))
    console.print(table)
    if budget.turns is not None and budget.turns_that_fit is None:
        console.print(f"turns: {_no_turns(budget.turns)}")
    console.print(_request_line(budget))
    for warning in budget.warnings:
        console.print(f"warning: {warning}", style="yellow", markup=False)


def print_briefly(budget: Budget) -> None:
    """Print a budget in three lines, then its warnings: what `latepix rl` begins with."""
    for line in brief_lines(budget):
        print(f"budget: {line}", flush=True)
    for warning in budget.warnings:
        print(f"warning: {warning}", flush=True)


def brief_lines(budget: Budget) -> list[str]:
    """Return a budget in three lines; one, if nothing could be measured."""
    if budget.turns is None or budget.seq_len_frac is None:
        num_failed = sum(budget.failed.values())
        return [f"nothing could be measured: {budget.num_tasks} tasks were played, {num_failed} of them failed"]
    fitting = f"{_brief(budget.turns_that_fit)} turns fit" if budget.turns_that_fit else _no_turns(budget.turns)
    return [
        f"pictures: {_brief(budget.images)} a rollout, tokens each: {_brief(budget.image_tokens)}, "
        f"{_brief(budget.image_frac, is_frac=True)} of a rollout's tokens ({budget.num_tasks} tasks looked at)",
        f"tokens: first prompt {_brief(budget.first_prompt_tokens)}, last {_brief(budget.last_prompt_tokens)}; a "
        f"rollout takes {_brief(budget.seq_len_frac, is_frac=True)} of seq_len {budget.seq_len:,} (median "
        f"{format_value(budget.seq_len_frac.median, 'frac')}); {fitting}",
        _request_line(budget),
    ]


def _request_line(budget: Budget) -> str:
    return (
        f"bytes: largest request {format_bytes(budget.max_request_bytes)} of {format_bytes(budget.max_body_bytes)}; "
        f"per sample to the trainer, about {format_value(budget.wire_bytes_per_sample, 'B')}"
    )


def _no_turns(turns: Spread) -> str:
    return "single turn" if turns.max == 1 else "the conversations do not grow"


def _cells(spread: Spread | None, *, is_frac: bool) -> list[str]:
    values = (None, None, None) if spread is None else (spread.min, spread.median, spread.max)
    return [format_value(value, "frac" if is_frac else "") for value in values]


def _brief(spread: Spread | None, *, is_frac: bool = False) -> str:
    """Write a spread as `64`, `1-6` or `3-5 %`."""
    if spread is None:
        return "none"
    low, _, high = _cells(spread, is_frac=is_frac)
    return low if low == high else f"{low.removesuffix(' %')}-{high}"
