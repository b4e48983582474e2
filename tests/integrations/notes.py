# SPDX-License-Identifier: Apache-2.0
"""What several tests of integrations share: a recorder that remembers, and a policy under which something happens."""

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np

import trimtab

EXAMPLES = Path(__file__).parents[2] / "examples"
POLICY = trimtab.Policy(max_high=2, alpha=1.02, alpha_warmup=None, beta=None, lock_steps=1)


class Notes:
    """Every row that a controller records: the norms to the last bit, and the set that ran high."""

    def __init__(self) -> None:
        self.rows: list[tuple[int, bytes, bytes, float]] = []

    def open_trace(self, units: list[str], **_: Any) -> None:
        self.units = units

    def observe(
        self, step: int, norms: np.ndarray, seen: np.ndarray, high: np.ndarray, grad_norm: float, *_: Any, **__: Any
    ) -> None:
        self.rows.append((step, norms.tobytes(), high.tobytes(), grad_norm))

    @property
    def norms(self) -> np.ndarray:
        return np.stack([np.frombuffer(norms, np.float32) for _, norms, _, _ in self.rows])

    @property
    def high(self) -> np.ndarray:
        return np.stack([np.frombuffer(high, bool) for _, _, high, _ in self.rows])

    def is_eventful(self) -> bool:
        """Whether units went high, and not the same ones all the time: equal rows then mean equal decisions."""
        return len({high for _, _, high, _ in self.rows}) > 2


@contextmanager
def without(package: str, module: str) -> Iterator[None]:
    """A place where a package cannot be imported, and our module has not been."""
    kept = {
        name: sys.modules.pop(name) for name in list(sys.modules) if name.split(".")[0] == package or name == module
    }
    sys.modules[package] = None  # type: ignore[assignment]
    try:
        yield
    finally:
        del sys.modules[package]
        sys.modules.pop(module, None)
        sys.modules.update(kept)


def example(name: str) -> tuple[Callable[..., list[float]], Callable[..., list[float]]]:
    """`main` of an example, and of the plain script that it is without its marked lines: at most six of them."""
    lines = (EXAMPLES / name).read_text(encoding="utf-8").splitlines()
    bare = [line for line in lines if not line.endswith("# trimtab")]
    assert len(lines) < 60
    assert 0 < len(lines) - len(bare) <= 6
    mains = []
    for number, version in enumerate((lines, bare)):
        names: dict[str, Any] = {"__name__": f"example{number}"}
        exec(compile("\n".join(version), name, "exec"), names)
        mains.append(names["main"])
    assert not any("trimtab." in line and "trimtab.lab" not in line for line in bare if not line.startswith((" ", "#")))
    return mains[0], mains[1]
