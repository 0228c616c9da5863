"""A copy of a dataset that is smaller than the published one is a sample, and results say so."""

from __future__ import annotations

import pytest
from worlds import World, evaluate, hf_model, natural, probe, report

SIZES = {"train": 400, "test": 16, "validation": 7}
"""Of the world's splits train has 40 rows and test 16; the zero-shot task does not open train, and neither opens validation."""


def test_the_report_and_a_warning_name_the_splits_that_were_read_and_differ(
    world: World, caplog: pytest.LogCaptureFixture
) -> None:
    results = evaluate(hf_model(), natural(metadata={"split_sizes": SIZES}), probe(metadata={"split_sizes": SIZES}))
    assert "sample" not in report(results, "natural_films")
    assert report(results, "probe_films")["sample"] == {"train": "40 of 400"}
    (warning,) = [entry.getMessage() for entry in caplog.records if "not the published one" in entry.getMessage()]
    assert warning.startswith("probe_films: this copy of")
    assert "train: 40 of 400" in warning


@pytest.mark.parametrize("sizes", [["train"], {"train": "all"}, 7])
def test_split_sizes_are_whole_numbers(world: World, sizes: object) -> None:
    with pytest.raises(ValueError, match=r"`split_sizes:` of task 'natural_films' takes .*train: 120000"):
        natural(metadata={"split_sizes": sizes})
