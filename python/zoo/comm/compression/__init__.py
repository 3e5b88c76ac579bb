"""Lossy collectives that lose nothing: what is left out is kept and added the next time.

A *compressor* is a component of the kind "compressor" (one a file here, or anybody's): it has ``reducer(comm,
numel)``, which makes the object that averages tensors of one size over the ranks of a communicator, and keeps their
errors. A *codec* is a compressor that is only a way to write numbers down; how its bytes travel is a collective's
affair.

    reducer = OneBit().reducer(comm, x.numel())
    reducer.start(x, out).wait()     # out = the mean of what stands for x + error, the same bits on all ranks
    reducer.commit()                 # or roll_back(), where the step is skipped

| compressor | how it travels | bytes a rank sends, D ranks, n elements |
|---|---|---|
| onebit, blockwise, fp8 | two steps: all-to-all, all-gather | 2 (D-1)/D · the codec's of n |
| top_k | all-gather | (D-1)·8k |
| random_k | all-reduce of k numbers | 8k (D-1)/D |
| power_sgd | two all-reduces of thin matrices | 8r(rows + columns)(D-1)/D |

Formulas, and what is guaranteed: :mod:`zoo.comm.compression.errors`.

What is named here is imported when it is first asked for; ``__init__.pyi`` says from where.
"""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
