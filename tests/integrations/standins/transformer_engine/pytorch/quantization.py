# SPDX-License-Identifier: Apache-2.0
"""Stand-in: the global state and the regions that set it."""

from typing import Any

from transformer_engine.common.recipe import DelayedScaling, Recipe


class FP8GlobalStateManager:
    enabled = False
    calibrating = False
    recipe: Recipe | None = None
    group: Any = None
    depth = 0
    with_parameters = False
    waiting: list[Any] = []  # noqa: RUF012

    @classmethod
    def is_fp8_enabled(cls) -> bool:
        return cls.enabled

    @classmethod
    def is_fp8_calibration(cls) -> bool:
        return cls.calibrating

    @classmethod
    def get_fp8_recipe(cls) -> Recipe:
        return cls.recipe or DelayedScaling()

    @classmethod
    def get_fp8_group(cls) -> Any:
        return cls.group


class autocast:  # noqa: N801
    def __init__(
        self,
        enabled: bool = True,
        calibrating: bool = False,
        recipe: Recipe | None = None,
        amax_reduction_group: Any = None,
    ) -> None:
        self._new = enabled, calibrating, recipe or DelayedScaling(), amax_reduction_group

    def __enter__(self) -> None:
        state = FP8GlobalStateManager
        self._old = state.enabled, state.calibrating, state.recipe, state.group
        state.enabled, state.calibrating, state.recipe, state.group = self._new
        state.depth += 1

    def __exit__(self, *_: Any) -> None:
        state = FP8GlobalStateManager
        state.enabled, state.calibrating, state.recipe, state.group = self._old
        state.depth -= 1
        if self._new[0] and state.depth == 0:
            for module in state.waiting:
                module.update_scale()
            state.waiting.clear()


class quantized_model_init:  # noqa: N801
    def __enter__(self) -> None:
        FP8GlobalStateManager.with_parameters = True

    def __exit__(self, *_: Any) -> None:
        FP8GlobalStateManager.with_parameters = False
