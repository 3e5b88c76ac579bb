"""Collectives over ``torch.distributed`` process groups, with accounting and a divergence check.

A :class:`Communicator` wraps one process group (or one axis of a ``DeviceMesh``) and offers the few collectives that
training systems are built from. It adds three things to torch's own functions:

* **accounting**: a :class:`CommsLog` counts, per operation, calls, message bytes, wire bytes and time;
* **a transport per backend**: on gloo, all-gather and reduce-scatter go as direct pairwise messages, which move the
  bandwidth-optimal number of bytes without staging copies and add in rank order, or through memory that ranks of one
  host share; elsewhere the backend's own collectives are used;
* **a check** (``check=True``): before each collective the ranks agree on a fingerprint of it, and the error names the
  ranks that differ instead of hanging.
"""

from zoo.comm.check import CollectiveMismatchError
from zoo.comm.communicator import Communicator, no_collectives
from zoo.comm.exchange import exchange
from zoo.comm.failures import RankFailedError, report_uncaught, together
from zoo.comm.handles import DONE, Handle, Then, advance, all_of
from zoo.comm.launch import init_distributed, speak_as_torchrun
from zoo.comm.log import CommsLog, OpStats
from zoo.comm.messages import Recv, Send
from zoo.comm.objects import gather_object
from zoo.comm.recovery import Recovery
from zoo.comm.teardown import before_teardown

__all__ = [
    "DONE",
    "CollectiveMismatchError",
    "CommsLog",
    "Communicator",
    "Handle",
    "OpStats",
    "RankFailedError",
    "Recovery",
    "Recv",
    "Send",
    "Then",
    "advance",
    "all_of",
    "before_teardown",
    "exchange",
    "gather_object",
    "init_distributed",
    "no_collectives",
    "report_uncaught",
    "speak_as_torchrun",
    "together",
]
