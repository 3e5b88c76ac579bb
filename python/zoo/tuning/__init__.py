"""The autotuner: from one configuration, the fastest way to run its job.

* :func:`tune`: a search. :func:`resume`: one that was interrupted. :class:`Found`: what came out.
* :class:`AutotuningConfig`: the section ``autotuning``.
* :class:`Candidate`, :class:`Job`, :func:`candidates`: what may be chosen.
* :class:`Needs`: what a candidate needs at least, and what it sends. :class:`Model`: how long its step takes.
* :class:`Search`, :class:`Budget`, :class:`Journal`: which trial is next, and what is kept of it.
* :class:`Runner`, :class:`Outcome`, :class:`Processes`: what runs a trial, and what it came to.

What needs torch is imported when it is first asked for.
"""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
