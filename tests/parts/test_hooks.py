"""Hooks of zoo and those of the user on one module."""

from __future__ import annotations

import copy
import pickle
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn

from zoo.parts import has_user_hooks, is_own_hook, is_watched, own_hook, without_own_hooks
from zoo.parts.hooks import BoundHook


class Watcher:
    def __init__(self) -> None:
        self.calls = 0

    def see(self, *args: Any) -> None:
        self.calls += 1


def test_own_hooks_run_and_are_not_the_users() -> None:
    layer, watcher = nn.Linear(2, 2), Watcher()
    layer.register_forward_pre_hook(own_hook(partial(watcher.see)))
    layer.register_forward_hook(own_hook(partial(watcher.see)), always_call=True)
    layer(torch.ones(1, 2))
    assert watcher.calls == 2
    assert not has_user_hooks(layer)
    assert is_watched(layer)
    mine = layer.register_forward_hook(watcher.see)
    assert has_user_hooks(layer)
    mine.remove()
    assert not has_user_hooks(layer)


def test_copies_and_pickles_have_hooks_that_do_nothing() -> None:
    layer, watcher = nn.Linear(2, 2), Watcher()
    layer.register_forward_pre_hook(own_hook(partial(watcher.see)), with_kwargs=True)
    layer.register_forward_hook(own_hook(partial(watcher.see)))
    for again in (copy.deepcopy(layer), pickle.loads(pickle.dumps(layer))):
        assert torch.equal(again(torch.ones(1, 2)), nn.Linear.forward(layer, torch.ones(1, 2)))
        assert not has_user_hooks(again)
        assert not is_watched(again)
        assert all(is_own_hook(hook) for hook in again._forward_hooks.values())
    assert watcher.calls == 0


def test_torchscript_is_told_of_hooks_and_of_what_stands_for_them_on_a_copy() -> None:
    layer, watcher = nn.Linear(2, 2), Watcher()
    layer.register_forward_hook(own_hook(BoundHook(watcher.see)))
    with pytest.raises(AttributeError, match=r"Script the model before the engine or optimizer is constructed"):
        torch.jit.script(layer)
    for again in (copy.deepcopy(layer), pickle.loads(pickle.dumps(layer)), copy.deepcopy(copy.deepcopy(layer))):
        with pytest.raises(AttributeError, match=r"Script a copy that is made after the engine or optimizer is closed"):
            torch.jit.script(again)
        traced = torch.jit.trace(again, torch.ones(1, 2))  # type: ignore[no-untyped-call]
        assert torch.equal(traced(torch.ones(1, 2)), again(torch.ones(1, 2)))


def test_for_a_trace_there_are_the_users_hooks_alone_and_after_it_all_in_their_order() -> None:
    layer, seen = nn.Linear(2, 2), []
    layer.register_forward_hook(own_hook(partial(lambda *_: seen.append("own"))))
    layer.register_forward_hook(lambda *_: seen.append("user"))
    layer.register_forward_hook(own_hook(partial(lambda *_: seen.append("last"))))
    with without_own_hooks(layer.modules()):
        layer(torch.ones(1, 2))
    assert seen == ["user"]
    layer(torch.ones(1, 2))
    assert seen == ["user", "own", "user", "last"]
