"""The method's settings: what has no effect on it is refused."""

from dataclasses import fields
from typing import Any

import pytest

from mocokit.contrast.encoders import EncoderConfig
from mocokit.contrast.method import ContrastConfig

OTHER: dict[str, Any] = {
    "K": 128,
    "T": 0.5,
    "m": 0.99,
    "m_end": 1.0,
    "order": "ema-first",
    "symmetric": True,
    "bn_groups": 4,
    "shuffle_bn": False,
    "mask_source": False,
    "mask_group": True,
    "queue_init": "random",
}
USED = {
    "moco": set(OTHER),
    "moco-v3": {"T", "m", "m_end", "mask_group"},
    "simclr": {"T", "mask_group"},
    "byol": {"m", "m_end"},
}


def test_every_setting_is_covered() -> None:
    assert {field.name for field in fields(ContrastConfig)} == {"method", *OTHER}


@pytest.mark.parametrize("name", OTHER)
@pytest.mark.parametrize("method", USED)
def test_a_setting_without_effect_is_an_error(method: Any, name: str) -> None:
    if name in USED[method]:
        config = ContrastConfig(method=method, **{name: OTHER[name]})
        assert getattr(config, name) == OTHER[name]
        assert config.uses(name)
    else:
        assert not ContrastConfig(method=method).uses(name)
        with pytest.raises(ValueError, match=f"`{name}` has no effect on {method}"):
            ContrastConfig(method=method, **{name: OTHER[name]})


def test_bad_values_are_refused() -> None:
    for bad in ({"method": "dino"}, {"bn_groups": 0}, {"m": 2.0, "method": "byol"}, {"T": 0.0, "method": "simclr"}):
        with pytest.raises(ValueError):
            ContrastConfig(**bad)  # type: ignore[arg-type]


def test_what_a_method_has() -> None:
    has = {name: (ContrastConfig(method=name).has_queue, ContrastConfig(method=name).has_momentum) for name in USED}  # type: ignore[arg-type]
    assert has == {"moco": (True, True), "moco-v3": (False, True), "simclr": (False, False), "byol": (False, True)}


def test_momentum_reaches_its_end_with_the_last_ema() -> None:
    config = ContrastConfig(method="byol", m=0.996, m_end=1.0)
    assert config.m_at(99, 100) == 1.0
    assert config.m_at(49, 100) == pytest.approx(0.998)
    assert ContrastConfig(method="byol", m=0.996).m_at(99, 100) == 0.996


def test_method_and_encoder_must_go_together() -> None:
    predicting = EncoderConfig(predictor="mlp-bn")
    for method in ("moco", "simclr"):
        with pytest.raises(ValueError, match=f"`predictor` has no effect on {method}"):
            ContrastConfig(method=method).check(predicting, 64)  # type: ignore[arg-type]
    for method in ("moco-v3", "byol"):
        ContrastConfig(method=method).check(predicting, 64)  # type: ignore[arg-type]
        ContrastConfig(method=method).check(EncoderConfig(), 64)  # type: ignore[arg-type]
    grouped = ContrastConfig(bn_groups=8)
    grouped.check(EncoderConfig(), 16)
    with pytest.raises(ValueError, match=r"at least 16 images at once\. Got 15"):
        grouped.check(EncoderConfig(), 15)
