"""Collectives over ``torch.distributed`` process groups, with accounting and a divergence check.

A :class:`Communicator` wraps one process group (or one axis of a ``DeviceMesh``) and offers the few collectives that
training systems are built from. It adds three things to torch's own functions:

* **accounting**: a :class:`CommsLog` counts, per operation, calls, message bytes, wire bytes and time;
* **a transport per backend**: on gloo, all-gather and reduce-scatter go as direct pairwise messages, which move the
  bandwidth-optimal number of bytes without staging copies and add in rank order, or through memory that ranks of one
  host share; elsewhere the backend's own collectives are used;
* **a check** (``check=True``): before each collective the ranks agree on a fingerprint of it, and the error names the
  ranks that differ instead of hanging.

What is named here is imported when it is first asked for; ``__init__.pyi`` says from where.
"""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
