"""Random signs: fair, independent, and of their seed, block and purpose only."""

from __future__ import annotations

import math

import pytest
import torch

from harness_ext.flatness.signs import generator_of, random_signs


@pytest.mark.parametrize("count", [1, 7, 64, 65, 1000])
def test_values_and_shape(count: int) -> None:
    signs = random_signs((count,), generator_of(0, 0, "test"))
    assert signs.shape == (count,)
    assert signs.dtype == torch.float32
    assert set(signs.tolist()) <= {-1.0, 1.0}


def test_they_are_fair_and_independent_within_words_of_64() -> None:
    signs = random_signs((4096, 64), generator_of(0, 0, "test")).double()
    # 64 means and 2,016 products, each within 6 standard errors: false-alarm rate below 1e-5.
    bound = 6 / math.sqrt(4096)
    assert signs.mean(0).abs().max() < bound
    products = signs.T @ signs / 4096 - torch.eye(64, dtype=torch.float64)
    assert products.abs().max() < bound


def test_they_depend_on_each_part_of_the_name() -> None:
    def draw(*of: object) -> list[float]:
        return random_signs((256,), generator_of(*of)).tolist()  # type: ignore[arg-type]

    first = draw(0, 0, "a")
    assert draw(0, 0, "a") == first
    for other in ((1, 0, "a"), (0, 1, "a"), (0, 0, "b")):
        assert draw(*other) != first
