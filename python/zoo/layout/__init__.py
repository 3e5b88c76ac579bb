"""Where the elements of logical tensors live: integer maths only, no torch.

* :class:`LogicalTensor`: name, full shape, dtype name, role. What exists once in the mathematics of a training run.
* :class:`FlatLayout`: logical tensors laid one after the other in one flat buffer, padded so that it splits evenly.
* :class:`Mesh` and :class:`Sharding`: the flat buffer split over some axes of a mesh, replicated over the others.
* :class:`Slice`: a run of consecutive elements of one logical tensor, in its row-major order, found somewhere in a flat
  buffer. The common language of checkpoints and resharding.
* :func:`reshard`: the copies that turn any sharding into any other, at any world size.
"""

from zoo.layout.flat import FlatLayout, LogicalTensor, Slice
from zoo.layout.mesh import Mesh, Sharding
from zoo.layout.reshard import Copy, reshard

__all__ = ["Copy", "FlatLayout", "LogicalTensor", "Mesh", "Sharding", "Slice", "reshard"]
