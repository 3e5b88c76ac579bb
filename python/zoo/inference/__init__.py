"""Generation: a cache whose memory is there from the start, sampling as a function of place, slots.

* :func:`generate`: many prompts over few slots; a row that ends is given to the next prompt.
* :class:`Cache`: a cache of transformers for unmodified ``generate``; :func:`forecast`: its bytes, before it is there.
* :func:`stream`: layers that the budget does not hold are read from NVMe for each token.
* :func:`score`: log-probabilities of tokens that are given; :func:`gap`: how far they are from those of generating.
* :class:`Rollout`: tokens between steps of training, in place or as tensor-parallel parts that the shards become.
* :class:`Graphs`: CUDA graphs of a model's forward.
* :class:`Sampling`: the token is a function of seed, sequence and place, whatever the batch, slot or order.

What is named here is imported when it is first asked for; ``__init__.pyi`` says from where.
"""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
