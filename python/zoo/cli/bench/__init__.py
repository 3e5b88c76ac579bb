"""``zoo bench``: what a machine's links, processors, memory and disk do, measured.

* ``collectives.py``: the collectives of ``zoo.comm`` over the ranks that there are, by operation and size;
* ``fitting.py``: the line t = α + x / β through what was measured;
* ``computing.py``: products, memory, calls, copies; ``disk.py``: a disk, past the page cache;
* ``filling.py``: a hardware file of all of it;
* ``ranks.py``, ``on_a_rank.py``: the same on processes that are started here.
"""
