"""What the compiler of torch must leave as it is: when the runtime's events happen.

Events are ordered by what they write; a compiler that moved computation to other places for the sake of memory, or
collectives for the sake of overlap, would do so without knowing what a gather takes.
"""

from __future__ import annotations

import functools
from typing import Any

from zoo.compile.ops import EVENTS

PINS: dict[str, Any] = {
    "reorder_for_peak_memory": False,
    "reorder_for_compute_comm_overlap": False,
    "reorder_for_locality": False,
}


@functools.cache
def lower_events() -> None:
    """Tell inductor that what reads parameters has to be computed before an event takes them.

    It computes an elementwise operation where its result is used, which may be after the event; a buffer that is
    written to it makes such results of first, but of an operation that it does not know it finds out too late.
    """
    from torch._inductor.lowering import fallback_handler, register_lowering
    from torch._inductor.virtualized import V

    def lowered(event: Any) -> Any:
        carry_out = fallback_handler(event, add_to_fallback_set=False)  # type: ignore[no-untyped-call]

        def lower(order: Any, values: Any, call: int) -> Any:
            for value in values:
                V.graph.mark_buffer_mutated(value.get_name())
            return carry_out(order, values, call)

        return lower

    for event in EVENTS:
        register_lowering(event, type_promotion_kind=None)(lowered(event))
