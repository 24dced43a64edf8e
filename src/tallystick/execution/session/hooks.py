"""Hooks on a user's model and optimizer that a copy of these does not have."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any


class Hook:
    """Calls ``call``; copied, pickled or loaded, as a part of the model or optimizer that it stands on, it calls nothing."""

    def __init__(self, call: Callable[..., Any] | None = None) -> None:
        self._call = call

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Return what it calls returns."""
        return None if self._call is None else self._call(*args, **kwargs)

    def __reduce__(self) -> tuple[type[Hook], tuple[()]]:
        return Hook, ()
