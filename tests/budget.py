"""Choose the cases that the default run has time for: each claim is proven once there, and in full by test-all."""

from collections.abc import Collection, Sequence
from typing import Any

import pytest


def budgeted(cases: Sequence[Any], always: Collection[Any], ids: Sequence[str] | None = None) -> list[Any]:
    """Return all cases for a parametrisation; those that `always` does not name, by id or by value, are slow."""
    names = [str(case) for case in cases] if ids is None else list(ids)
    missing = {str(name) for name in always} - set(names)
    if missing:
        raise ValueError(f"no case is called {', '.join(sorted(missing))}; there are {', '.join(names)}")
    kept = {str(name) for name in always}
    return [
        pytest.param(
            *(case if isinstance(case, tuple) else (case,)), id=name, marks=[] if name in kept else [pytest.mark.slow]
        )
        for case, name in zip(cases, names, strict=True)
    ]
