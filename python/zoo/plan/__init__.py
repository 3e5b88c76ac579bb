"""What a training runtime does, as data: typed actions on buckets, in the order in which one rank starts them.

No torch.

* :class:`Action`: one of them: what (:class:`Kind`), on which bucket, when (:class:`Moment`), for which unit.
* :class:`Collective`: what an action starts.
* :class:`Actions`: a list that prints well, and what is asked of it: the collectives in order, bytes that are whole.
"""

from zoo.plan.actions import Action, Actions, Collective, Kind, Moment

__all__ = ["Action", "Actions", "Collective", "Kind", "Moment"]
