"""A code word, spelled by coloured squares over three turns: the smallest task with several turns and several pictures.

Every turn shows one or two squares, each a picture of its own; a square's colour stands for a letter (R, G, B, Y). The
policy answers each turn with the code word so far, and the last answer is the whole word::

    user  [red]           code word?      assistant  R
    user  [blue] [blue]   next?           assistant  RBB
    user  [green]         next?           assistant  RBBG

Two squares of one colour in one turn are the same picture shown twice: two slots, one stored picture.

The reward is half `exact` (1 for exactly the whole word, 0 otherwise) and half the mean over the turns of `turn_1` to
`turn_3` (the share of the letters so far that the answer has in their places): 1 only if every answer is right. With
the exact word alone, half to nearly all groups had equal rewards, and two runs of three collapsed
(examples/codeword/README.md). What a turn shows does not depend on the answers.

A word has three to five letters: at least one turn shows a single square. Of each shape (how many squares each turn
shows) at most 512 words are used, 2,368 in all. The splits are by word and fixed, and each has its own shades and
places of the squares: no held-out picture is ever trained on.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Sequence
from typing import cast

import numpy as np
from PIL import Image, ImageDraw

from latepix.config.schema import EnvironmentConfig
from latepix.environments.base import Environment, Ingest, Policy, Score, Split, Task, Turn, exact_match
from latepix.trace.ingress import InlineImage
from latepix.trace.messages import Message, user_message

_SPLIT_SEED = 20261202
_SPLIT_SIZES: dict[Split, int] = {"test": 400, "validation": 240, "train": 1728}
_WORDS_PER_SHAPE = 512
#: The tiny model learns to repeat and extend five letters in CPU minutes; of six it keeps getting one wrong.
_MAX_LETTERS = 5
#: Different pictures of one colour in each split.
_NUM_SHADES: dict[Split, int] = {"test": 24, "validation": 24, "train": 96}
_COLOURS = {"R": (190, 70, 70), "G": (70, 190, 70), "B": (70, 70, 190), "Y": (190, 190, 70)}
_BACKGROUND = (225, 225, 225)
#: A shade differs from its colour by at most this much in each channel, of 255: high and low stay apart.
_SHADE_SPREAD = 35
_NUM_TURNS = 3
#: What one turn can show.
_GROUPS = (*_COLOURS, *map("".join, itertools.product(_COLOURS, repeat=2)))


class Codeword(Environment):
    """Which word do the squares spell? Three turns of one or two squares; the answer accumulates."""

    name = "codeword"

    def __init__(self, config: EnvironmentConfig, ingest: Ingest) -> None:
        super().__init__(config, ingest)
        words = iter(_words())
        self._words = {split: list(itertools.islice(words, size)) for split, size in _SPLIT_SIZES.items()}
        self._pictures: dict[tuple[Split, str, int], InlineImage] = {}

    def num_tasks(self, split: Split) -> int:
        """Return the number of words in the split."""
        return len(self._words[split])

    def task(self, split: Split, index: int) -> Task:
        """Return the first turn of one word; the id spells what all turns show, `train-R-BB-G`."""
        word = self._words[split][index]
        return Task(id=f"{split}-{'-'.join(word)}", messages=(self._messages(split, word)[0],), answer="".join(word))

    def score(self, task: Task, answer: Message) -> Score:
        """Judge the last answer alone: the exact word."""
        return exact_match(task, answer)

    async def rollout(self, task: Task, policy: Policy) -> Score:
        """Show the squares turn by turn, whatever is answered, and judge every answer."""
        split, word = _parse(task)
        answers = [await policy.respond([message]) for message in self._messages(split, word)]
        turns = {
            f"turn_{number}": _share_in_place(answer.text.strip(), prefix)
            for number, (answer, prefix) in enumerate(zip(answers, itertools.accumulate(word), strict=True), start=1)
        }
        exact = self.score(task, answers[-1]).reward
        return Score(reward=(exact + sum(turns.values()) / len(turns)) / 2, parts={"exact": exact} | turns)

    def demonstration_turns(self, task: Task, rng: np.random.Generator) -> Sequence[Turn]:
        """Return the turns with their answers; a share of `demonstration_noise` of the squares is misread.

        A letter misread is drawn from all four, and the answers after it repeat it: they accumulate.
        """
        split, word = _parse(task)
        said = ["".join(self._read(letter, rng) for letter in group) for group in word]
        return [
            Turn(messages=(message,), answer=answer)
            for message, answer in zip(self._messages(split, word), itertools.accumulate(said), strict=True)
        ]

    def demonstration_indices(self) -> list[int]:
        """Return training tasks that hold every shape equally often, as long as there are words of it."""
        by_shape: dict[tuple[int, ...], list[int]] = {}
        for index, word in enumerate(self._words["train"]):
            by_shape.setdefault(_shape(word), []).append(index)
        rounds = itertools.zip_longest(*(by_shape[shape] for shape in sorted(by_shape)))
        order = [index for indices in rounds for index in indices if index is not None]
        return order[: self.config.num_demonstrations or len(order)]

    def _read(self, letter: str, rng: np.random.Generator) -> str:
        is_noise = rng.random() < self.config.demonstration_noise
        return list(_COLOURS)[rng.integers(len(_COLOURS))] if is_noise else letter

    def _messages(self, split: Split, word: Sequence[str]) -> list[Message]:
        """Return what each turn shows; the same word always has the same pictures."""
        rng = np.random.default_rng([_SPLIT_SEED, *(_GROUPS.index(group) for group in word)])
        messages = []
        for number, group in enumerate(word):
            # One shade per letter of a turn, so that a pair of one colour is one picture twice.
            shades = {letter: int(rng.integers(_NUM_SHADES[split])) for letter in dict.fromkeys(group)}
            squares = [self._picture(split, letter, shades[letter]) for letter in group]
            messages.append(user_message(*squares, "next?" if number else "code word?"))
        return messages

    def _picture(self, split: Split, letter: str, shade: int) -> InlineImage:
        key = (split, letter, shade)
        if key not in self._pictures:
            side = self.config.picture_px
            if self.config.blank_pictures:
                picture = Image.new("RGB", (side, side), (128, 128, 128))
            else:
                picture = _draw(side, _COLOURS[letter], np.random.default_rng([_SPLIT_SEED, *map(ord, f"{key}")]))
            self._pictures[key] = self.ingest(picture)
        return self._pictures[key]


def _words() -> list[tuple[str, ...]]:
    """Return the words that are used, in their fixed random order."""
    words = list(itertools.product(_GROUPS, repeat=_NUM_TURNS))
    kept: list[tuple[str, ...]] = []
    num_of_shape: Counter[tuple[int, ...]] = Counter()
    for number in np.random.default_rng(_SPLIT_SEED).permutation(len(words)):
        word = words[number]
        if len("".join(word)) <= _MAX_LETTERS and num_of_shape[_shape(word)] < _WORDS_PER_SHAPE:
            kept.append(word)
            num_of_shape[_shape(word)] += 1
    # The last of them are all of rare shapes.
    return [kept[number] for number in np.random.default_rng(_SPLIT_SEED).permutation(len(kept))]


def _shape(word: Sequence[str]) -> tuple[int, ...]:
    """Return how many squares each turn shows."""
    return tuple(len(group) for group in word)


def _draw(side: int, colour: tuple[int, int, int], rng: np.random.Generator) -> Image.Image:
    """Draw a square of about that colour, of half to all of the picture's side, somewhere in the picture."""
    shade = tuple(np.asarray(colour) + rng.integers(-_SHADE_SPREAD, _SHADE_SPREAD + 1, size=3))
    extent = int(rng.integers(side // 2, side + 1))
    left, top = (int(place) for place in rng.integers(0, side - extent + 1, size=2))
    picture = Image.new("RGB", (side, side), _BACKGROUND)
    ImageDraw.Draw(picture).rectangle((left, top, left + extent - 1, top + extent - 1), fill=shade)
    return picture


def _share_in_place(said: str, wanted: str) -> float:
    """Return the share of places that hold the right letter; a place that either lacks is wrong."""
    return sum(one == other for one, other in zip(said, wanted, strict=False)) / max(len(said), len(wanted))


def _parse(task: Task) -> tuple[Split, list[str]]:
    """Return the split and the groups that a task's id spells."""
    split, *word = task.id.split("-")
    return cast("Split", split), word
