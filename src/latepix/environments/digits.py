"""Real handwriting: the 1,797 digits of 8 x 8 pixels that scikit-learn ships (13 writers, UCI optdigits).

`digits` shows one digit and asks which it is. `digit-sum` shows two and asks for their sum. The splits are by
picture and fixed: 1,197 to train, 240 to validate (tuning looks only at these), 360 to test.
"""

from __future__ import annotations

import numpy as np
from PIL import Image

from latepix.config.schema import EnvironmentConfig
from latepix.environments.base import Environment, Ingest, Score, Split, Task, exact_match
from latepix.errors import ConfigError
from latepix.trace.ingress import InlineImage
from latepix.trace.messages import Message, user_message

_SPLIT_SEED = 20261201
_SPLIT_SIZES: dict[Split, int] = {"test": 360, "validation": 240, "train": 1197}
#: Tasks that digit-sum draws per split; each is a pair of pictures of that split.
_NUM_PAIRS: dict[Split, int] = {"train": 4096, "validation": 256, "test": 512}


class Digits(Environment):
    """Which digit is this? Reward 1 for the right digit and nothing else."""

    name = "digits"

    def __init__(self, config: EnvironmentConfig, ingest: Ingest) -> None:
        super().__init__(config, ingest)
        self._pixels, self._labels, self._splits = _load()
        self._pictures: dict[int, InlineImage] = {}

    def num_tasks(self, split: Split) -> int:
        """Return the number of pictures in the split."""
        return len(self._splits[split])

    def task(self, split: Split, index: int) -> Task:
        """Return the question about one picture."""
        picture = int(self._splits[split][index])
        return Task(
            id=f"{split}-{picture}",
            messages=(user_message(self._picture(picture), "which digit?"),),
            answer=str(self._labels[picture]),
        )

    def score(self, task: Task, answer: Message) -> Score:
        """Reward the exact digit."""
        return exact_match(task, answer)

    def demonstration(self, task: Task, rng: np.random.Generator) -> str:
        """Return the digit, or a random one for a share of `demonstration_noise`."""
        is_noise = rng.random() < self.config.demonstration_noise
        return str(rng.integers(0, 10)) if is_noise else task.answer

    def demonstration_indices(self) -> list[int]:
        """Return training tasks that hold every digit equally often."""
        limit = self.config.num_demonstrations or self.num_tasks("train")
        by_digit: list[list[int]] = [[] for _ in range(10)]
        for index, picture in enumerate(self._splits["train"]):
            by_digit[int(self._labels[picture])].append(index)
        rounds = max(len(indices) for indices in by_digit)
        order = [indices[turn] for turn in range(rounds) for indices in by_digit if turn < len(indices)]
        return order[:limit]

    def _picture(self, index: int) -> InlineImage:
        """Enlarge one 8 x 8 picture; nearest neighbour keeps the strokes."""
        if index not in self._pictures:
            side = self.config.picture_px
            if self.config.blank_pictures:
                picture = Image.new("RGB", (side, side), (128, 128, 128))
            else:
                grey = np.round(self._pixels[index] * (255 / 16)).astype(np.uint8)
                picture = Image.fromarray(grey).resize((side, side), Image.Resampling.NEAREST).convert("RGB")
            self._pictures[index] = self.ingest(picture)
        return self._pictures[index]


class DigitSum(Digits):
    """What is the sum of two digits? Two pictures, an answer from 0 to 18."""

    name = "digit-sum"

    def num_tasks(self, split: Split) -> int:
        """Return the number of pairs in the split."""
        return _NUM_PAIRS[split]

    def task(self, split: Split, index: int) -> Task:
        """Return the question about one pair of pictures."""
        rng = np.random.default_rng([_SPLIT_SEED, _SPLIT_SIZES[split], index])
        first, second = (int(picture) for picture in rng.choice(self._splits[split], size=2))
        return Task(
            id=f"{split}-{first}+{second}",
            messages=(user_message(self._picture(first), self._picture(second), "sum of two digits?"),),
            answer=str(self._labels[first] + self._labels[second]),
        )

    def demonstration(self, task: Task, rng: np.random.Generator) -> str:
        """Return the sum, or a random one for a share of `demonstration_noise`."""
        is_noise = rng.random() < self.config.demonstration_noise
        return str(rng.integers(0, 19)) if is_noise else task.answer

    def demonstration_indices(self) -> list[int]:
        """Return the first pairs of the training split."""
        return list(range(min(self.config.num_demonstrations or self.num_tasks("train"), self.num_tasks("train"))))


def _load() -> tuple[np.ndarray, np.ndarray, dict[Split, np.ndarray]]:
    """Return pixels [N, 8, 8] in 0..16, labels [N], and picture indices by split."""
    try:
        from sklearn.datasets import load_digits
    except ImportError as error:
        raise ConfigError(
            "environment.type: the digits environments need scikit-learn: pip install 'latepix[demo]'."
        ) from error
    data = load_digits()
    order = np.random.default_rng(_SPLIT_SEED).permutation(len(data.target))
    splits: dict[Split, np.ndarray] = {}
    start = 0
    for split, size in _SPLIT_SIZES.items():
        splits[split] = order[start : start + size]
        start += size
    return data.images, data.target.astype(int), splits
