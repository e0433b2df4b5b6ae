"""Text that is tokenized while ranks train (`data.streaming`): endless sources of rows.

    pass 0     part 3 | part 0 | part 4 | part 1 | part 2 |    the parts in an order of their own
    pass 1     part 1 | part 4 | ...
    tokens     <-- row 0 --><-- row 1 --><-- row 2 --> ...     cut across parts and passes
    buffer     |<- shuffled ->|<- shuffled ->|<- ...           `SampleOrder.block` rows at a time

A row depends on its number alone: its place is the sum of the tokens before it, which the cache
knows of every part. So order and position are exact for any number of ranks and after a resume, and
a resume reads the counts of earlier parts but tokenizes none of them again.

Whoever needs a part first makes it, under the lock of the cache (see `tokenize`); the other ranks
of the machine wait for it and then map the same file.
"""

from __future__ import annotations

from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from functools import cached_property, lru_cache, partial
from pathlib import Path
from typing import Any

import numpy as np

from fullshard.data.arrays import Rows, TokenFile
from fullshard.data.order import ENDLESS, permuted
from fullshard.data.tokenize import Shard, TokenSettings, ensure, fast_encoder, text_tokens

AHEAD = 3  # parts that are tokenized before they are needed

_encoder = lru_cache(fast_encoder)


@dataclass(frozen=True)
class Parts:
    """The parts of one source, and how they become tokens.

    Attributes:
        shards: The parts.
        names: Name of each part when the run was prepared; a file that changed has another.
        key: Name of the cache folder of these settings.
        how: How data becomes tokens.
    """

    shards: tuple[Shard, ...]
    names: tuple[str, ...]
    key: str
    how: TokenSettings


@dataclass(frozen=True)
class Sources:
    """The sources of a stream, as the run's folder has them.

    Attributes:
        parts: Parts of each source.
        seed: Seed of the order of parts.
    """

    parts: tuple[Parts, ...]
    seed: int


class Stream(Rows):
    """Rows of endless sources, numbered from `ENDLESS` times the number of the source.

    Args:
        found: Parts of each source.
        length: Tokens per row.
        root: Cache of this machine.
        tokenizer: The tokenizer as JSON.
        ahead: Parts to tokenize before they are needed.
    """

    def __init__(
        self, found: Sources, length: int, root: Path, tokenizer: str, ahead: int = 0
    ) -> None:
        super().__init__([[] for _ in found.parts], length)
        self.found, self.ahead = found, ahead
        self.sizes = [ENDLESS] * len(found.parts)
        self._first = np.arange(len(found.parts)) * ENDLESS
        self._how = (root, tokenizer)
        self._started: dict[tuple[int, int], Future[TokenFile]] = {}

    def __reduce__(self) -> Any:
        """For the worker, which tokenizes ahead."""
        return Stream, (self.found, self.length, *self._how, AHEAD)

    @property
    def num_dropped(self) -> int:
        return 0

    def num_rows(self, source: int) -> int:
        """About how many rows a pass over a source has, from the tokens of its first parts."""
        shards, count, size = self.found.parts[source].shards, 0, 0
        for number in range(len(shards)):
            count += self.tokens(source, number).count
            size += shards[self._index(source, number)].num_bytes
            if count >= self.length:
                break
        return count * sum(shard.num_bytes for shard in shards) // max(1, size) // self.length

    def tokens(self, source: int, number: int) -> TokenFile:
        """The tokens of a part, counted over all passes; waits until they are there."""
        for one in range(number, number + self.ahead + 1):
            if (source, one) not in self._started:
                made = self._thread.submit(self._made, source, self._index(source, one))
                self._started[source, one] = made
        return self._started[source, number].result()

    @cached_property
    def _thread(self) -> ThreadPoolExecutor:
        return ThreadPoolExecutor(1, "fullshard tokens")

    def _made(self, source: int, index: int) -> TokenFile:
        (root, tokenizer), parts = self._how, self.found.parts[source]
        file = root / parts.key / parts.names[index]
        read = partial(text_tokens, _encoder(tokenizer), parts.how)
        return ensure(parts.how, read, (file, parts.shards[index]))

    def _index(self, source: int, number: int) -> int:
        count = len(self.found.parts[source].shards)
        turn, place = divmod(number, count)
        return int(permuted(np.array([place]), count, (self.found.seed, turn, source, 1))[0])

    def _reach(self, source: int, stop: int) -> None:
        bounds = self._bounds[source]
        while bounds[-1] < stop:
            self.sources[source].append(tokens := self.tokens(source, len(self.sources[source])))
            bounds.append(bounds[-1] + tokens.count)
