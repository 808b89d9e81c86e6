from __future__ import annotations

import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import bridge
from bridge.checkpoints.random_state import random_state, set_random_state


@pytest.fixture(autouse=True)
def restored() -> Iterator[None]:
    before = random_state()
    yield
    set_random_state(before)


def drawn() -> list[Any]:
    """Draw of each generator, an odd number of times from those that make normal numbers in pairs."""
    return [
        random.random(), random.gauss(), random.randbytes(3), np.random.rand(), np.random.randn(),
        np.random.permutation(9).tolist(), torch.rand(3).tolist(), torch.randperm(9).tolist(),
    ]  # fmt: skip


@given(st.integers(0, 2**32 - 1), st.integers(0, 3))
def test_generators_go_on_where_they_were(seed: int, draws: int) -> None:
    random.seed(seed)
    np.random.seed(seed)
    torch.manual_seed(seed)
    for _ in range(draws):
        drawn()
    state = random_state()
    expected = [drawn() for _ in range(3)]

    set_random_state(state)

    assert [drawn() for _ in range(3)] == expected


def test_a_state_is_not_changed_by_drawing() -> None:
    state = random_state()
    expected = drawn()
    drawn()

    for _ in range(2):
        set_random_state(state)
        assert drawn() == expected


def test_a_state_is_what_torch_loads_safely(tmp_path: Path) -> None:
    bridge.save_file(random_state(), tmp_path)
    expected = drawn()

    set_random_state(bridge.load_file(tmp_path))

    assert drawn() == expected


def test_states_of_devices_that_are_not_here_are_left_out() -> None:
    state = {**random_state(), "cuda": [torch.zeros(16, dtype=torch.uint8)] * (torch.cuda.device_count() + 1)}
    if torch.cuda.is_available():
        state["cuda"] = [*torch.cuda.get_rng_state_all(), state["cuda"][-1]]

    set_random_state(state)
