"""Where a parameter of a transformer is, by its name. Pure."""

from __future__ import annotations

__all__ = ["NO_LAYER", "place_of"]

NO_LAYER = -1
"""Layer of what belongs to none: embeddings, the last norm, an untied head."""

_MOST_DIGITS = 6
"""Of a layer's number; a longer one is part of a name."""


def place_of(parameter: str) -> tuple[int, str]:
    """Return layer and kind of a parameter's name: (3, "mlp.c_fc") for `transformer.h.3.mlp.c_fc.weight`.

    The first number in a name is the layer's; what stands before it is the list of layers, and the last part is weight, bias or
    the like. Experts of a mixture are one kind. Any text has a place.
    """
    parts = parameter.split(".")
    numbers = [place for place, part in enumerate(parts) if part.isdecimal()]
    if not numbers or len(parts[numbers[0]]) > _MOST_DIGITS:
        return NO_LAYER, parts[-2] if len(parts) > 1 else parts[0]
    inside = parts[numbers[0] + 1 :]
    kind = ".".join(part for part in inside[:-1] if not part.isdecimal()) or (inside or parts)[-1]
    return int(parts[numbers[0]]), kind
