"""The views of LAB 06 and LAB 07, an epoch at a time, with the published random numbers.

Elsewhere every number of a view is a hash of (seed, epoch, sample id, view). The published labs draw them from one
generator, batch by batch, so that is what happens here; the arithmetic on the pictures, which draws nothing, is done
once for the whole epoch. A test shows that not a bit differs from a loop over the images.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor
from torch.nn import functional as F

from mocokit.studies.setting import BATCH

PICTURED_SOURCES = (0, 100, 140, 280, 420, 700)


class ViewMaker:
    """Shuffled batches and their views, from a generator of its own.

    A view of an image: shifted by -1, 0 or 1 pixel down and right (what leaves at one edge enters at the other),
    brightness times 0.8 to 1.2, noise of deviation 0.025, and with `swap_hue` red and blue exchanged with probability
    1/2. The coin for that is tossed in any case, so both arms of LAB 06 see the same views up to the hue.
    """

    def __init__(self, images: Tensor, seed: int, *, swap_hue: bool = False) -> None:
        self.swap_hue = swap_hue
        self.generator = torch.Generator().manual_seed(seed)
        # windows[i, :, 1 - down, 1 - right] is image i shifted; no copy, a view into the padded images.
        self.windows = F.pad(images, (1, 1, 1, 1), mode="circular").unfold(2, 16, 1).unfold(3, 16, 1)

    def epoch(self, source_ids: Tensor) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
        """The ids in a new order, 60 at a time: ids int64 [60] and two views of each, float32 [60, 3, 16, 16]."""
        order = source_ids[torch.randperm(len(source_ids), generator=self.generator)]
        view_a, view_b = self.views(order)
        yield from zip(*(torch.split(rows, BATCH) for rows in (order, view_a, view_b)), strict=True)

    def views(self, ids: Tensor, count: int = 2) -> tuple[Tensor, ...]:
        """`count` views of the images `ids`, each [n, 3, 16, 16] in 0..1."""
        n = len(ids)
        shift = torch.empty(count, n, 2, dtype=torch.long)
        brightness = torch.empty(count, n, 1, 1, 1)
        noise = torch.empty(count, n, 3, 16, 16)
        coin = torch.empty(count, n)
        for start in range(0, n, BATCH):
            batch = slice(start, start + BATCH)
            for view in range(count):
                shift[view, batch].random_(-1, 2, generator=self.generator)
                brightness[view, batch].uniform_(0.8, 1.2, generator=self.generator)
                noise[view, batch].normal_(0, 0.025, generator=self.generator)
                coin[view, batch].uniform_(generator=self.generator)
        down, right = shift.unbind(-1)
        pictures = self.windows[ids, :, 1 - down, 1 - right].mul_(brightness).add_(noise)
        if self.swap_hue:
            swapped = coin < 0.5
            pictures[swapped] = pictures[swapped].flip(1)
        return pictures.clamp_(0, 1).unbind(0)


def hue_pictures(images: Tensor, seed: int, sources: Sequence[int] = PICTURED_SOURCES) -> dict[str, Tensor]:
    """Each source, a view with the hue kept, and the same view with the hue free to swap: [n, 3, 16, 16] each.

    Both views of a source start from one generator state, so they differ in the hue or not at all.
    """
    keep, swap = ViewMaker(images, seed), ViewMaker(images, seed, swap_hue=True)
    kept, swapped = (
        torch.cat([maker.views(torch.tensor([source]), count=1)[0] for source in sources]) for maker in (keep, swap)
    )
    return {"source": images[list(sources)], "view: hue kept": kept, "view: hue may swap": swapped}
