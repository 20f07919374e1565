"""Arrays at addresses, for code that numba compiles: `array(at(address), shape, dtype)` is a view of that memory."""

from __future__ import annotations

from typing import Any

import numba
from numba.core import types
from numba.extending import intrinsic


def _pointer(typing_context: Any, address: Any) -> Any:
    """Turn an integer address into the pointer that `array` takes."""
    return types.voidptr(types.intp), lambda context, builder, signature, arguments: builder.inttoptr(
        arguments[0], context.get_value_type(types.voidptr)
    )


at: Any = intrinsic(_pointer)
array: Any = numba.carray  # type: ignore[attr-defined]
