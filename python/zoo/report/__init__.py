"""The report of a run: one file of HTML with its curves, memory, traffic, one step in time, forecast and configuration.

What is named here is imported when it is first asked for; ``__init__.pyi`` says from where.
"""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
