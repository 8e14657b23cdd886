"""Random numbers that are pure functions of what they are for.

Nothing in training draws from a generator with a state. Every number is a hash of (seed, epoch, sample id, view,
parameter): the same for any number of workers, any batch composition and after any interruption, so there is no
random state to save. The hash is SplitMix64's finaliser (Steele, Lea and Flood 2014, "Fast splittable
pseudorandom number generators"), applied once per word of the key. All arithmetic is on 64-bit integers, which
wrap exactly; only the last step makes a float64 out of the top 53 bits.
"""

from __future__ import annotations

import hashlib
from typing import Any

import numpy as np
import numpy.typing as npt

from mocokit.data.compiling import compiled

UInt64Array = npt.NDArray[np.uint64]
FloatArray = npt.NDArray[np.float64]

_GAMMA = 0x9E3779B97F4A7C15
_MASK = (1 << 64) - 1


@compiled
def _finalise(x: Any) -> Any:
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))


@compiled
def _absorb(state: UInt64Array, words: UInt64Array) -> None:
    """Each state [n] after one more word [n], in place."""
    for i in range(state.shape[0]):
        state[i] = _finalise((state[i] + np.uint64(_GAMMA)) ^ _finalise(words[i] + np.uint64(_GAMMA)))


def hash_words(*words: int | npt.NDArray[np.int64] | UInt64Array) -> UInt64Array:
    """Hash a key of several integer words (scalars or arrays, broadcast together) to uint64."""
    state: UInt64Array = np.zeros((1,), np.uint64)
    for word in words:
        if isinstance(word, int):
            value: UInt64Array = np.array([word & _MASK], np.uint64)
        else:
            value = np.atleast_1d(word).astype(np.uint64, copy=False)
        shape = np.broadcast_shapes(state.shape, value.shape)
        state = np.array(np.broadcast_to(state, shape), order="C")
        _absorb(state.reshape(-1), np.ascontiguousarray(np.broadcast_to(value, shape)).reshape(-1))
    return state


def word(text: str) -> int:
    """A fixed 64-bit word for a parameter's name, so that adding a parameter moves no other one's numbers."""
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "little")


def uniform(*words: int | npt.NDArray[np.int64] | UInt64Array) -> FloatArray:
    """Uniform float64 numbers in [0, 1) with 53 random bits, one per broadcast key."""
    return (hash_words(*words) >> np.uint64(11)).astype(np.float64) * 2.0**-53


def sample_id(text: str) -> int:
    """The 63-bit id of a sample from its path relative to the data root (plus member or row).

    The top bit is left clear, so that ids fit a signed 64-bit tensor and -1 can mean "no id".
    """
    digest = hashlib.sha256(text.encode("utf-8", "surrogateescape")).digest()
    return int.from_bytes(digest[:8], "little") & ((1 << 63) - 1)


def permutation(seed: int, epoch: int, ids: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
    """The order of an epoch: row numbers sorted by the hash of (seed, epoch, sample id). Shape [S], int64.

    Stable sorting breaks the (practically impossible) ties by row.
    """
    return np.argsort(hash_words(seed, word("epoch order"), epoch, ids), kind="stable").astype(np.int64)
