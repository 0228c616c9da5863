from __future__ import annotations

from collections.abc import Iterator

import pytest
from worlds import World, a_world


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> Iterator[World]:
    with a_world(tmp_path_factory.mktemp("world")) as made:
        yield made
