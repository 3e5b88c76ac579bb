"""What attaches to a training engine, and what it tells: protocols and values only, no torch.

* Engine parts change or watch training: :class:`Prepares`, :class:`OnBatch`, :class:`CountsBatch`, :class:`OnLoss`,
  :class:`ScalesLr`, :class:`BeforeUpdate`, :class:`AfterUpdate`, :class:`GivesMetrics`, :class:`HasState`,
  :class:`Closes`, :class:`MakesLoader`. A part is any object with some of these methods.
* A :class:`Runner` turns batches into gradients.
* A :class:`Sink` gets the record of each step: monitors, progress, the run's log.
* :class:`Clock`: where training stands. :class:`StepRecord`: what a step came to. :class:`Environment`: what the engine
  tells its parts of the job.
* :func:`declare_part`: a layer says which part its training needs; :func:`parts_of` what a model's layers have said.
* :func:`own_hook`, :func:`checking_hook`: hooks of zoo on a model, which :func:`has_user_hooks` does not count.
* :class:`Unused`: for a part that makes the loader: which of its batches a forward has got, whatever a program fetches
  ahead; each a :class:`Handed`.
* :func:`in_order`: the order in which parts are called.
* :func:`shuffled`, :func:`uniform`, :func:`drawn`, :func:`mixed`: random numbers of a seed and counters, with no state.

What is named here is imported when it is first asked for; ``__init__.pyi`` says from where.
"""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
