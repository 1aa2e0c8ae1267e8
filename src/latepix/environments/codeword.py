"""A code word, spelled by coloured squares over three turns: the smallest task with several turns and several pictures.

Every turn shows one or two squares, each a picture of its own; a square's colour stands for a letter (R, G, B, Y). The
policy answers each turn with the code word so far, and the last answer is the whole word::

    user  [red]           code word?      assistant  R
    user  [blue] [blue]   next?           assistant  RBB
    user  [green]         next?           assistant  RBBG

Two squares of one colour in one turn are the same picture shown twice: two slots, one stored picture.

The reward is 1 for exactly the whole word and nothing else; whether each turn's answer was right, and the share of right
letters, are parts of the score for people. What a turn shows does not depend on the answers.

There are 20 things a turn can show (4 single squares, 16 pairs), so 8,000 words of three to six letters. The splits are
by word, and so are the shades and places of the squares: no picture of a held-out split is ever trained on.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import numpy as np
from PIL import Image, ImageDraw

from latepix.config.schema import EnvironmentConfig
from latepix.environments.base import Environment, Ingest, Policy, Score, Split, Task, Turn
from latepix.trace.ingress import InlineImage
from latepix.trace.messages import Message, user_message

_SPLIT_SEED = 20261202
_NUM_TURNS = 3
_COLOURS = {"R": (190, 70, 70), "G": (70, 170, 80), "B": (70, 90, 190), "Y": (190, 175, 70)}
_SHADE_SPREAD = 60
#: What one turn can show.
_GROUPS = (*_COLOURS, *map("".join, itertools.product(_COLOURS, repeat=2)))
_SPLIT_SIZES: dict[Split, int] = {"test": 480, "validation": 240, "train": 7280}
#: Different pictures of one colour.
_NUM_SHADES: dict[Split, int] = {"test": 24, "validation": 24, "train": 96}


class Codeword(Environment):
    """Which word do the squares spell? Three turns, each with one or two squares; the answer accumulates."""

    name = "codeword"

    def __init__(self, config: EnvironmentConfig, ingest: Ingest) -> None:
        super().__init__(config, ingest)
        order = np.random.default_rng(_SPLIT_SEED).permutation(len(_GROUPS) ** _NUM_TURNS)
        self._splits: dict[Split, np.ndarray] = {}
        start = 0
        for split, size in _SPLIT_SIZES.items():
            self._splits[split] = order[start : start + size]
            start += size
        self._pictures: dict[tuple[Split, str, int], InlineImage] = {}

    def num_tasks(self, split: Split) -> int:
        """Return the number of words in the split."""
        return len(self._splits[split])

    def task(self, split: Split, index: int) -> Task:
        """Return the opening of one word; its groups are in the task's name, `train-R-BB-G`."""
        groups = _groups_of(int(self._splits[split][index]))
        name = f"{split}-{'-'.join(groups)}"
        return Task(id=name, messages=self._messages(name)[0], answer="".join(groups))

    async def rollout(self, task: Task, policy: Policy) -> Score:
        """Show the squares turn by turn, whatever is answered, and judge all answers."""
        answers = [await policy.respond(messages) for messages in self._messages(task.id)]
        return score_answers(_prefixes(task), answers)

    def score(self, task: Task, answer: Message) -> Score:
        """Judge the last answer alone."""
        return score_answers([task.answer], [answer])

    def demonstration_turns(self, task: Task, rng: np.random.Generator) -> Sequence[Turn]:
        """Return the turns with their answers; a share of `demonstration_noise` of the squares is misread.

        A misread letter is drawn from all four and stays in the answers after it.
        """
        letters = list(_COLOURS)
        said = [
            str(rng.choice(letters)) if rng.random() < self.config.demonstration_noise else letter
            for letter in task.answer
        ]
        return [
            Turn(messages=messages, answer="".join(said[: len(prefix)]))
            for messages, prefix in zip(self._messages(task.id), _prefixes(task), strict=True)
        ]

    def _messages(self, name: str) -> list[tuple[Message, ...]]:
        """Return what each turn of a task shows."""
        split, *groups = _parse(name)
        rng = np.random.default_rng([_SPLIT_SEED, *(_GROUPS.index(group) for group in groups)])
        turns = []
        for number, group in enumerate(groups):
            # One shade per letter and turn: a pair of one colour is one picture twice.
            shades = {letter: int(rng.integers(_NUM_SHADES[split])) for letter in sorted(set(group))}
            pictures = [self._picture(split, letter, shades[letter]) for letter in group]
            turns.append((user_message(*pictures, "next?" if number else "code word?"),))
        return turns
