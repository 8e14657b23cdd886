from __future__ import annotations

import itertools
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import mocokit
from mocokit import files
from mocokit.cli import main
from mocokit.contrast.encoders import EncoderConfig, build_encoder
from mocokit.data.generated import shapes
from mocokit.data.pixels import build_pixel_store
from mocokit.data.sources import open_source
from mocokit.errors import UsageError
from mocokit.evaluation.counterfactual import (
    CHANGES,
    before_and_after_table,
    cosines,
    counterfactual,
    encoder_counterfactual,
    find_change,
    mean_of,
)


def pictures(n: int = 4, seed: int = 0) -> Tensor:
    return torch.rand(n, 3, 16, 16, generator=torch.Generator().manual_seed(seed))


def test_each_change_does_what_its_name_says() -> None:
    x = pictures()
    swapped = CHANGES["channel-swap"](x)
    assert torch.equal(swapped[:, 0], x[:, 2])
    assert torch.equal(swapped[:, 1], x[:, 1])
    gray = CHANGES["grayscale"](x)
    expected = 0.2989 * x[:, 0] + 0.587 * x[:, 1] + 0.114 * x[:, 2]
    for channel in range(3):
        torch.testing.assert_close(gray[:, channel], expected)
    assert torch.equal(CHANGES["flip"](x)[..., 0], x[..., -1])
    moved = CHANGES["shift"](x)
    assert torch.equal(moved[:, :, 2:, 2:], x[:, :, :-2, :-2])
    assert torch.equal(moved[:, :, 0, 2:], x[:, :, -2, :-2])  # what leaves at the bottom enters at the top
    torch.testing.assert_close(CHANGES["brightness"](x), 0.7 * x)
    for change in CHANGES.values():
        changed = change(x)
        assert changed.shape == x.shape
        assert 0 <= float(changed.min()) <= float(changed.max()) <= 1
        assert torch.equal(x, pictures())  # the pictures themselves stay


def test_unknown_change() -> None:
    with pytest.raises(UsageError, match=r"'flipp' is no change\. Use one of channel-swap, .* Did you mean 'flip'\?"):
        find_change("flipp")


def test_cosines_against_pairs_one_by_one() -> None:
    rng = np.random.default_rng(0)
    original, changed = rng.normal(size=(2, 7, 5))
    found = cosines(torch.from_numpy(original), torch.from_numpy(changed))

    def cosine(a: np.ndarray, b: np.ndarray) -> float:
        return float(a @ b / np.linalg.norm(a) / np.linalg.norm(b))

    assert found.changed == pytest.approx(np.mean([cosine(a, b) for a, b in zip(original, changed, strict=True)]))
    pairs = [cosine(a, b) for a, b in itertools.permutations(original, 2)]
    assert found.others == pytest.approx(np.mean(pairs))
    with pytest.raises(UsageError, match="at least 2"):
        cosines(torch.ones(1, 2), torch.ones(1, 2))


class SeesOnlyGreen(nn.Module):
    """h is the green channel, z its mean place across: invariant to a channel swap, not to a mirror."""

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        h = x[:, 1].flatten(1)
        place = torch.linspace(-1, 1, x.shape[3])
        return h, torch.stack([(x[:, 1] * place).sum((1, 2)), x[:, 1].sum((1, 2)) / 10], 1)


def test_invariance_reads_one_and_batches_do_not_matter() -> None:
    net = SeesOnlyGreen()
    x = pictures(6)
    swapped = counterfactual(net, [x], "channel-swap")
    assert swapped.h.changed == pytest.approx(1)
    assert swapped.z.changed == pytest.approx(1)
    assert swapped.h.others < 0.9
    flipped = counterfactual(net, [x], "flip")
    assert flipped.h.changed < 0.95
    assert flipped.z.changed < swapped.z.changed
    assert counterfactual(net, x.split(4), "flip") == flipped
    assert counterfactual(net, [x], lambda images: images).h.changed == pytest.approx(1)


def test_an_encoder_sees_the_change_made_before_normalisation() -> None:
    source = open_source("shapes", split="test")
    store = build_pixel_store(source, side=16, cache=None, max_bad=0.0, workers=1)
    encoder = build_encoder(EncoderConfig(backbone="small-cnn-8-16", dim=8), image_size=16, seed=0).train()
    rows = np.arange(0, 240, 4)
    mean, std = (0.1, 0.2, 0.3), (0.5, 0.4, 0.3)
    found = encoder_counterfactual(encoder, store, rows, "channel-swap", size=16, mean=mean, std=std, batch=17)
    assert encoder.training
    made = shapes()
    index = made.index.rows_of("test")
    plain = (
        torch.stack([torch.from_numpy(made.read(int(index[row]))) for row in rows]).permute(0, 3, 1, 2).float() / 255
    )
    encoder.eval()
    with torch.no_grad():
        h, h_swapped = (
            encoder.features((x - torch.tensor(mean).view(3, 1, 1)) / torch.tensor(std).view(3, 1, 1))
            for x in (plain, plain[:, [2, 1, 0]])
        )
    expected = torch.nn.functional.cosine_similarity(h, h_swapped).mean()
    assert found.h.changed == pytest.approx(float(expected), abs=1e-5)


@pytest.mark.slow
def test_evaluate_counterfactual(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    small = {"backbone": "small-cnn-8-16", "epochs": 1, "batch_size": 64, "dim": 16, "quiet": True}
    run = mocokit.pretrain("shapes", tmp_path / "run", **small)
    arguments = ["evaluate", str(run.path), "--labelled", "shapes", "--label-column", "color", "--quiet"]
    assert main([*arguments, "--counterfactual", "channel-swap", "--counterfactual", "flip"]) == 0
    said = capsys.readouterr().out
    assert "before training" in said
    assert said.splitlines()[-1].startswith("VERDICT")
    found = files.read_json(run.path / "eval" / "verdict.json")["counterfactual"]
    assert list(found) == ["channel-swap", "flip"]
    for both in found.values():
        assert list(both) == ["before", "after"]
        assert both["before"] != both["after"]
    assert main([*arguments, "--counterfactual", "swap"]) == 2


def test_table_and_mean() -> None:
    one, other = (counterfactual(SeesOnlyGreen(), [pictures(5, seed)], "flip") for seed in (0, 1))
    both = mean_of([one, other])
    assert both.h.changed == pytest.approx((one.h.changed + other.h.changed) / 2)
    text = before_and_after_table({"flip": {"before": one, "after": both}})
    assert f"{one.h.changed:6.3f} [{one.h.others:6.3f}]    {both.h.changed:6.3f} [{both.h.others:6.3f}]" in text
    assert both.to_dict()["z"]["others"] == pytest.approx((one.z.others + other.z.others) / 2)
