"""The dictionary as a queue of keys (He et al. 2020, section 3.2, "Dictionary as a queue").

Shapes: K rows of capacity, D dimensions, N keys enqueued at once.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

NO_ID = -1


@dataclass(frozen=True, slots=True)
class Keys:
    """Key vectors with where each came from.

    vectors: float32 [N, D], unit rows. ids: int64 [N], the source image's id, or NO_ID. groups: int64 [N], the
    source's group (patient, product, video), or NO_ID.
    """

    vectors: Tensor
    ids: Tensor
    groups: Tensor

    def __len__(self) -> int:
        return len(self.ids)


def join(keys: Sequence[Keys]) -> Keys:
    """One batch out of several, in their order; gradient passes through."""
    if len(keys) == 1:
        return keys[0]
    return Keys(
        torch.cat([part.vectors for part in keys]),
        torch.cat([part.ids for part in keys]),
        torch.cat([part.groups for part in keys]),
    )


class KeyQueue:
    """A first-in, first-out ring of K keys; stored vectors are never recomputed.

    Beside each vector it keeps the source id, the group id and the birth step. Any number of keys can be enqueued
    at once, also more than K; the wrap is exact. Only rows that hold a real key are ever returned. State: four
    tensors, the write pointer and the fill count (`tensors`, `counters`, `load`).
    """

    def __init__(self, K: int, D: int, device: torch.device | str = "cpu") -> None:
        if K < 1 or D < 1:
            raise ValueError(f"A key queue needs K >= 1 and D >= 1. Got K={K}, D={D}.")
        self.K, self.D = K, D
        self.vectors = torch.zeros(K, D, device=device)
        self.ids = torch.full((K,), NO_ID, dtype=torch.int64, device=device)
        self.groups = torch.full((K,), NO_ID, dtype=torch.int64, device=device)
        self.births = torch.full((K,), -1, dtype=torch.int64, device=device)
        self.pointer = 0
        self.fill = 0

    def snapshot(self) -> Keys:
        """The valid rows, as views without a copy: score against them before `enqueue_` changes them."""
        return Keys(self.vectors[: self.fill], self.ids[: self.fill], self.groups[: self.fill])

    @torch.no_grad()
    def enqueue_(self, keys: Keys, step: int) -> None:
        """Overwrite the oldest rows by `keys`, in their order, born at `step`.

        keys.vectors: [N, D] for any N; of more than K keys the last K remain, as if each had been enqueued alone.
        """
        if keys.vectors.shape[1:] != (self.D,):
            raise ValueError(
                f"The queue holds keys of {self.D} dimensions. Got a batch of shape {tuple(keys.vectors.shape)}."
            )
        N = len(keys)
        done = max(N - self.K, 0)
        while done < N:  # one run of rows, or two around the end of the ring
            row = (self.pointer + done) % self.K
            count = min(N - done, self.K - row)
            self.vectors[row : row + count] = keys.vectors[done : done + count]
            self.ids[row : row + count] = keys.ids[done : done + count]
            self.groups[row : row + count] = keys.groups[done : done + count]
            self.births[row : row + count] = step
            done += count
        self.pointer = (self.pointer + N) % self.K
        self.fill = min(self.fill + N, self.K)

    def oldest_first(self) -> Tensor:
        """Row numbers of the valid rows, oldest first: int64 [fill]."""
        start = self.pointer if self.fill == self.K else 0
        return (start + torch.arange(self.fill, device=self.ids.device)) % self.K

    @torch.no_grad()
    def fill_random_(self, seed: int) -> None:
        """Fill every row with a random unit vector without source, as the released code starts.

        Deviation: not the default, because random rows are easy negatives that no image produced.
        """
        generator = torch.Generator().manual_seed(seed)
        noise = torch.randn(self.K, self.D, generator=generator)
        self.vectors.copy_(torch.nn.functional.normalize(noise, dim=1))
        self.fill = self.K

    def tensors(self) -> dict[str, Tensor]:
        """The tensors of the state, by name (not copies)."""
        return {"vectors": self.vectors, "ids": self.ids, "groups": self.groups, "births": self.births}

    def counters(self) -> dict[str, int]:
        """The integers of the state, by name."""
        return {"pointer": self.pointer, "fill": self.fill}

    @torch.no_grad()
    def load(self, tensors: dict[str, Tensor], counters: dict[str, int]) -> None:
        """Restore a state made by `tensors` and `counters`. Raises ValueError when it does not fit this queue."""
        for name, mine in self.tensors().items():
            if tensors[name].shape != mine.shape or tensors[name].dtype != mine.dtype:
                raise ValueError(
                    f"The stored queue's {name} is {tensors[name].dtype} {tuple(tensors[name].shape)}; this queue "
                    f"needs {mine.dtype} {tuple(mine.shape)}."
                )
        pointer, fill = counters["pointer"], counters["fill"]
        if not (0 <= pointer < self.K and 0 <= fill <= self.K and (fill == self.K or fill == pointer)):
            raise ValueError(f"The stored queue's pointer {pointer} and fill {fill} do not fit K={self.K}.")
        for name, mine in self.tensors().items():
            mine.copy_(tensors[name])
        self.pointer, self.fill = pointer, fill
