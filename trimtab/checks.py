# SPDX-License-Identifier: Apache-2.0
"""The few checks that input needs: a rule that must hold, kinds of numbers, JSON, and the name somebody meant."""

import difflib
import json
import math
import re
import reprlib
from collections.abc import Iterable, Mapping
from typing import Any

from trimtab.errors import TrimtabError

_SHORT = reprlib.Repr()
_SHORT.maxstring = _SHORT.maxother = _SHORT.maxlong = 200
_SHORT.maxlist = _SHORT.maxtuple = _SHORT.maxdict = _SHORT.maxset = _SHORT.maxfrozenset = 20

MOST_PARTS = 2048
"""Layers, blocks or experts that a pretrained model may have."""
PARTS = re.compile(r"(layer|block|expert)s?$")
"""How the names of such counts end in a config.json."""


def require(holds: bool, rule: str, value: object) -> None:
    """Raise with the rule and the value that broke it."""
    if not holds:
        raise TrimtabError(f"{rule}, got {shown(value)}")


def is_whole(value: object, least: int = 0) -> bool:
    """A whole number of at least `least`; True and False are not numbers."""
    return isinstance(value, int) and not isinstance(value, bool) and value >= least


def is_number(value: object) -> bool:
    """A finite number that a float can hold; True and False are not numbers."""
    if not isinstance(value, int | float) or isinstance(value, bool):
        return False
    try:
        return math.isfinite(value)
    except OverflowError:  # 10^400 is an int and no float
        return False


def shown(value: object) -> str:
    """A value as an error shows it: somebody else's may be a thousand lines long."""
    try:
        return _SHORT.repr(value)
    except ValueError:  # Python writes no number of more than 4,300 digits
        return f"a {type(value).__name__} that is too large to be written here"


def parse_json(text: str | bytes) -> Any:
    """What a JSON text says; whatever is wrong with it is a ValueError, also that it nests too deep to be read."""
    try:
        return json.loads(text)
    except RecursionError:
        raise ValueError("it nests too deep") from None


def check_parts(values: object, source: object) -> None:
    """Refuse a model's config that claims more layers or experts than any model has: each would be built."""
    todo = [values]
    while todo:
        one = todo.pop()
        todo += one.values() if isinstance(one, Mapping) else one if isinstance(one, list) else ()
        for key, count in one.items() if isinstance(one, Mapping) else ():
            if is_whole(count, MOST_PARTS + 1) and PARTS.search(str(key)):
                raise TrimtabError(
                    f"a model has at most {MOST_PARTS:,} layers, blocks or experts, {source} says {shown(key)} is "
                    f"{shown(count)}: get it once more"
                )


def is_positive(value: object) -> bool:
    """A finite number above zero."""
    return is_number(value) and value > 0  # pyright: ignore[reportOperatorIssue]


def meant(name: object, valid: Iterable[str]) -> str:
    """What to tell somebody who gave an unknown name: the nearest valid one, or all of them."""
    valid = list(valid)
    near = difflib.get_close_matches(str(name)[:100], valid, n=1)
    return f"did you mean {near[0]!r}?" if near else f"valid are {', '.join(valid)}"


def check_adam(group: Mapping[str, Any]) -> None:
    """Refuse settings that no relative of Adam can work with."""
    lr, betas, decay = group["lr"], group["betas"], group["weight_decay"]
    rule = "lr must be a number of at least 0, or a 0-dim tensor of it on the CPU (a GPU's would be waited for)"
    tensor = hasattr(lr, "dim")
    require(not tensor or (lr.dim() == 0 and lr.is_cpu), rule, lr)
    value = lr.item() if tensor else lr
    require(is_number(value) and value >= 0, rule, lr)
    pair = isinstance(betas, tuple | list) and len(betas) == 2
    require(pair and all(is_number(b) and 0 <= b < 1 for b in betas), "betas must be two numbers in [0, 1)", betas)
    require(is_positive(group["eps"]), "eps must be above 0: a coordinate without gradient is 0 / eps", group["eps"])
    require(is_number(decay) and decay >= 0, "weight_decay must be a number of at least 0", decay)
