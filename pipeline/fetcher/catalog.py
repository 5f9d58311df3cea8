"""Every task there is: the stream that is trained on, and the held-out tasks that it is judged by.

Invariant: `task(ordinal)` is a pure function of (configuration, ordinal), and no item is in both splits.
"""

from __future__ import annotations

import string
import zlib
from dataclasses import dataclass
from typing import Literal

from pipeline.config.provenance import resolve_eval_sampling, resolve_sampling, resolve_stopping
from pipeline.config.schema import RunConfig
from pipeline.config.stages import Dataset
from pipeline.errors import ConfigError
from pipeline.fetcher.mixing import Epochs, Mix, shuffled
from pipeline.fetcher.sources import Item, load_items
from pipeline.records import Sampling, Stopping, Task

Messages = tuple[tuple[str, str], ...]
SplitName = Literal["train", "held_out"]


@dataclass(frozen=True, slots=True)
class Shelf:
    """One data set: its items in two splits, and what all its tasks have in common."""

    name: str
    settings: Dataset
    train: tuple[Item, ...]
    held_out: tuple[Item, ...]
    sampling: Sampling
    eval_sampling: Sampling
    stopping: Stopping

    def messages(self, item: Item) -> Messages:
        turn = ("user", self.settings.template.replace("{question}", item.question))
        return (("system", self.settings.system), turn) if self.settings.system is not None else (turn,)

    def split(self, split: SplitName) -> tuple[Item, ...]:
        return self.train if split == "train" else self.held_out


class Catalog:
    """Loads every data set of a configuration. Raises ConfigError for what is missing, empty, double or out of shape."""

    def __init__(self, config: RunConfig) -> None:
        self._config = config
        self.shelves = {name: _shelf(config, name) for name in config.datasets}
        self._streams = [shelf for shelf in self.shelves.values() if shelf.settings.train]
        limits = [len(s.train) * s.settings.epochs if s.settings.epochs else None for s in self._streams]
        self._mix = Mix([shelf.settings.weight for shelf in self._streams], limits)
        self._epochs = [Epochs(len(shelf.train), config.run.seed, shelf.name) for shelf in self._streams]
        self._messages: dict[str, Messages] = {}

    @property
    def limit(self) -> int | None:
        """Ordinals in all: `epochs` of every training split; None: no end."""
        return self._mix.total

    def task(self, ordinal: int) -> Task:
        """The training task at an ordinal. Raises IndexError past the end."""
        if ordinal < 0:
            raise IndexError(f"ordinal {ordinal} is below 0")
        stream, position = self._mix.at(ordinal)
        shelf = self._streams[stream]
        item = shelf.train[self._epochs[stream].item(position)]
        return self._task(shelf, item, ordinal, self._config.rollout.samples_per_task, shelf.sampling, train=True)

    def eval_tasks(self, items: int | None = None) -> list[Task]:
        """Held-out tasks, at most `items` (None: `eval.items`) a data set, round-robin over data sets; ordinals count from 0.

        The choice depends on the data set's own seed, so that runs of other seeds are judged by the same items.
        """
        settings = self._config.eval
        most = settings.items if items is None else items
        chosen = [(shelf, _chosen(shelf, shelf.held_out, most)) for shelf in self.shelves.values() if shelf.settings.evaluate]
        longest = max((len(items) for _, items in chosen), default=0)
        order = [(shelf, items[place]) for place in range(longest) for shelf, items in chosen if place < len(items)]
        return [
            self._task(shelf, item, ordinal, settings.n, shelf.eval_sampling, train=False)
            for ordinal, (shelf, item) in enumerate(order)
        ]

    def examples(self, dataset: str, split: SplitName, count: int) -> list[Task]:
        """At most `count` tasks of a split, in the order that evaluations use; their ordinals are only their places here."""
        shelf = self.shelves[dataset]
        items = _chosen(shelf, shelf.split(split), count)
        return [self._task(shelf, item, place, 1, shelf.eval_sampling, train=False) for place, item in enumerate(items)]

    def shots(self, dataset: str, count: int) -> Messages:
        """`count` solved training items as user and assistant turns. Raises ConfigError when there are not as many."""
        shelf = self.shelves[dataset]
        order = shuffled(len(shelf.train), shelf.settings.seed, dataset, "shots")
        solved = [item for item in (shelf.train[index] for index in order) if item.answer is not None][:count]
        if len(solved) < count:
            raise ConfigError(f"datasets.{dataset}: {count} shots are asked for, and {len(solved)} training items have an answer")
        return tuple(turn for item in solved for turn in (shelf.messages(item)[-1], ("assistant", item.answer or "")))

    def pairs(self, dataset: str, split: SplitName) -> list[tuple[Messages, str]]:
        """(messages, answer) of every item of a split that has an answer, in the source's order."""
        shelf = self.shelves[dataset]
        return [(shelf.messages(item), item.answer) for item in shelf.split(split) if item.answer is not None]

    def texts(self) -> list[tuple[Messages, str]]:
        """(messages, answer) of every item there is, held-out ones included: what a tokenizer must be able to say."""
        items = ((shelf, item) for shelf in self.shelves.values() for item in (*shelf.train, *shelf.held_out))
        texts = [(shelf.messages(item), item.answer or "") for shelf, item in items]
        if any(shelf.settings.source == "swe" for shelf in self.shelves.values()):  # commands and their output can be any text
            texts.append(((("user", string.printable),), ""))
        return texts

    def _task(self, shelf: Shelf, item: Item, ordinal: int, samples: int, sampling: Sampling, *, train: bool) -> Task:
        task_id = f"{shelf.name}/{item.item_id}"
        messages = self._messages.get(task_id)
        if messages is None:
            messages = self._messages[task_id] = shelf.messages(item)
        return Task(
            ordinal=ordinal,
            task_id=task_id,
            dataset=shelf.name,
            task_type=shelf.settings.task_type,
            messages=messages,
            answer=item.answer,
            verifier=item.verifier,
            samples=samples,
            sampling=sampling,
            stopping=shelf.stopping,
            seed=self._config.run.seed,
            needs=self._config.needs_of(shelf.name) if train else (),
            teacher=self._config.teacher_of(shelf.name),
            metadata=item.metadata,
        )


def is_held_out(dataset: Dataset, question: str) -> bool:
    """Decided by the question alone, so that one that is asked twice is on one side only."""
    return zlib.crc32(question.encode("utf-8")) % dataset.split.modulus in dataset.split.held_out


def _shelf(config: RunConfig, name: str) -> Shelf:
    settings = config.datasets[name]
    if "{question}" not in settings.template:
        raise ConfigError(f"datasets.{name}.template {settings.template!r} lacks {{question}}: the model would not see the task")
    items = load_items(name, settings)
    held_out = tuple(item for item in items if is_held_out(settings, item.question))
    train = tuple(item for item in items if not is_held_out(settings, item.question))
    rule = f"split.modulus {settings.split.modulus} and split.held_out {list(settings.split.held_out)}"
    if settings.train and not train:
        raise ConfigError(f"datasets.{name}: all of its {len(items)} items are held out by {rule}; none is left for training")
    if settings.evaluate and not held_out:
        raise ConfigError(
            f"datasets.{name}: none of its {len(items)} items is held out by {rule}; change them or set evaluate: false"
        )
    return Shelf(
        name,
        settings,
        train,
        held_out,
        resolve_sampling(config, name).value,
        resolve_eval_sampling(config, name).value,
        resolve_stopping(config, name).value,
    )


def _chosen(shelf: Shelf, items: tuple[Item, ...], count: int) -> list[Item]:
    order = shuffled(len(items), shelf.settings.seed, shelf.name, "eval")
    return [items[index] for index in order[:count]]
