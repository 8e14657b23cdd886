"""Momentum contrast in NumPy, every gradient by hand: `python examples/mini_moco_numpy.py`.

An "image" is 8 numbers that make it what it is, and 24 that are dealt out anew in each of its views. Nobody says which
are which; telling the views of one image from those of the others is enough to find out.
"""

import numpy as np

N, K, T, M, LR = 32, 128, 0.2, 0.95, 0.3  # images a step, keys in the queue, temperature, EMA's momentum, step size
SOURCES, SIGNAL, NUISANCE, HIDDEN, D = 512, 8, 24, 64, 16


def encode(theta, x):
    """z = normalize(relu(x W1) W2), and what the gradient needs of the way there."""
    hidden = np.maximum(x @ theta[0], 0)
    z = hidden @ theta[1]
    length = np.linalg.norm(z, axis=1, keepdims=True)
    return z / length, hidden, length


def loss_and_gradient(theta, x, k, queue, same_source):
    """InfoNCE of the queries encode(theta, x), and its gradient: to theta alone, never to a key."""
    q, hidden, length = encode(theta, x)
    positive, negative = (q * k).sum(1, keepdims=True), np.where(same_source, -np.inf, q @ queue.T)
    logits = np.hstack([positive, negative]) / T
    p = np.exp(logits - logits.max(1, keepdims=True))
    p /= p.sum(1, keepdims=True)
    loss = -np.log(p[:, 0]).mean()
    p[:, 0] -= 1  # d loss / d logits = (p - 1 where the answer is right) / N
    dq = (p[:, :1] * k + p[:, 1:] @ queue) / (T * len(x))
    dz = (dq - q * (q * dq).sum(1, keepdims=True)) / length  # only the part across q turns a unit vector
    dhidden = dz @ theta[1].T * (hidden > 0)
    return loss, [x.T @ dhidden, hidden.T @ dz]


def train(steps=400, seed=0):
    """Losses of all steps, query weights, and the sources (signal only)."""
    rng = np.random.default_rng(seed)
    signal = rng.normal(size=(SOURCES, SIGNAL))

    def view(ids):
        noisy = signal[ids] + 0.1 * rng.normal(size=(len(ids), SIGNAL))
        return np.hstack([noisy, rng.normal(size=(len(ids), NUISANCE))])

    shapes = [(SIGNAL + NUISANCE, HIDDEN), (HIDDEN, D)]
    theta_q = [rng.normal(size=shape) / np.sqrt(shape[0]) for shape in shapes]
    theta_k = [w.copy() for w in theta_q]
    queue, queue_ids, losses = np.empty((0, D)), np.empty(0, int), []
    for _ in range(steps):
        ids = rng.choice(SOURCES, N, replace=False)
        k = encode(theta_k, view(ids))[0]  # 1. keys, no gradient
        dictionary, owners = (queue, queue_ids) if len(queue) else (k, ids)  # the first step has no older keys
        same_source = ids[:, None] == owners  # an image's own older key is no negative
        loss, gradient = loss_and_gradient(theta_q, view(ids), k, dictionary, same_source)  # 2. loss
        theta_q = [w - LR * g for w, g in zip(theta_q, gradient, strict=True)]  # 3. query update
        theta_k = [M * a + (1 - M) * b for a, b in zip(theta_k, theta_q, strict=True)]  # 4. EMA
        queue, queue_ids = np.vstack([queue, k])[-K:], np.append(queue_ids, ids)[-K:]  # 5. the oldest leave
        losses.append(loss)
    return losses, theta_q, signal


if __name__ == "__main__":
    losses, theta, _ = train()
    print(f"chance with a full queue: {np.log(1 + K):.2f}")
    for step in (0, 5, 50, 100, 200, 400):
        print(f"step {step:3d}  loss {np.mean(losses[max(step - 10, 0) : step + 1]):.2f}")
    weight = np.linalg.norm(theta[0], axis=1)
    print(f"mean weight of an input: {weight[:SIGNAL].mean():.2f} signal, {weight[SIGNAL:].mean():.2f} nuisance")
