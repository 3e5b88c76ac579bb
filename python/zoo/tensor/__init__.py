"""Tensor parallelism: matrices cut along an axis of the mesh, by a plan that is data.

* :class:`Rule`, :class:`Count`, :class:`Take`, :class:`Plan`: how the parameters of a model lie over the ranks.
* :func:`split`: leaves on every rank its part of a model.
* :func:`plan_of`: the plan of a model of transformers: what its family says, or what the model ships. :func:`prove`:
  whether it computes what the whole model does. :func:`guess`, :func:`prove_on`: the same of any model.
  :func:`summary`: bytes of ranks and what they send.
* :func:`plan_of_partition_config`, :func:`plan_of_injection_policy`: plans written in DeepSpeed's ways.
* :func:`parameters_on_meta`, :func:`load`, :func:`slices`: a model that no rank ever holds, read and saved;
  :func:`joined`: from files of other ranks' parts.
* :func:`sum_gradients`, :func:`gradient_norm`: for a split model under a plain torch optimizer.
* :func:`in_parts`, :func:`cross_entropy`: the loss of a vocabulary that is dealt.

What is named here is imported when it is first asked for; ``__init__.pyi`` says from where.
"""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
