"""Several processes that train one run: what they exchange, how they agree, how they end together.

Every rank holds the same networks, queue and optimiser, and makes its own block of each step's images. Rank 0 alone
writes. All functions here are collective: every rank calls them in the same order, and with one process they do
nothing. Whatever a rank waits for, it waits for a limited time; when another has gone, it raises RankLostError.

Gradients are averaged here and not by DistributedDataParallel. That regroups what it sums after the first step, and
with three or more ranks the grouping decides the order of sums (seen with gloo and 4 ranks: the same batch twice gives
other bits). A resumed run would differ from one never stopped. Here the grouping is the parameters' order, always.
"""

from __future__ import annotations

import contextlib
import gc
import json
import os
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, replace
from datetime import timedelta
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from mocokit.contrast.batch_norm import Shuffle
from mocokit.contrast.encoders import Encoder
from mocokit.contrast.key_queue import Keys
from mocokit.errors import MocokitError, RankLostError, RanksApartError, UsageError, first_line, is_out_of_memory
from mocokit.training.launch import Launch, read_launch
from mocokit.training.precision import ExecutionConfig, choose_execution
from mocokit.training.state import pick_device

T = TypeVar("T")

RANK_TIMEOUT = 600.0
"""Seconds that a rank waits for the others within a step."""
WORTH_TELLING = 10.0
"""Seconds of waiting for ranks that have not come, after which a rank says whom it is waiting for."""
PATIENCE = timedelta(hours=24)
"""How long the others wait while rank 0 decodes pictures, evaluates or saves. If it dies they notice at once."""
BUCKET_BYTES = 25 * 2**20
"""Gradients travel in pieces of about this size."""


class Ranks:
    """All the processes of a run, seen from this one. Without arguments: a process alone.

    where: what this process is doing, for messages.
    """

    def __init__(self, launch: Launch = Launch(), limit: float = RANK_TIMEOUT) -> None:
        self.rank, self.size = launch.rank, launch.size
        self.local_rank, self.local_size = launch.local_rank, launch.local_size
        self.limit = timedelta(seconds=limit)
        self.where = "at the start"
        self._group: Any = None  # for tensors on a GPU; gloo carries everything else

    @property
    def first(self) -> bool:
        """Whether this is the rank that writes."""
        return self.rank == 0

    # ------------------------------------------------------------------------------------------------ devices

    def device(self, name: str) -> torch.device:
        """`pick_device`; of several ranks on a machine with GPUs, each takes the one of its own number."""
        device = pick_device(name)
        if self.size == 1 or device.type != "cuda":
            return device
        if device.index:  # 0 is what the first rank has, and what it records
            raise UsageError(f"--device {name} names one GPU; of several ranks each takes its own. Use --device cuda.")
        if self.local_size > torch.cuda.device_count():
            raise UsageError(
                f"{self.local_size} ranks on this machine, and torch sees {torch.cuda.device_count()} GPUs. Start as "
                "many ranks as there are GPUs, or add --device cpu."
            )
        own = torch.device("cuda", self.local_rank)
        torch.cuda.set_device(own)
        with self._talking():
            self._group = dist.new_group(backend="nccl", timeout=self.limit, device_id=own)
        return own

    def threads(self) -> int | None:
        """This rank's share of the machine's cores; None with one process, where torch decides."""
        return None if self.size == 1 else max(len(os.sched_getaffinity(0)) // self.local_size, 1)

    # ------------------------------------------------------------------------------------------------ tensors

    def gather(self, keys: Keys) -> Keys:
        """Every rank's keys in rank order; each must bring as many. Gradient flows back to whose vectors they are."""
        if self.size == 1:
            return keys
        vectors: Tensor = _GatherRows.apply(keys.vectors, self)
        return Keys(vectors, self.rows_of_all(keys.ids), self.rows_of_all(keys.groups))

    def rows_of_all(self, rows: Tensor) -> Tensor:
        """Every rank's rows [N, ...] in rank order: [size x N, ...], without gradient."""
        rows = rows.detach().contiguous()
        parts = [torch.empty_like(rows) for _ in range(self.size)]
        with self._talking():
            dist.all_gather(parts, rows, group=self._group)
        return torch.cat(parts)

    def sum_(self, tensor: Tensor) -> None:
        """Put the sum over all ranks into each rank's tensor."""
        with self._talking():
            dist.all_reduce(tensor, group=self._group)

    def average_(self, tensors: Sequence[Tensor]) -> None:
        """Put the mean over all ranks into each rank's tensors, which have the same shapes everywhere."""
        if self.size == 1:
            return
        with self._talking():
            sent = []
            for bucket in _buckets(tensors):
                flat = torch.cat([tensor.reshape(-1) for tensor in bucket])
                sent.append((bucket, flat, dist.all_reduce(flat, group=self._group, async_op=True)))
            for bucket, flat, work in sent:
                work.wait()
                flat /= self.size
                parts = torch.split(flat, [tensor.numel() for tensor in bucket])
                for tensor, part in zip(bucket, parts, strict=True):
                    tensor.copy_(part.view(tensor.shape))

    def shuffle_by(self, order: Tensor) -> Shuffle:
        """The shuffle over all ranks' batches, laid end to end: rank r sees the images order[r N : (r + 1) N].

        order: int64 [size x N], a permutation. Each image travels once to the rank that sees it, its key once back.
        """
        N = len(order) // self.size
        places = torch.argsort(order)[self.rank * N : (self.rank + 1) * N]  # where my images are seen
        leaving = torch.argsort(places)
        sources = order[self.rank * N : (self.rank + 1) * N] // N  # whose images I see
        arriving = torch.argsort(sources, stable=True)
        sent = torch.bincount(places // N, minlength=self.size).tolist()
        received = torch.bincount(sources, minlength=self.size).tolist()

        def there(x: Tensor) -> Tensor:
            return _put(self._exchange(x[leaving], sent, received), arriving)

        def back(k: Tensor) -> Tensor:
            return _put(self._exchange(k[arriving], received, sent), leaving)

        return Shuffle(there, back)

    def _exchange(self, rows: Tensor, sent: list[int], received: list[int]) -> Tensor:
        found = torch.empty_like(rows)
        with self._talking():
            dist.all_to_all_single(found, rows.contiguous(), received, sent, group=self._group)
        return found

    # -------------------------------------------------------------------------------------------- small numbers

    def means(self, values: Sequence[float]) -> list[float]:
        """The mean over all ranks of each value, in float64; not finite on one rank is not finite on all."""
        if self.size == 1:
            return list(values)
        total = torch.tensor(values, dtype=torch.float64)
        with self._talking():
            dist.all_reduce(total)
        return [value / self.size for value in total.tolist()]

    def highest(self, value: int) -> int:
        """The largest of all ranks' numbers."""
        if self.size == 1:
            return value
        found = torch.tensor(value)
        with self._talking():
            dist.all_reduce(found, dist.ReduceOp.MAX)
        return int(found)

    def tell_all(self, value: Any) -> list[Any]:
        """Every rank's JSON value, in rank order."""
        if self.size == 1:
            return [value]
        mine = torch.frombuffer(bytearray(json.dumps(value).encode()), dtype=torch.uint8)
        lengths = [torch.zeros((), dtype=torch.int64) for _ in range(self.size)]
        with self._talking():
            dist.all_gather(lengths, torch.tensor(len(mine)))
            longest = max(int(length) for length in lengths)
            texts = [torch.zeros(longest, dtype=torch.uint8) for _ in range(self.size)]
            dist.all_gather(texts, torch.nn.functional.pad(mine, (0, longest - len(mine))))
        return [json.loads(bytes(text[: int(length)].tolist())) for text, length in zip(texts, lengths, strict=True)]

    # ------------------------------------------------------------------------------------------------ agreement

    def wait(self) -> None:
        """Wait until every rank is here: however long rank 0's own work takes, and the usual time for the others."""
        if self.size > 1:
            with self._talking():
                dist.monitored_barrier(timeout=self.limit if self.first else PATIENCE)

    @contextlib.contextmanager
    def phase(self, where: str) -> Iterator[None]:
        """Work that every rank does or nobody: when one raises a MocokitError, all do, and one of them tells it."""
        self.where = where
        own: MocokitError | None = None
        try:
            yield
        except MocokitError as error:
            if self.size == 1:
                raise
            own = error
        self.wait()
        told = self.tell_all(None if own is None else [own.exit_code, str(own)])
        failed = [rank for rank, said in enumerate(told) if said is not None]
        if not failed:
            return
        code, text = told[failed[0]]
        if own is None or self.rank != failed[0]:
            own = MocokitError(f"rank {failed[0]}: {text}")
            own.exit_code = code
        own.teller = failed[0]
        raise own

    def first_then_others(self, where: str, first: Callable[[], T], others: Callable[[], T]) -> T:
        """Let rank 0 make what the others open once it is there."""
        made: list[T] = []
        with self.phase(where):
            if self.first:
                made.append(first())
        with self.phase(where):
            if not self.first:
                made.append(others())
        return made[0]

    def require_same(self, what: str, value: str) -> None:
        """Raise RanksApartError on every rank unless all have the same value."""
        told = self.tell_all(value)
        if apart := [rank for rank, said in enumerate(told) if said != told[0]]:
            raise RanksApartError(
                f"{what} of rank {apart[0]} are not those of rank 0 ({self.where}). The ranks must have the same "
                "command, files, versions and kind of hardware. The last checkpoint, if there is one, is unharmed."
            )

    @contextlib.contextmanager
    def _talking(self) -> Iterator[None]:
        try:
            yield
        except RuntimeError as error:
            if is_out_of_memory(error):
                raise
            raise RankLostError(
                f"Rank {self.rank} of {self.size} lost the others ({self.where}): one of them ended, or did not answer "
                f"for {self.limit.total_seconds():g} s. This rank ends too; the last checkpoint is unharmed: continue "
                f"with --resume. [{first_line(error)}]"
            ) from error


@contextlib.contextmanager
def open_ranks(limit: float = RANK_TIMEOUT, tell: Callable[[str], None] = lambda text: None) -> Iterator[Ranks]:
    """The ranks that torchrun started, connected; a process alone where it did not.

    limit: seconds to wait for the others. tell: told when this rank has waited long for others to come. At the end
    every rank waits for the others before it lets go; after an error that is its own, it leaves at once, and the others
    notice. Raises UsageError, RankLostError.
    """
    launch = read_launch()
    ranks = Ranks(launch, limit)
    if not 1 <= limit <= 86400:
        raise UsageError(f"The time limit for other ranks must lie in [1, 86400] seconds. Got {limit:g}.")
    if launch.size == 1:
        yield ranks
        return
    if dist.is_initialized():
        raise UsageError("A torch.distributed group is open already. Leave opening and closing it to mocokit.")
    _meet(launch, limit, tell)
    try:
        yield ranks
        ranks.wait()
    except MocokitError as error:
        if error.teller is not None:
            ranks.wait()
        raise
    finally:
        # With tensors and work handles still around, busy machines have seen processes abort while they end.
        gc.collect()
        dist.destroy_process_group()


def _meet(launch: Launch, limit: float, tell: Callable[[str], None]) -> None:
    """Connect to the other ranks. One that died before it came can't be told from one that is slow to start."""
    text = (
        f"Rank {launch.rank} of {launch.size} is waiting for the others at {launch.address}; it gives up {limit:g} s "
        "after it began. If one of them has died, stop this one."
    )
    waiting = threading.Timer(WORTH_TELLING, tell, [text])
    waiting.daemon = True
    waiting.start()
    try:
        dist.init_process_group("gloo", timeout=timedelta(seconds=limit))
    except RuntimeError as error:
        raise RankLostError(
            f"Rank {launch.rank} of {launch.size} did not meet the others at {launch.address} (limit: {limit:g} s) "
            f"and ends; nothing was trained or changed. Start all {launch.size} ranks together, where they can reach "
            f"that address (torchrun does both). [{first_line(error)}]"
        ) from error
    finally:
        waiting.cancel()


def settle_execution(
    encoder: Encoder, sample: Callable[[], Tensor], wanted: ExecutionConfig, ranks: Ranks, *, steps: int
) -> ExecutionConfig:
    """`choose_execution` on rank 0 while the others rest; all get what it chose.

    sample: makes a rank's own batch. steps: how long the run is. Threads that nobody named are each rank's share of the
    machine's cores.
    """
    wanted = replace(wanted, threads=wanted.threads or ranks.threads())
    if ranks.size == 1:
        return choose_execution(encoder, sample(), wanted, steps=steps)
    with ranks.phase("timing precision and layout"):
        chosen = asdict(choose_execution(encoder, sample(), wanted, steps=steps)) if ranks.first else None
    return ExecutionConfig(**ranks.tell_all(chosen)[0])


class _GatherRows(torch.autograd.Function):
    """All ranks' rows; the gradient of a rank's own rows is the sum of what all ranks have for them."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, ranks: Ranks) -> Tensor:
        """[N, D] -> [size x N, D]."""
        ctx.ranks, ctx.N = ranks, len(rows)
        return ranks.rows_of_all(rows)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        """[size x N, D] -> [N, D]."""
        total = gradients[0].clone(memory_format=torch.contiguous_format)
        ctx.ranks.sum_(total)
        return total[ctx.ranks.rank * ctx.N : (ctx.ranks.rank + 1) * ctx.N], None


def _buckets(tensors: Sequence[Tensor]) -> Iterator[list[Tensor]]:
    """Runs of tensors in their order, each of about BUCKET_BYTES."""
    bucket: list[Tensor] = []
    size = 0
    for tensor in tensors:
        bucket.append(tensor)
        size += tensor.nbytes
        if size >= BUCKET_BYTES:
            yield bucket
            bucket, size = [], 0
    if bucket:
        yield bucket


def _put(rows: Tensor, places: Tensor) -> Tensor:
    """rows[i] at places[i]."""
    return torch.empty_like(rows).index_copy_(0, places, rows)
