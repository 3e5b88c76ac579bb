"""What stands between DeepSpeed's arguments, results and exceptions and those of zoo."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

F = TypeVar("F", bound=Callable[..., Any])


def told_as(kind: type[Exception]) -> Callable[[F], F]:
    """A decorator of what zoo tells by a ValueError and DeepSpeed by another exception: the ValueErrors of the function
    are of that kind too, and a program that catches either gets the sentence."""

    def decorate(function: F) -> F:
        @functools.wraps(function)
        def told(*args: Any, **kwargs: Any) -> Any:
            try:
                return function(*args, **kwargs)
            except ValueError as error:
                both = _of_both(error, kind)
                if both is error:
                    raise
                raise both.with_traceback(error.__traceback__) from error.__cause__

        return told  # type: ignore[return-value]

    return decorate


def _of_both(error: ValueError, kind: type[Exception]) -> ValueError:
    if isinstance(error, kind):
        return error
    try:
        return _made(type(error), kind, error.args, error.__dict__)
    except TypeError:  # of C, with fields of its own
        return error


def _made(
    known: type[ValueError], kind: type[Exception], args: tuple[Any, ...], fields: Mapping[str, Any]
) -> ValueError:
    """An exception of both classes. Pools of processes pickle what their workers raise."""

    def reduce(self: ValueError) -> tuple[Any, ...]:
        return _made, (known, kind, self.args, dict(self.__dict__))

    space = {"__module__": known.__module__, "__doc__": known.__doc__, "__reduce__": reduce}
    both: ValueError = (made := type(known.__name__, (known, kind), space)).__new__(made, *args)
    both.__dict__.update(fields)
    return both


asserting = told_as(AssertionError)
"""What DeepSpeed asserts."""
