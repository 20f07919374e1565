"""Choose the next sequence to admit: the earliest one of the least-served queue of the least-served tenant.

The sequences of one tenant for one variant wait in a `VariantQueue`; the variant queues of a tenant are its
`TenantQueue`. Both count the tokens that they were served (the virtual token counters of Sheng et al., "Fairness in
Serving Large Language Models", 2024). A queue that becomes ready is raised to the smallest counter of the ready queues,
so idle time is not saved up (the start tag of start-time fair queueing).
"""

from __future__ import annotations

import heapq

from server.engine.scheduling.least_served import LeastServed
from server.engine.sequence import Sequence, TenantQueue, VariantQueue

# Entries of a heap whose sequences no longer wait, beyond as many as wait, before they are removed.
HEAP_SLACK = 16


class FairQueue:
    """All waiting sequences, in variant queues."""

    def __init__(self) -> None:
        self._tenants: LeastServed[str, TenantQueue] = LeastServed(TenantQueue)

    def variant_queue(self, tenant: str, version: str | None) -> VariantQueue:
        """Return the queue of a tenant's sequences for one variant, made on first use."""
        return self._tenants.get(tenant).variants.get(version)

    def push(self, sequence: Sequence) -> None:
        """Let a sequence wait, ahead of those of its queue that arrived later."""
        queue = sequence.queue
        heapq.heappush(queue.heap, sequence.arrival)
        queue.waiting[sequence.arrival] = sequence
        queue.tenant.num_waiting += 1
        if queue.is_open and len(queue.waiting) == 1:
            self._activate(queue)

    def remove(self, sequence: Sequence) -> None:
        """Remove a waiting sequence that is admitted or has ended."""
        queue = sequence.queue
        del queue.waiting[sequence.arrival]
        queue.tenant.num_waiting -= 1
        if len(queue.heap) > 2 * len(queue.waiting) + HEAP_SLACK:
            queue.heap = sorted(queue.waiting)

    def open(self, queue: VariantQueue) -> None:
        """Let the sequences of a closed queue be admitted."""
        queue.is_open = True
        if queue.waiting:
            self._activate(queue)

    def first(self) -> Sequence | None:
        """Return the sequence to admit next; it keeps waiting until `remove`."""
        tenant = self._tenants.first()
        queue = None if tenant is None else tenant.variants.first()
        return None if queue is None else queue.first()

    def _activate(self, queue: VariantQueue) -> None:
        queue.tenant.variants.activate(queue)
        self._tenants.activate(queue.tenant)
