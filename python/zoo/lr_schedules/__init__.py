"""Learning-rate schedules, one a file: a closed form from the number of the step to the learning rate.

Every schedule is a component of the kind "lr_schedule": a small ``Config`` with the field's parameter names, and a
class built as ``Schedule(optimizer, option=...)``, or by its name.

What is named here is imported when it is first asked for; ``__init__.pyi`` says from where.
"""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
