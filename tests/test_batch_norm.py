"""Batch norm in groups and the shuffled key batch. Where a query and its key are made of the same pixels by equal
networks, they are the same vector if, and only if, they were normalised by the same statistics."""

import copy
from collections.abc import Iterable

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.nn import functional as F

from mocokit.contrast.batch_norm import (
    Shuffle,
    batch_norms,
    deal,
    in_groups,
    shuffle_by,
    statistics_untouched,
)
from mocokit.contrast.encoders import Backbone, Encoder, EncoderConfig, EncoderPair, build_encoder
from mocokit.contrast.key_queue import NO_ID, KeyQueue
from mocokit.contrast.losses import Contrast
from mocokit.contrast.steps import ContrastConfig, ViewPair, step_of


def signature_pair(groups: int) -> EncoderPair:
    """h = pixels less their group's mean, over their group's deviation: the statistics lie open."""
    norm = nn.BatchNorm2d(3)
    encoder = Encoder(Backbone(norm, spatial=True), nn.Identity(), 3, 3)
    encoder.normalise_in_groups_(groups)
    pair = EncoderPair(encoder)
    pair.train()
    return pair


def planted(N: int, seed: int) -> Tensor:
    """Images of one random colour each: every subset of a batch has a mean and a deviation of its own."""
    generator = torch.Generator().manual_seed(seed)
    return torch.rand(N, 3, 1, 1, generator=generator).expand(N, 3, 2, 2).contiguous()


def same_statistics(pair: EncoderPair, x: Tensor, shuffle: Shuffle | None) -> Tensor:
    """Which queries share the batch statistics of their key, as a MoCo step makes both: bool [N]."""
    N, queries = len(x), []
    part = ViewPair(x, x, torch.arange(N), torch.full((N,), NO_ID), shuffle)
    queue = KeyQueue(N, 3)
    pair.query.register_forward_hook(lambda _, __, z: queries.append(F.normalize(z.detach(), dim=1)))

    def look(losses: Iterable[Contrast]) -> None:
        assert len(list(losses)) == 1

    step_of(ContrastConfig())(
        pair,
        queue,
        [part],
        scoring=ContrastConfig().scoring(),
        m=1.0,
        step=0,
        update_query_=look,
        gather=lambda keys: keys,
    )
    assert torch.equal(queue.ids, part.ids)
    return (queries[0] - queue.vectors).abs().amax(1) < 1e-5


@pytest.mark.parametrize(("N", "groups"), [(6, 2), (16, 2), (32, 8), (25, 3), (64, 8)])
@pytest.mark.parametrize("seed", range(3))
def test_no_query_shares_statistics_with_its_key(N: int, groups: int, seed: int) -> None:
    x = planted(N, seed)
    assert same_statistics(signature_pair(1), x, None).all()
    assert same_statistics(signature_pair(groups), x, None).all()  # groups alone don't help
    assert same_statistics(signature_pair(1), x, shuffle_by(deal(N, 2))).all()  # nor does a shuffle alone
    assert not same_statistics(signature_pair(groups), x, shuffle_by(deal(N, groups))).any()


@settings(max_examples=200, deadline=None)
@given(st.integers(2, 12), st.data())
def test_dealt_groups_are_no_groups_of_queries(groups: int, data: st.DataObject) -> None:
    N = data.draw(st.integers(2 * groups, 120))
    order = deal(N, groups)
    assert sorted(order.tolist()) == list(range(N))
    queries = [frozenset(part.tolist()) for part in torch.arange(N).tensor_split(groups)]
    keys = [frozenset(part.tolist()) for part in order.tensor_split(groups)]
    assert not set(queries) & set(keys)


@settings(max_examples=50, deadline=None)
@given(st.integers(1, 30), st.integers(0, 10**6))
def test_keys_come_back_in_the_images_order(N: int, seed: int) -> None:
    order = torch.randperm(N, generator=torch.Generator().manual_seed(seed))
    shuffle = shuffle_by(order)
    x = torch.arange(2 * N).view(N, 2)
    assert torch.equal(shuffle.there(x), x[order])
    assert torch.equal(shuffle.back(shuffle.there(x)), x)


def test_a_shuffle_without_groups_changes_no_key() -> None:
    encoder = build_encoder(EncoderConfig(backbone="small-cnn-4-8", dim=4), image_size=8, seed=0).train()
    x, shuffle = torch.randn(8, 3, 8, 8), shuffle_by(deal(8, 2))
    torch.testing.assert_close(shuffle.back(encoder(shuffle.there(x))), encoder(x), rtol=1e-4, atol=1e-5)


def test_each_group_is_normalised_by_itself_and_the_running_statistics_see_all() -> None:
    encoder = build_encoder(EncoderConfig(backbone="small-cnn-4-8", dim=4), image_size=8, seed=0).train()
    apart = copy.deepcopy(encoder)
    encoder.normalise_in_groups_(3)
    x = torch.randn(10, 3, 8, 8)
    h, z = encoder.h_and_z(x)
    parts = [apart.h_and_z(part) for part in (x[:4], x[4:7], x[7:])]
    torch.testing.assert_close(h, torch.cat([part[0] for part in parts]))
    torch.testing.assert_close(z, torch.cat([part[1] for part in parts]))
    for mine, other in zip(batch_norms(encoder), batch_norms(apart), strict=True):
        assert mine.num_batches_tracked == 3
        torch.testing.assert_close(mine.running_mean, other.running_mean)
        torch.testing.assert_close(mine.running_var, other.running_var)


def test_groups_are_for_training_only() -> None:
    encoder = build_encoder(EncoderConfig(backbone="small-cnn-4-8", dim=4), image_size=8, seed=0)
    encoder.train()(torch.randn(6, 3, 8, 8))
    encoder.eval()
    x = torch.randn(3, 3, 8, 8)
    plain = encoder(x), encoder.features(x), encoder.spatial_map(x)
    encoder.normalise_in_groups_(4)
    for got, want in zip((encoder(x), encoder.features(x), encoder.spatial_map(x)), plain, strict=True):
        assert torch.equal(got, want)


def test_gradient_passes_through_groups_and_the_pair_copies_them() -> None:
    encoder = build_encoder(EncoderConfig(backbone="small-cnn-4-8", dim=4), image_size=8, seed=0)
    encoder.normalise_in_groups_(2)
    pair = EncoderPair(encoder)
    assert pair.key.bn_groups == 2
    pair.train()
    pair.query(torch.randn(4, 3, 8, 8)).square().sum().backward()
    assert all(p.grad is not None and torch.isfinite(p.grad).all() for p in pair.theta_q)


def test_groups_without_effect_or_too_small_are_refused() -> None:
    bare = Encoder(Backbone(nn.Conv2d(3, 4, 3), spatial=True), nn.Linear(4, 2), 4, 2)
    bare.normalise_in_groups_(1)
    with pytest.raises(ValueError, match="without batch norm"):
        bare.normalise_in_groups_(2)
    synced = Encoder(Backbone(nn.SyncBatchNorm(3), spatial=True), nn.Linear(3, 2), 3, 2)
    with pytest.raises(ValueError, match="SyncBN, not both"):
        synced.normalise_in_groups_(2)
    with pytest.raises(ValueError, match=r"at least 8 images at once\. Got 7"):
        in_groups(lambda x: x, torch.zeros(7, 1), 4)


def test_statistics_untouched_normalises_as_ever() -> None:
    norm = nn.BatchNorm1d(3).train()
    fixed = nn.BatchNorm1d(3, track_running_stats=False)
    both = nn.Sequential(norm, fixed)
    x = torch.randn(5, 3)
    want = copy.deepcopy(both)(x)
    with statistics_untouched(both):
        assert torch.equal(both(x), want)
    assert norm.num_batches_tracked == 0
    assert torch.equal(norm.running_mean, torch.zeros(3))  # type: ignore[arg-type]
    assert norm.track_running_stats
    assert not fixed.track_running_stats
    both(x)
    assert norm.num_batches_tracked == 1
