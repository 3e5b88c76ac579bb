"""What is there to be imported and refuses when it is used, with the reason."""

from __future__ import annotations

from typing import Any, NoReturn

from zoo.deepspeed.modules import Refused

__all__ = ["refused"]


def refused(module: str, name: str, entry: Refused) -> Any:
    """A class or a function of this name, in ``module`` ("deepspeed.x"), that raises when it is used.

    A function that is called, and an instance of a class or of its subclass, are a NotImplementedError; an attribute of
    the class that a program asks for (``.apply``) is an AttributeError, so that ``hasattr`` says no.
    """
    sentence = f"{module}.{name} is not in zoo: {entry.why} docs/reference/deepspeed-names.md lists what is there."
    if entry.function:

        def function(*args: Any, **kwargs: Any) -> NoReturn:
            raise NotImplementedError(sentence)

        made: Any = function
    else:
        # Programs name exceptions in except clauses, which take nothing else.
        raised = name.endswith(("Error", "Exception", "Aborted"))
        made = _Refusing(name, (Exception,) if raised else (), {"_sentence": sentence})
    made.__name__ = made.__qualname__ = name
    made.__module__, made.__doc__ = module, f"Refused when it is used: {entry.why}"
    return made


class _Refusing(type):
    """The type of classes that refuse. Subclasses are made as usual: a library defines them at import."""

    _sentence: str

    def __call__(cls, *args: Any, **kwargs: Any) -> NoReturn:
        raise NotImplementedError(cls._sentence)

    def __getattr__(cls, name: str) -> NoReturn:
        if name.startswith("__") and name.endswith("__"):
            raise AttributeError(name)
        raise AttributeError(cls._sentence)
