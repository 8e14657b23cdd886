"""Fits every cell of a few-label curve: each arm, label budget, draw and run, from where an earlier start stopped.

Four arms, with the same labels in the same cell:

- fine-tuned: the run's query encoder, all layers trained (see `tuning`);
- from scratch: the same architecture with random weights (batch norm calibrated on training images, without labels),
  the same procedure, schedule, augmentation and choices;
- frozen probe: the linear probe of the run's h; frozen random init: of the random network's pooled h.

Labels are of images or of videos. A video is learned from its clips (or frames) and judged by the mean over them: of
their logits in the first two arms, of their unit features in the others.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from torch import nn

from mocokit.data.randomness import hash_words, word
from mocokit.evaluation.baselines import calibrate, random_init_features
from mocokit.evaluation.budgets import Budget, hold_out
from mocokit.evaluation.contenders import RANDOM_SEED
from mocokit.evaluation.crossing import BankAndTest, probe_reader
from mocokit.evaluation.curve import ARMS, FINE_TUNED, FROM_SCRATCH, FROZEN
from mocokit.evaluation.features import CLIPS_AT_ONCE, IMAGES_AT_ONCE, extract, plain_batches
from mocokit.evaluation.labelled import LabelledData
from mocokit.evaluation.labelled_videos import VideoData, by_video
from mocokit.evaluation.metrics import Answers
from mocokit.evaluation.tuned_folder import Cell, TunedFolder
from mocokit.evaluation.tuning import Classifier, Task, TuneSettings, mean_by, mild_views, predict_logits, tune
from mocokit.training.run import Run
from mocokit.training.state import make_encoder

Ints = npt.NDArray[np.int64]
CALIBRATION_IMAGES = 2560


@dataclass(frozen=True, slots=True)
class CellKey:
    """Which arm, budget, draw and run."""

    arm: str
    budget: Budget
    draw: int
    run: int

    @property
    def name(self) -> str:
        """The cell's file name, without its ending."""
        return f"{self.arm.replace(' ', '-')}-{self.budget.name}-d{self.draw}-r{self.run}"


def cell_keys(budgets: Sequence[Budget], draws: int, runs: int) -> Iterator[CellKey]:
    """Every cell, small budgets first; all labels are drawn once."""
    for budget in budgets:
        for draw in range(1 if budget.whole else draws):
            for run in range(runs):
                for arm in ARMS:
                    yield CellKey(arm, budget, draw, run)


class FewLabels:
    """Labelled data, runs and a plan, ready to fit cells. Nothing of a test label is read here."""

    def __init__(
        self,
        runs: Sequence[Run],
        data: LabelledData | VideoData,
        settings: TuneSettings,
        *,
        draws: int,
        seed: int,
        device: torch.device,
    ) -> None:
        self.runs, self.data, self.settings, self.draws, self.seed = runs, data, settings, draws, seed
        self.bank = np.sort(np.concatenate([data.split.train, data.split.val]))
        self.device = device
        index = data.index
        self.units = np.where(index.groups >= 0, index.groups, index.ids)
        self._batch = CLIPS_AT_ONCE if isinstance(data, VideoData) else IMAGES_AT_ONCE
        self._frozen: dict[tuple[str, int], BankAndTest] = {}

    def rows(self, key: CellKey) -> Ints:
        """The index rows whose labels the cell may see, ascending. Each run has draws of its own."""
        index, number = self.data.index, key.run * self.draws + key.draw
        labels, ids = index.labels[self.bank], index.ids[self.bank]
        found: Ints = self.bank[key.budget.draw(labels, ids, number, self.seed, index.class_names)]
        return found

    def fit(self, key: CellKey) -> tuple[Cell, Classifier | None]:
        """Fit one cell; the classifier is None for the frozen arms."""
        rows = self.rows(key)
        if key.arm in (FINE_TUNED, FROM_SCRATCH):
            return self._tuned(key, rows)
        bank, test = self._features(key)
        places = np.searchsorted(self.bank, rows)
        read = probe_reader(self.data.n_classes, seed=self.seed)
        reading = read(bank[places], self.data.index.labels[rows], self.units[rows], test)
        assert reading.confidence is not None
        return Cell(reading.predicted, _rounded(reading.confidence), {"labels": len(rows)}), None

    def _tuned(self, key: CellKey, rows: Ints) -> tuple[Cell, Classifier]:
        run, data, index = self.runs[key.run], self.data, self.data.index
        task = Task(
            store=data.store,
            ids=data.row_ids,
            labels=data.by_row(index.labels),
            units=data.by_row(self.units),
            n_classes=data.n_classes,
            views=mild_views(run.config.views),
            device=self.device,
            whole=data.by_row(np.arange(len(index))) if isinstance(data, VideoData) else None,
        )
        held = hold_out(index.labels[rows], self.units[rows], self.seed)
        number = key.run * self.draws + key.draw
        backbone = self._backbone(run) if key.arm == FINE_TUNED else self._random(run, number)
        order = int(hash_words(self.seed, word("fine-tuning"), number)[0] >> np.uint64(2))
        fit, chosen_on = data.of(rows[~held])[0], data.of(rows[held])[0]
        tuned = tune(backbone, task, fit, chosen_on, self.settings, seed=order, pretrained=key.arm == FINE_TUNED)
        test, place = data.of(data.split.test)
        each = predict_logits(tuned.model, task, test).double()
        logits = mean_by(each, place, len(data.split.test)) / tuned.temperature
        sure = torch.softmax(logits, 1).max(1)
        facts = {
            "labels": len(rows),
            "held": int(held.sum()),
            "lr": tuned.lr,
            "steps": tuned.steps,
            "held_loss": tuned.held_loss,
            "temperature": tuned.temperature,
            "held_ece": tuned.held_ece,
        }
        return Cell(sure.indices.numpy().astype(np.int64), _rounded(sure.values.numpy()), facts), tuned.model

    def _backbone(self, run: Run) -> nn.Module:
        return run.encoder("query").backbone

    def _random(self, run: Run, number: int) -> nn.Module:
        """Random weights that no other cell of another draw or run has, batch norm calibrated."""
        views = run.config.views
        encoder = make_encoder(run.config.encoder, views.size, RANDOM_SEED + number).to(self.device)
        some = self.data.of(self.data.split.train)[0][:CALIBRATION_IMAGES]
        batches = plain_batches(
            self.data.store,
            some,
            size=views.size,
            mean=views.mean,
            std=views.std,
            batch=min(self._batch, len(some)),
            device=self.device,
        )
        calibrate(encoder, batches)
        return encoder.backbone

    def _features(self, key: CellKey) -> BankAndTest:
        place = (key.arm, key.run)
        if place not in self._frozen:
            run, cut = self.runs[key.run], len(self.bank)
            wholes = np.concatenate([self.bank, self.data.split.test])
            rows, place_of = self.data.of(wholes)
            views, device = run.config.views, self.device
            if key.arm == FROZEN:
                h = extract(
                    run.encoder("query").to(device),
                    self.data.store,
                    rows,
                    size=views.size,
                    mean=views.mean,
                    std=views.std,
                    batch=self._batch,
                    device=device,
                ).h
            else:
                h = random_init_features(
                    lambda s: make_encoder(run.config.encoder, views.size, RANDOM_SEED + s),
                    self.data.store,
                    rows,
                    rows[place_of < cut],
                    key.run,
                    size=views.size,
                    mean=views.mean,
                    std=views.std,
                    batch=self._batch,
                    device=device,
                ).pooled
            if isinstance(self.data, VideoData):
                h = by_video(h, place_of, len(wholes))
            self._frozen[place] = (h[:cut], h[cut:])
        return self._frozen[place]


def _rounded(confidence: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
    """As it is written, so that a cell read back is the same one."""
    return np.round(confidence, 6)


def fit_cells(
    task: FewLabels,
    budgets: Sequence[Budget],
    folder: TunedFolder,
    *,
    say: Callable[[int, int, str], None],
) -> dict[CellKey, Cell]:
    """Every cell, fitted now or read from the folder. The weights of fine-tuned cells of the last budget are kept.

    say(cells done, cells in all, what the last one was) is called after each cell that was fitted.
    """
    keys = list(cell_keys(budgets, task.draws, len(task.runs)))
    n_test = len(task.data.split.test)
    found: dict[CellKey, Cell] = {}
    for number, key in enumerate(keys, 1):
        cell = folder.read_cell(key.name, n_test)
        if cell is None:
            cell, model = task.fit(key)
            kept = model if key.arm == FINE_TUNED and key.budget == budgets[-1] else None
            folder.write_cell(key.name, cell, kept)
            chosen = f", lr {cell.facts['lr']:g}, {cell.facts['steps']} steps" if "lr" in cell.facts else ""
            say(number, len(keys), f"{key.arm}, {cell.facts['labels']} labels, draw {key.draw}, run {key.run}{chosen}")
        found[key] = cell
    return found


def answers_of(cells: dict[CellKey, Cell], budget: Budget, runs: int) -> dict[str, Answers]:
    """The answers of each arm at one budget; replicates as in `crossing`: draws of one run, or runs."""
    out: dict[str, Answers] = {}
    for arm in ARMS:
        mine = [(key, cell) for key, cell in cells.items() if key.arm == arm and key.budget == budget]
        out[arm] = Answers(
            np.stack([cell.predicted for _, cell in mine]),
            np.array([key.draw if runs == 1 else key.run for key, _ in mine], np.int64),
            np.stack([cell.confidence for _, cell in mine]),
        )
    return out


def best_cell(cells: dict[CellKey, Cell], budget: Budget) -> CellKey:
    """The fine-tuned cell of a budget whose held-out labels were likeliest; without such labels the first."""
    mine = [key for key in cells if key.arm == FINE_TUNED and key.budget == budget]

    def loss(key: CellKey) -> float:
        held = cells[key].facts.get("held_loss")
        return float("inf") if held is None else float(held)

    return min(mine, key=loss)
