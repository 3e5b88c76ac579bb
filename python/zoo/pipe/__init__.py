"""Pipeline parallelism: layers in stages on several ranks, schedules as data, and what trains by them.

* :class:`PipelineModule` of layers or :class:`LayerSpec`, :class:`TiedLayerSpec`; :func:`attach_loss` for losses of
  middle layers. ``zoo.engine.initialize`` makes an engine of it. :func:`split` makes one of any model, by tracing its
  forward; :func:`measure`: what each layer costs, by which they are spread over stages.
* :class:`Table`, :func:`build`, :func:`lower`, :func:`check`: schedules, their programs, and whether they are right.
* :class:`ProcessTopology` and its kinds: which rank is where; :class:`PipelineParallelGrid`: their process groups.

What needs torch is imported when it is first asked for.
"""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
