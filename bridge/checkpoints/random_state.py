"""The states of random generators of one rank, as what a checkpoint holds."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import torch


def random_state() -> dict[str, Any]:
    """Return the states of Python's, NumPy's and torch's generators, those of all CUDA devices included."""
    version, words, gauss = random.getstate()
    legacy: Any = np.random.get_state()
    kind, key, position, has_gauss, cached = legacy
    return {
        "python": {"version": version, "words": torch.tensor(words), "gauss": gauss},
        "numpy": {
            "kind": str(kind), "key": torch.from_numpy(key.astype(np.int64)), "position": int(position),
            "has_gauss": int(has_gauss), "cached": float(cached),
        },
        "torch": torch.get_rng_state(),
        "cuda": torch.cuda.get_rng_state_all() if torch.cuda.is_available() else [],
    }  # fmt: skip


def set_random_state(state: dict[str, Any]) -> None:
    """Bring the generators back to a state. Those of CUDA devices that are not here are left out."""
    python, numpy = state["python"], state["numpy"]
    random.setstate((python["version"], tuple(python["words"].tolist()), python["gauss"]))
    key = numpy["key"].numpy().astype(np.uint32)
    np.random.set_state((numpy["kind"], key, numpy["position"], numpy["has_gauss"], numpy["cached"]))
    torch.set_rng_state(state["torch"])
    for device, one in enumerate(state["cuda"][: torch.cuda.device_count()]):
        torch.cuda.set_rng_state(one, device)
