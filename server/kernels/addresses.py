"""Memory behind addresses, for compiled code: `array(at(address), shape, dtype)` is an array that owns nothing."""

from __future__ import annotations

from typing import Any

import numba
from numba.core import types
from numba.extending import intrinsic


def _pointer(typing_context: Any, address: Any) -> Any:
    """A pointer to an address, as `array` takes it."""
    return types.voidptr(types.intp), lambda context, builder, signature, arguments: builder.inttoptr(
        arguments[0], context.get_value_type(types.voidptr)
    )


at: Any = intrinsic(_pointer)
array: Any = numba.carray  # type: ignore[attr-defined]
