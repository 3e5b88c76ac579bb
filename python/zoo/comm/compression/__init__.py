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
"""

from zoo.comm.compression.blockwise import Blockwise
from zoo.comm.compression.codec import Codec
from zoo.comm.compression.errors import Error, Owed, fold
from zoo.comm.compression.fp8 import Fp8
from zoo.comm.compression.gathered import Gathered
from zoo.comm.compression.hierarchy import Hierarchical
from zoo.comm.compression.hook import HookState, hook
from zoo.comm.compression.onebit import OneBit
from zoo.comm.compression.power_sgd import PowerSGD
from zoo.comm.compression.random_k import RandomK
from zoo.comm.compression.reducer import Compressor, Reducer
from zoo.comm.compression.top_k import TopK
from zoo.comm.compression.two_step import ReduceLeg, TwoStep

__all__ = [
    "Blockwise",
    "Codec",
    "Compressor",
    "Error",
    "Fp8",
    "Gathered",
    "Hierarchical",
    "HookState",
    "OneBit",
    "Owed",
    "PowerSGD",
    "RandomK",
    "ReduceLeg",
    "Reducer",
    "TopK",
    "TwoStep",
    "fold",
    "hook",
]
