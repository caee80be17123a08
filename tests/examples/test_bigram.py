import itertools
import math

import numpy as np
import pytest
from support import bigram


def brute_force(text: bytes, window: bytes) -> float:
    total = 0.0
    for before, after in itertools.pairwise(window):
        pair = sum(text[i : i + 2] == bytes([before, after]) for i in range(len(text) - 1))
        first = sum(text[i] == before for i in range(len(text) - 1))
        total -= math.log((pair + 0.1) / (first + 0.1 * 256))
    return total / (len(window) - 1)


@pytest.mark.parametrize("window", [b"abra", b"zebra", b"\xff\x00\xff"])
def test_it_equals_a_brute_force_count(window):
    text = b"abracadabra, said the zebra\n"
    log_probabilities = bigram.fit(np.frombuffer(text, np.uint8))
    loss = bigram.losses(log_probabilities, np.frombuffer(window, np.uint8)[None])
    assert loss == pytest.approx([brute_force(text, window)], rel=1e-12)


def test_what_follows_each_byte_is_a_distribution():
    text = np.random.default_rng(0).integers(0, 256, 5000).astype(np.uint8)
    assert np.exp(bigram.fit(text)).sum(axis=1) == pytest.approx(np.ones(256))


def test_a_loss_per_window():
    log_probabilities = bigram.fit(np.frombuffer(b"ababababab", np.uint8))
    windows = np.frombuffer(b"ababbaab", np.uint8).reshape(2, 4)
    losses = bigram.losses(log_probabilities, windows)
    assert losses.shape == (2,)
    assert losses[0] < losses[1]
