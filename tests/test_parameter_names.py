"""Where a parameter is, by its name."""

from __future__ import annotations

import pytest

from harness_ext.parameter_names import NO_LAYER, place_of


@pytest.mark.parametrize(
    ("name", "place"),
    [
        ("transformer.h.3.mlp.c_fc.weight", (3, "mlp.c_fc")),
        ("model.layers.11.self_attn.q_proj.bias", (11, "self_attn.q_proj")),
        ("model.layers.0.mlp.experts.7.w1.weight", (0, "mlp.experts.w1")),
        ("backbone.layers.2.mixer.A_log", (2, "mixer")),
        ("backbone.layers.2.A_log", (2, "A_log")),
        ("model.embed_tokens.weight", (NO_LAYER, "embed_tokens")),
        ("scale", (NO_LAYER, "scale")),
        ("layers.3", (3, "3")),
        ("model.1234567.weight", (NO_LAYER, "1234567")),
        ("model.²", (NO_LAYER, "model")),
        ("", (NO_LAYER, "")),
    ],
)
def test_names_have_places(name: str, place: tuple[int, str]) -> None:
    assert place_of(name) == place
