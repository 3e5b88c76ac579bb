"""Where the elements of logical tensors live: integer maths only, no torch.

* :class:`Box`: a rectangular part of a tensor, (offsets, sizes); what a run of its row-major order is in boxes.
* :class:`Boxes`: a part that is several boxes, side by side; :class:`Part`: either.
* :class:`LogicalTensor`: name, full shape, dtype name, role, and the box of it that this rank's parameter is. What
  exists once in the mathematics of a training run.
* :class:`FlatLayout`: parameters laid one after the other in one flat buffer, padded so that it splits evenly.
* :class:`Mesh` and :class:`Sharding`: the flat buffer split over some axes of a mesh, replicated over the others.
* :class:`Slice` and :class:`Piece`: what is found somewhere in a flat buffer: a run of one parameter's row-major order,
  and a box of the whole tensor. Checkpoints and resharding speak of them.
* :func:`declare_split`, :func:`declare_first`: what a layer says of its parameters: along which mesh axes they are
  parts, and which number its children have in the whole model. :func:`declare_partial`: where
  its gradient is a sum. :func:`declare_unit`, :func:`declare_axis`: what it needs: to be gathered as a whole, a mesh
  axis. :func:`axes_of`, :func:`enter_mesh`: for whoever makes the mesh, and has it.
* :func:`tiles`: whether boxes have every element of a tensor exactly once.
* :func:`reshard`: the copies that turn any placement into any other, at any world size.

What is named here is imported when it is first asked for; ``__init__.pyi`` says from where.
"""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
