"""Fast layers in models that are there: what is described as data is replaced, and proved before it is.

* :func:`inject`: the decoder layers and the head of a model of transformers compute with few operations while nothing
  is trained. :class:`Injection` says which, and why the others do not. :func:`detach`: the model as it was.

What is named here is imported when it is first asked for; ``__init__.pyi`` says from where.
"""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
