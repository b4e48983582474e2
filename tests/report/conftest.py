# SPDX-License-Identifier: Apache-2.0
"""Run folders to report on, made by the real recorder and the real controller arithmetic; and a real browser."""

import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from trimtab.control.advance import State, advance
from trimtab.control.policy import Policy
from trimtab.control.record import Recorder


def make_run(
    folder: Path,
    *,
    steps: int = 400,
    units: int | list[str] = 12,
    policy: Policy | None = None,
    faults: tuple[tuple[int, int, int, float], ...] = (),
    act: bool = True,
    loss: bool = True,
    evals: bool = True,
    noise: float = 0.02,
    config: dict[str, Any] | None = None,
    seed: int = 0,
) -> np.ndarray:
    """Record a run and return its norms.

    Args:
        faults: (unit, start, width, factor): the unit's norm is multiplied in these steps, unless it runs high.
        act: whether what was chosen runs; otherwise the run only observes.
    """
    rng = np.random.default_rng(seed)
    names = [f"blocks.{i // 6}.{'qkvoud'[i % 6]}" for i in range(units)] if isinstance(units, int) else units
    policy = policy or Policy(max_high=3, alpha=1.5, beta=2.0, warmup_steps=10)
    recoverable = np.ones(len(names), bool)
    limits = policy.resolve(len(names), steps)
    state = State.fresh(recoverable, policy, limits)
    norms = 1 / np.sqrt(1 + np.arange(1, steps + 1) / 50)[:, None] * rng.lognormal(0, noise, (steps, len(names)))
    norms = norms.astype(np.float32)
    with Recorder(folder, run={"name": folder.name, "lr": 1e-3, **(config or {})}) as recorder:
        recorder.open_trace(names, recoverable, policy.to_dict(), *limits, steps)
        for t in range(steps):
            high = state.ledger.high if act else np.zeros(len(names), bool)
            for unit, start, width, factor in faults:
                if start <= t + 1 < start + width and not high[unit]:
                    norms[t, unit] *= np.float32(factor)
            seen = np.ones(len(names), bool)
            recorder.observe(t + 1, norms[t], seen, high, float(np.linalg.norm(norms[t])))
            _, state = advance(state, norms[t : t + 1], seen[None], recoverable, policy, limits)
            values: dict[str, Any] = {"loss": 2 + 4 / np.sqrt(1 + t / 20) + rng.normal(0, 0.03)} if loss else {}
            if evals and (t + 1) % 50 == 0:
                values |= {"eval_loss_high": values["loss"] + 0.05, "eval_loss_low": values["loss"] + 0.12}
            if values:
                recorder.log(t + 1, **values)
    return norms


@pytest.fixture(name="make_run", scope="session")
def _make_run() -> Any:
    return make_run


CHROMIUM, DRIVER = shutil.which("chromium"), shutil.which("chromedriver")
FLAGS = ["--headless=new", "--no-sandbox", "--disable-gpu", "--disable-background-networking", "--disable-sync"]
FLAGS += ["--disable-component-update", "--no-first-run", "--hide-scrollbars", "--disable-dev-shm-usage"]


@pytest.fixture(name="browser", scope="module")
def _browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    """A real one, or a reason to skip."""
    if not (CHROMIUM and DRIVER):
        pytest.skip("chromium and chromedriver are not here: make browser")
    webdriver = pytest.importorskip("selenium.webdriver")
    options = webdriver.ChromeOptions()
    options.binary_location = CHROMIUM
    for flag in [*FLAGS, f"--user-data-dir={tmp_path_factory.mktemp('profile')}"]:
        options.add_argument(flag)
    options.set_capability("goog:loggingPrefs", {"browser": "ALL", "performance": "ALL"})
    driver = webdriver.Chrome(options=options, service=webdriver.ChromeService(executable_path=DRIVER))
    yield driver
    driver.quit()
