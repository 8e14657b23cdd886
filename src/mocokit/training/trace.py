"""The recorder: what really happened in a few steps, read at the seams of a step without changing it.

A step is handed its query update and its gather (`contrast.parts`). On the steps to be recorded these two are wrapped:
when `gather` is called the keys exist and the queue is untouched; when the update returns, the gradient has been there
and the queue still is. Nothing that a recorder computes flows back into the run.

Shapes: N queries in the step, Q of them recorded in full, R of them in short, K keys in the dictionary, D dimensions.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from mocokit.contrast.batch_norm import batch_norms, statistics_untouched
from mocokit.contrast.encoders import EncoderPair
from mocokit.contrast.health import histogram
from mocokit.contrast.key_queue import KeyQueue, Keys, join
from mocokit.contrast.losses import Contrast, same_source
from mocokit.contrast.method import ContrastConfig
from mocokit.contrast.parts import Gather, UpdateQuery, ViewPair, encode_keys, swapped
from mocokit.training import trace_format as form
from mocokit.training.state import TrainState
from mocokit.training.trace_images import ImageTable, Pictured, UInt8


class Updated(Protocol):
    """What the recorder reads of the loop's query update after it was called."""

    loss: float
    chance: float | None
    gradient_norm: float
    lr: float

    def __call__(self, losses: Iterable[Contrast], /) -> None: ...


class Recorder:
    """Records the steps of some windows.

    describe: what is known of images by their id; an id may be unknown. to_pixels: views [n, 3, s, s] as they were
    fed -> uint8 pictures [n, s, s, 3]. facts: further entries of the trace's `config`. source: its `source`. save: is
    given the whole trace whenever a window is complete, and at `close`. every_age: measure the staleness of followed
    keys in every step of their life (a forward pass of f_k each time), not only in their first and last. earlier: the
    trace of the run before it was resumed; its steps before `resumed_at` are kept.
    """

    def __init__(
        self,
        windows: Sequence[form.Window],
        contrast: ContrastConfig,
        *,
        source: dict[str, Any],
        facts: dict[str, Any],
        describe: Callable[[int], Pictured | None],
        to_pixels: Callable[[Tensor], UInt8],
        save: Callable[[dict[str, Any]], None],
        every_age: bool = False,
        earlier: dict[str, Any] | None = None,
        resumed_at: int = 0,
    ) -> None:
        if not contrast.has_queue:
            raise ValueError(f"A trace follows keys through a queue, and {contrast.method} has none.")
        self.windows, self.contrast = windows, contrast
        self.to_pixels, self.save = to_pixels, save
        self.images = ImageTable(describe)
        self.every_age = every_age
        self.trace: dict[str, Any] = {
            "format": form.FORMAT,
            "version": form.VERSION,
            "source": source,
            "config": facts,
            "images": self.images.entries,
            "projection": None,
            "windows": [],
        }
        self._basis: Tensor | None = None
        self._followed: list[_Followed] = []
        self._followed_now: list[_Followed] = []
        if earlier is not None:
            self._keep(earlier, resumed_at)

    def _keep(self, earlier: dict[str, Any], resumed_at: int) -> None:
        """Go on with the steps recorded before the run was interrupted."""
        if earlier["source"].get("config") != self.trace["source"].get("config"):
            return  # a trace of another run, left lying there
        for window in earlier["windows"]:
            window["steps"] = [step for step in window["steps"] if step["t"] < resumed_at]
        self.trace |= {name: earlier[name] for name in ("config", "images", "projection")}
        self.trace["windows"] = [window for window in earlier["windows"] if window["steps"]]
        self.images.take_over(self.trace["images"])
        if self.trace["projection"] is not None:
            self._basis = torch.tensor(form.unpack(self.trace["projection"]["basis"], -1, 2).copy())

    def wants(self, step: int) -> bool:
        """Whether the step of that number is recorded."""
        return any(window.start <= step < window.stop for window in self.windows)

    @contextlib.contextmanager
    def step(
        self, state: TrainState, parts: Sequence[ViewPair], update: Updated, gather: Gather, m: float
    ) -> Iterator[tuple[UpdateQuery, Gather]]:
        """The update and the gather to hand to the step, which must be run inside; records it at the end."""
        assert state.queue is not None
        window = next(w for w in self.windows if w.start <= state.step < w.stop)
        if self.contrast.symmetric:
            parts = [*parts, *swapped(parts)]
        watch = _Watch(self, state.pair, state.queue, parts, update, gather, state.step, state.step in window.detailed)
        hook = state.pair.query.register_forward_hook(watch.forward)
        try:
            yield watch.update_query_, watch.gather_
        finally:
            hook.remove()
        row = watch.finish(m)
        into = self._window(window, watch)
        into["steps"].append(row)
        if state.step == window.stop - 1:
            self.save(self.trace)

    def close(self) -> None:
        """Save what was recorded of a window that the run did not reach the end of."""
        if self.trace["windows"]:
            self.save(self.trace)

    def _window(self, window: form.Window, watch: _Watch) -> dict[str, Any]:
        """The window's entry: the one there is, when its last step was the one before; else one that begins here."""
        found: list[dict[str, Any]] = self.trace["windows"]
        if found and found[-1]["steps"] and found[-1]["steps"][-1]["t"] == watch.number - 1:
            return found[-1]
        found.append({"name": window.name, "initial": watch.initial, "steps": []})
        return found[-1]

    def flat(self, vectors: Tensor) -> Tensor:
        """The two coordinates [n, 2] of unit vectors [n, D] in the projection that the whole trace uses."""
        if self._basis is None:
            if vectors.shape[1] == 2:
                self._basis, how = torch.eye(2), "the vectors themselves"
            else:
                centred = (vectors - vectors.mean(0)).double().cpu()
                self._basis = torch.linalg.svd(centred, full_matrices=False).Vh[:2].T.float()
                how = f"two principal directions of the {len(vectors)} keys of the first recorded step"
                if self._basis.shape[1] < 2:  # a single key spans no plane: its own direction and none
                    self._basis = F.pad(self._basis, (0, 2 - self._basis.shape[1]))
            self.trace["projection"] = {"basis": form.pack(self._basis), "how": how}
        return vectors @ self._basis.to(vectors.device)

    # ------------------------------------------------------------------------------------------ whole lives

    def follow(self, watch: _Watch, keys: Tensor) -> list[dict[str, Any]]:
        """Re-encode the views of followed births by the key encoder as it is now: how stale is what the queue holds?

        Called when this step's keys exist, so that age 0 reads 1. The first step of each window is followed. Its keys
        are read in the last step in which they are scored, and with `every_age` in all of them.
        """
        starts = {window.start for window in self.windows}
        if watch.number in starts or (not self._followed and not self.trace["windows"]):
            life = -(-watch.queue.K // max(len(keys), 1))
            rows = (watch.pointer + torch.arange(watch.full)) % watch.queue.K
            self._followed.append(_Followed(watch.number, list(watch.parts), keys[: watch.full].clone(), rows, life))
        told = []
        self._followed_now = list(self._followed)
        for one in self._followed_now:
            age = watch.number - one.birth
            if self.every_age or age in (0, one.life):
                cosines = F.cosine_similarity(one.keys.double(), self._now(watch, one, keys).double(), dim=1)
                told.append({"birth": one.birth, "age": age, "cosines": cosines.tolist()})
            if age >= one.life:
                self._followed.remove(one)
        return told

    def _now(self, watch: _Watch, one: _Followed, keys: Tensor) -> Tensor:
        """The followed views by f_k as it is; in the step of their birth these are the step's own keys."""
        if watch.number == one.birth:
            return keys[: len(one.keys)]
        with statistics_untouched(watch.pair.key):
            return join(encode_keys(watch.pair, one.parts)).vectors[: len(one.keys)]

    def followed_rows(self, step: int) -> dict[int, Tensor]:
        """The dictionary rows of the followed keys that a step scores: birth -> rows, int64 [Q]."""
        return {one.birth: one.rows for one in self._followed_now if one.birth < step}


@dataclass(frozen=True, slots=True)
class _Followed:
    birth: int
    parts: list[ViewPair]
    keys: Tensor
    rows: Tensor
    life: int


class _Watch:
    """One step being recorded."""

    def __init__(
        self,
        recorder: Recorder,
        pair: EncoderPair,
        queue: KeyQueue,
        parts: Sequence[ViewPair],
        update: Updated,
        gather: Gather,
        number: int,
        detailed: bool,
    ) -> None:
        self.recorder, self.pair, self.queue, self.parts = recorder, pair, queue, parts
        self.update, self.gather, self.number, self.detailed = update, gather, number, detailed
        config = recorder.trace["config"]
        N = sum(len(part.ids) for part in parts)
        steps = sum(len(window.detailed) for window in recorder.windows)
        config.setdefault("Q", form.queries_in_full(steps, N, queue.K))
        self.full = config["Q"]
        self.named = max(form.MAX_KEYS // max(steps, 1), form.MAX_ROWS)
        self.z: list[Tensor] = []
        self.gradients: list[Tensor] = []
        self.own: list[Keys] = []
        self.everyone: list[Keys] = []
        self.row: dict[str, Any] = {"t": number, "detail": "full" if detailed else "light"}
        self.pointer, self.fill = queue.pointer, queue.fill
        self.initial = self._initial()
        self.theta: dict[str, dict[str, float]] = {}
        self.parameter: dict[str, list[float]] = {}
        self._look("start")

    def _initial(self) -> dict[str, Any]:
        """The dictionary as the window finds it, oldest key first; births as [step, how many] in a row."""
        if self.recorder.trace["windows"] and self.recorder.trace["windows"][-1]["steps"]:
            last = self.recorder.trace["windows"][-1]["steps"][-1]["t"]
            if last == self.number - 1:
                return {}
        rows = self.queue.oldest_first()
        births, counts = torch.unique_consecutive(self.queue.births[rows], return_counts=True)
        found = {
            "fill": self.fill,
            "pointer": self.pointer,
            "births": [list(pair) for pair in zip(births.tolist(), counts.tolist(), strict=True)],
            "images": None,
            "flat": None,
        }
        if 0 < self.fill <= 8192:
            found["images"] = [self.recorder.images.row(i, picture=False) for i in self.queue.ids[rows].tolist()]
            found["flat"] = form.pack(self.recorder.flat(self.queue.vectors[rows]))
        return found

    # ------------------------------------------------------------------------------------------------ seams

    def forward(self, _module: Any, _arguments: Any, z: Tensor) -> None:
        """A hook on f_q: keeps z and, when backward comes by, its gradient."""
        if torch.is_grad_enabled():
            self.z.append(z.detach())
            place = len(self.gradients)
            self.gradients.append(torch.zeros(0))
            z.register_hook(partial(self.gradients.__setitem__, place))  # type: ignore[no-untyped-call]

    def gather_(self, keys: Keys) -> Keys:
        """The step's gather: passes on what it is given, and keeps it."""
        found = self.gather(keys)
        self.own.append(keys)
        self.everyone.append(found)
        return found

    def update_query_(self, losses: Iterable[Contrast]) -> None:
        """The step's query update: performs it, and looks before and after."""
        before = self._look("keys")
        keys = torch.cat([own.vectors for own in self.own])
        self.row["staleness"] = self.recorder.follow(self, keys)
        self.update(losses)
        self.row["moved"] = float(_norm(self._look("updated").sub_(before)))
        if self.detailed or self.recorder.followed_rows(self.number):
            self._scores(keys)

    # ------------------------------------------------------------------------------------------------- row

    @torch.no_grad()
    def _scores(self, keys: Tensor) -> None:
        """Queries against the dictionary that they were scored against: it has not changed yet."""
        config, Q = self.recorder.contrast, self.full
        R = min(form.MAX_ROWS, len(keys))
        q_all = F.normalize(torch.cat(self.z), dim=1)
        q, k = q_all[:R].float(), keys[:R].float()
        first = self.fill == 0
        dictionary = join(self.everyone) if first else self.queue.snapshot()
        ids = torch.cat([part.ids for part in self.parts])[:R]
        groups = torch.cat([part.groups for part in self.parts])[:R]
        masked = torch.zeros(R, len(dictionary), dtype=torch.bool, device=q.device)
        if config.mask_source or first:
            excluded = same_source(ids, groups, dictionary, by_group=config.mask_group)
            masked[excluded.rows, excluded.columns] = True
        positive = (q * k).sum(1)
        cosines = q @ dictionary.vectors.float().T
        open_ = cosines.masked_fill(masked, -torch.inf)
        logits = torch.cat([positive[:, None], open_], 1).double() / config.T
        sums = torch.logsumexp(logits, 1)
        losses = sums - logits[:, 0]
        self.row["followed"] = self._followed(cosines, masked, open_, positive, sums)
        if not self.detailed:
            return
        top = open_.topk(min(3, open_.shape[1]), 1)
        p = logits[:Q].softmax(1)
        pulled = p[:, 1:].float() @ dictionary.vectors.float()  # sum p_i k_i over the negatives, [Q, D]
        gradient_q = (pulled.double() - p[:, 1:].sum(1, keepdim=True) * k[:Q].double()) / config.T
        norms = torch.cat(self.z)[:Q].norm(dim=1)
        gradient_z = torch.cat(self.gradients)[:Q].norm(dim=1) * len(q_all)  # the loss is the mean over all queries
        image = self.recorder.images.row
        negatives = np.subtract(histogram(cosines), histogram(cosines[masked])).tolist()
        hard = dictionary.ids[top.indices[:Q].flatten()].tolist()
        for number in hard:
            image(number, picture=True)
        images = torch.cat([part.ids for part in self.parts])[: self.named].tolist()
        part = self.parts[0]
        shown = min(Q, len(part.ids))
        views = self.recorder.to_pixels(torch.cat([part.x_q[:shown], part.x_k[:shown]]))
        pictures = [self.recorder.images.thumbnail(one) for one in views]
        self.row |= {
            "images": [image(i, picture=place < shown) for place, i in enumerate(images)],
            "views_q": pictures[:shown],
            "views_k": pictures[shown:],
            "dictionary": "batch" if first else "queue",
            "q": form.pack(q[:Q]),
            "k": form.pack(k[:Q]),
            "flat_q": form.pack(self._flat(q_all[:R], keys)),
            "flat_k": form.pack(self._flat(keys[: self.named], keys)),
            "z_norm": norms.tolist(),
            "positive": form.pack(positive),
            "losses": losses.tolist(),
            "rank": (1 + (open_ > positive[:, None]).sum(1)).tolist(),
            "excluded": masked.sum(1).tolist(),
            "negatives": form.pack(cosines[:Q]),
            "masked": [one.nonzero()[:, 0].tolist() for one in masked[:Q]],
            "top": {"rows": top.indices.tolist(), "cosines": form.pack(top.values.clamp_min(-2))},
            "histogram": {"positives": histogram(positive), "negatives": negatives},
            "gradient_q": gradient_q.norm(dim=1).tolist(),
            "gradient_z": gradient_z.tolist(),
        }

    def _followed(
        self, cosines: Tensor, masked: Tensor, open_: Tensor, positive: Tensor, sums: Tensor
    ) -> list[dict[str, Any]]:
        """What the recorded queries made of each followed key: its probability (mean, highest) and best rank."""
        told = []
        for birth, rows in self.recorder.followed_rows(self.number).items():
            free = ~masked[:, rows]
            columns = cosines[:, rows]
            p = (columns.double() / self.recorder.contrast.T - sums[:, None]).exp() * free
            queries, summed, highest = free.sum(0).tolist(), p.sum(0).tolist(), p.amax(0).tolist()
            for place, (count, total, high) in enumerate(zip(queries, summed, highest, strict=True)):
                if not count:
                    continue
                column = columns[:, place]
                above = torch.count_nonzero(open_ > column[:, None], dim=1) + (positive > column)
                told.append(
                    {
                        "birth": birth,
                        "place": place,
                        "queries": count,
                        "mean_p": total / count,
                        "max_p": high,
                        "best_rank": 1 + int(above[free[:, place]].min()),
                    }
                )
        return told

    def _flat(self, vectors: Tensor, keys: Tensor) -> Tensor:
        self.recorder.flat(keys)  # the first keys decide the projection
        return self.recorder.flat(vectors)

    def finish(self, m: float) -> dict[str, Any]:
        """The step is over: what the EMA and the queue did."""
        self._look("end")
        entered = sum(len(keys) for keys in self.everyone)
        leaving = max(self.fill + entered - self.queue.K, 0)
        still = [p for p in self.pair.theta_k if p.grad is not None or p.requires_grad]
        self.row |= {
            "loss": self.update.loss,
            "chance": self.update.chance,
            "lr": self.update.lr,
            "m": m,
            "fill": self.fill,
            "pointer": self.pointer,
            "entered": entered,
            "left": min(leaving, self.fill),
            "fill_after": self.queue.fill,
            "pointer_after": self.queue.pointer,
            "theta": self.theta,
            "parameter": self.parameter,
            "gradient_theta_q": self.update.gradient_norm,
            "gradient_theta_k": None,
            "gradient_queue": None,
            "with_gradient_on_key_side": len(still) + int(self.queue.vectors.requires_grad),
            "layers": self._layers() if self.detailed else [],
            "bn_apart": self._bn_apart(),
        }
        return self.row

    @torch.no_grad()
    def _look(self, moment: str) -> Tensor:
        """Both networks' norms and how far they are apart, at one of a step's moments. Gives theta_q [P] as it is now.

        Also one weight of each, the first of the first layer: the EMA can be checked on it by hand.
        """
        q = torch.cat([p.detach().flatten() for p in self.pair.theta_q])
        k = torch.cat([p.flatten() for p in self.pair.theta_k])
        self.parameter[moment] = [float(q[0]), float(k[0])]
        norms = torch.stack([_norm(q), _norm(k), _norm(k.sub_(q))]).tolist()
        self.theta[moment] = dict(zip(("q", "k", "apart"), norms, strict=True))
        return q

    @torch.no_grad()
    def _layers(self) -> list[dict[str, Any]]:
        """How far f_k's layers are from f_q's, at most 24 of those with a weight matrix."""
        named = [(name, p) for name, p in self.pair.query.named_parameters() if p.requires_grad]
        wide = [(name, q, k) for (name, q), k in zip(named, self.pair.theta_k, strict=True) if q.ndim > 1]
        if len(wide) > 24:
            wide = [wide[i] for i in np.linspace(0, len(wide) - 1, 24).astype(int)]
        names = [name for name, _, _ in wide]
        q: list[Tensor] = [one for _, one, _ in wide]
        k: list[Tensor] = [one for _, _, one in wide]
        norms = torch.stack(torch._foreach_norm(q)).tolist()
        apart = torch.stack(torch._foreach_norm(torch._foreach_sub(q, k))).tolist()
        return [{"name": name, "apart": a, "norm": n} for name, a, n in zip(names, apart, norms, strict=True)]

    def _bn_apart(self) -> float | None:
        """How far the running means of f_q and f_k are apart; None without batch norm. No EMA moves them."""
        pairs = list(zip(batch_norms(self.pair.query), batch_norms(self.pair.key), strict=True))
        apart = [
            q.running_mean - k.running_mean
            for q, k in pairs
            if q.running_mean is not None and k.running_mean is not None
        ]
        return float(_norm(torch.cat(apart))) if apart else None


def _norm(flat: Tensor) -> Tensor:
    """The Euclidean norm of float32 [P], in parts: summed as one, float32 loses the fourth digit of ten million."""
    norm: Tensor = torch.linalg.vector_norm(torch.stack(torch._foreach_norm(torch.split(flat, 1 << 14))))
    return norm


@contextlib.contextmanager
def recording(
    recorder: Recorder | None,
    state: TrainState,
    parts: Sequence[ViewPair],
    update: Updated,
    gather: Gather,
    m: float,
) -> Iterator[tuple[UpdateQuery, Gather]]:
    """`Recorder.step` where this step is to be recorded; else the update and the gather as they are."""
    if recorder is None or not recorder.wants(state.step):
        yield update, gather
        return
    with recorder.step(state, parts, update, gather, m) as wrapped:
        yield wrapped
