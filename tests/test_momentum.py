import numpy as np
import pytest
import torch

from mocokit.contrast.momentum import ema_update_, momentum_at


def test_worked_values() -> None:
    theta_k, theta_q = torch.tensor([0.0, 2.0]), torch.tensor([2.0, 4.0])
    ema_update_([theta_k], [theta_q], 0.9)
    assert theta_k.numpy() == pytest.approx([0.2, 2.2], abs=1e-7)
    ema_update_([theta_k], [theta_q], 0.9)
    assert theta_k.numpy() == pytest.approx([0.38, 2.38], abs=1e-6)
    assert theta_q.tolist() == [2.0, 4.0]


@pytest.mark.parametrize("m", [0.0, 0.3, 0.99, 0.999, 0.9999, 1.0])
def test_equals_the_paper_formula_in_float64(m: float) -> None:
    rng = np.random.default_rng(3)
    k, q = rng.normal(size=(5, 7)), rng.normal(size=(5, 7))
    theta_k = torch.tensor(k, dtype=torch.float64)
    ema_update_([theta_k], [torch.tensor(q)], m)
    np.testing.assert_allclose(theta_k.numpy(), m * k + (1 - m) * q, rtol=1e-12, atol=1e-12)


def test_m_one_freezes_and_m_zero_copies_to_the_last_bit() -> None:
    torch.manual_seed(0)
    q = [torch.randn(33, 17), torch.randn(5)]
    k = [torch.randn(33, 17), torch.randn(5)]
    before = [t.clone() for t in k]
    ema_update_(k, q, 1.0)
    assert all(torch.equal(a, b) for a, b in zip(k, before, strict=True))
    ema_update_(k, q, 0.0)
    assert all(torch.equal(a, b) for a, b in zip(k, q, strict=True))


def test_equal_networks_stay_equal_to_the_last_bit() -> None:
    torch.manual_seed(1)
    q = [torch.randn(1000)]
    k = [q[0].clone()]
    for m in (0.9, 0.99, 0.123456):
        ema_update_(k, q, m)
    assert torch.equal(k[0], q[0])


def test_schedule() -> None:
    assert {momentum_at(t, 100, 0.99, 0.99) for t in range(101)} == {0.99}
    values = [momentum_at(t, 100, 0.9, 1.0) for t in range(101)]
    assert values[0] == pytest.approx(0.9)
    assert values[50] == pytest.approx(0.95)
    assert values[100] == 1.0
    assert values == sorted(values)
    # Grill et al. 2020, section 3.3: tau = 1 - (1 - tau_base) (cos(pi k / K) + 1) / 2
    k, K = 37, 100
    assert values[k] == pytest.approx(1 - (1 - 0.9) * (np.cos(np.pi * k / K) + 1) / 2)
