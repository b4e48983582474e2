# SPDX-License-Identifier: Apache-2.0
"""A bad data shard: in some steps the batches are random tokens instead of text.

    start=200,width=20; start=500          steps 200 to 219, and step 500 alone

Nothing is wrong with any operator then, so nobody should be blamed: it is what a controller must leave alone. The
tokens are uniform over the vocabulary (with bytes: random bytes) and, like the text, a pure function of seed and step:

    raw     = Philox4x64-10(key = (seed, 1), counter = (0, 0, micro, step)), one 64-bit word per token
    token   = raw mod vocabulary
"""

import numpy as np
import torch
from torch import Tensor

from trimtab.errors import TrimtabError
from trimtab.lab.data import Sampler

KEYS = {"start": None, "width": 1}


def parse_bad_data(text: str | None) -> tuple[range, ...]:
    """Read the steps of each stretch from its compact form."""
    return tuple(_stretch(part.strip()) for part in (text or "").split(";") if part.strip())


def _stretch(text: str) -> range:
    found: dict[str, int | None] = dict(KEYS)
    for pair in text.split(","):
        key, _, value = (part.strip() for part in pair.partition("="))
        if key not in KEYS or not value.isdecimal() or int(value) < 1:
            raise TrimtabError(f'bad_data is written "start=N,width=N" with numbers of at least 1, got {text!r}')
        found[key] = int(value)
    start, width = found["start"], found["width"]
    if start is None or width is None:
        raise TrimtabError(f'bad_data needs its first step, got {text!r}: write "start=200,width=20"')
    return range(start, start + width)


class Spoiled(Sampler):
    """A sampler some of whose steps are noise; the others are those of a plain one with the same seed."""

    def __init__(
        self, tokens: np.ndarray, *, batch: int, seq: int, seed: int, vocab_size: int, bad: tuple[range, ...]
    ) -> None:
        super().__init__(tokens, batch=batch, seq=seq, seed=seed)
        self._vocab_size, self._bad = vocab_size, bad

    def batch_at(self, step: int, micro: int = 0) -> tuple[Tensor, Tensor]:
        """Inputs and targets, each (batch, seq) int64, of a step's micro-batch."""
        if not any(step in stretch for stretch in self._bad):
            return super().batch_at(step, micro)
        key = np.array([self.seed, 1], dtype=np.uint64)
        counter = np.array([0, 0, micro, step], dtype=np.uint64)
        raw = np.random.Philox(key=key, counter=counter).random_raw(self.batch * (self.seq + 1))
        tokens = (raw % np.uint64(self._vocab_size)).astype(np.int64).reshape(self.batch, self.seq + 1)
        window = torch.from_numpy(tokens)
        return window[:, :-1].contiguous(), window[:, 1:].contiguous()
