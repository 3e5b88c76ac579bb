"""Optimizers of torch with rules that look at more than elements, and their numbers with and without ZeRO."""

from __future__ import annotations

import types
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from zoo.zero import ZeroOptimizer

LR = 0.05


class Ruled(torch.optim.Optimizer):
    """Momentum, with a factor for each parameter that ``rule`` gives: what is tried here."""

    def __init__(self, params: Any, lr: float = LR) -> None:
        super().__init__(params, {"lr": lr})

    def rule(self, group: dict[str, Any], index: int, p: Any) -> float:
        return 1.0

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for index, p in enumerate(group["params"]):
                state = self.state[p]
                if not state:
                    state["momentum_buffer"], state["step"] = torch.zeros_like(p.data), 0
                state["step"] += 1
                state["momentum_buffer"].mul_(0.9).add_(p.grad)
                p.data.add_(state["momentum_buffer"], alpha=-group["lr"] * self.rule(group, index, p))


def model_of(width: int = 6) -> nn.Sequential:
    torch.manual_seed(3)
    return nn.Sequential(nn.Linear(4, width), nn.Tanh(), nn.Linear(width, 5), nn.LayerNorm(5))


def loss_of(model: nn.Module, rank: int, step: int) -> torch.Tensor:
    x = torch.randn(3, 4, generator=torch.Generator().manual_seed(10 * step + rank))
    x = x.to(next(model.parameters()).dtype)
    return model(x).pow(3).sum()


def with_rule(rule: Callable[[Any, dict[str, Any], int, Any], float]) -> Callable[[nn.Module], torch.optim.Optimizer]:
    cls = type("WithRule", (Ruled,), {"rule": rule})
    return lambda model: cls(model.parameters())


def normed(model: nn.Module) -> torch.optim.Optimizer:
    return with_rule(lambda self, group, index, p: float(1 / (1 + p.grad.norm())))(model)


def factored(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.Adafactor(model.parameters(), lr=LR)


def attribute(model: nn.Module) -> torch.optim.Optimizer:
    for i, p in enumerate(model.parameters()):
        p.lr_scale = 1.0 / (i + 1)  # type: ignore[attr-defined]
    return with_rule(lambda self, group, index, p: getattr(p, "lr_scale", 1.0))(model)


def flagged(model: nn.Module) -> torch.optim.Optimizer:
    for p in model[3].parameters():  # type: ignore[index]
        p.is_norm = True
    return with_rule(lambda self, group, index, p: 0.1 if hasattr(p, "is_norm") else 1.0)(model)


def by_id(model: nn.Module) -> torch.optim.Optimizer:
    optimizer: Any = with_rule(lambda self, group, index, p: 0.1 if id(p) in self.slow else 1.0)(model)
    optimizer.slow = {id(p) for p in model[0].parameters()}  # type: ignore[index]
    return optimizer  # type: ignore[no-any-return]


def by_address(model: nn.Module) -> torch.optim.Optimizer:
    optimizer: Any = with_rule(lambda self, group, index, p: 0.1 if p.data_ptr() in self.slow else 1.0)(model)
    optimizer.slow = {p.data_ptr(): p.shape for p in model[0].parameters()}  # type: ignore[index]
    return optimizer  # type: ignore[no-any-return]


def by_key(model: nn.Module) -> torch.optim.Optimizer:
    optimizer: Any = with_rule(lambda self, group, index, p: self.scales.get(p, 1.0))(model)
    optimizer.scales = dict.fromkeys(model[2].parameters(), 0.2)  # type: ignore[index]
    return optimizer  # type: ignore[no-any-return]


def by_object(model: nn.Module) -> torch.optim.Optimizer:
    head = model[2].weight  # type: ignore[index]
    return with_rule(lambda self, group, index, p: 0.1 if p is head else 1.0)(model)


def by_module(model: nn.Module) -> torch.optim.Optimizer:
    optimizer: Any = with_rule(lambda self, group, index, p: 0.1 if p is self.layer.weight else 1.0)(model)
    optimizer.layer = model[0]  # type: ignore[index]
    return optimizer  # type: ignore[no-any-return]


def clipped(most: float) -> Callable[[nn.Module], torch.optim.Optimizer]:
    """By the norm of all gradients together, as some optimizers do inside of their step."""

    class Clipped(Ruled):
        def rule(self, group: dict[str, Any], index: int, p: Any) -> float:
            norm = sum(float(q.grad.square().sum()) for g in self.param_groups for q in g["params"]) ** 0.5
            return min(1.0, most / norm)

    return lambda model: Clipped(model.parameters())


class Registry:
    """As bitsandbytes' ``GlobalOptimManager``: one for all optimizers, keyed by ``id``, resolved in the first step."""

    def __init__(self) -> None:
        self.overrides: list[tuple[nn.Module, str, float]] = []
        self.by_index: dict[tuple[int, int], float] = {}


class Registered(Ruled):
    registry = Registry()

    def __init__(self, params: Any, lr: float = LR) -> None:
        super().__init__(params, lr)
        self.manager, self.begun = self.registry, False

    def rule(self, group: dict[str, Any], index: int, p: Any) -> float:
        if not self.begun:
            self.begun = True
            for module, name, factor in self.manager.overrides:
                for g, of in enumerate(self.param_groups):
                    for i, each in enumerate(of["params"]):
                        if each is getattr(module, name):
                            self.manager.by_index[g, i] = factor
        return self.manager.by_index.get((self.param_groups.index(group), index), 1.0)


def registered(model: nn.Module) -> torch.optim.Optimizer:
    cls: Any = type("RegisteredOnce", (Registered,), {"registry": Registry()})
    optimizer = cls(model.parameters())
    optimizer.manager.overrides.append((model[0], "weight", 0.1))  # type: ignore[index]
    return optimizer  # type: ignore[no-any-return]


def by_name(model: nn.Module) -> torch.optim.Optimizer:
    cls = type("ByName", (Ruled,), {
        "rule": lambda self, group, index, p: 0.1 if group["param_names"][index].endswith("bias") else 1.0,
    })  # fmt: skip
    return cls(model.named_parameters())  # type: ignore[no-any-return]


def by_list(model: nn.Module) -> torch.optim.Optimizer:
    class ByList(Ruled):
        def rule(self, group: dict[str, Any], index: int, p: Any) -> float:
            return float(group["scales"][index])

    params = list(model.parameters())
    return ByList([{"params": params, "scales": [1.0 / (i + 1) for i in range(len(params))]}])


def step_replaced(model: nn.Module) -> torch.optim.Optimizer:
    optimizer: Any = Ruled(model.parameters())

    def step(self: Any, closure: Any = None) -> None:
        for group in self.param_groups:
            for p in group["params"]:
                p.data.add_(p.grad.sign(), alpha=-group["lr"])

    optimizer.step = types.MethodType(step, optimizer)
    return optimizer  # type: ignore[no-any-return]


def step_wrapped(model: nn.Module) -> torch.optim.Optimizer:
    optimizer: Any = Ruled(model.parameters())
    inner = optimizer.step

    def step(closure: Any = None) -> None:
        for group in optimizer.param_groups:
            for p in group["params"]:
                p.grad.mul_(0.5)
        inner()

    optimizer.step = step
    return optimizer  # type: ignore[no-any-return]


def method_replaced(model: nn.Module) -> torch.optim.Optimizer:
    optimizer: Any = Ruled(model.parameters())
    optimizer.rule = lambda group, index, p: 0.3
    return optimizer  # type: ignore[no-any-return]


def attribute_added(model: nn.Module) -> torch.optim.Optimizer:
    optimizer: Any = with_rule(lambda self, group, index, p: getattr(self, "damping", 1.0))(model)
    optimizer.damping = 0.25
    return optimizer  # type: ignore[no-any-return]


def new_memory(model: nn.Module) -> torch.optim.Optimizer:
    class Replacing(Ruled):
        def step(self, closure: Any = None) -> None:  # type: ignore[override]
            for group in self.param_groups:
                for p in group["params"]:
                    p.data = p.data - group["lr"] * p.grad

    return Replacing(model.parameters())


def not_rebuilt(model: nn.Module) -> torch.optim.Optimizer:
    class Hidden(Ruled):
        def __init__(self, params: Any, strength: float) -> None:
            super().__init__(params)
            self._factor = 1 / strength

        def rule(self, group: dict[str, Any], index: int, p: Any) -> float:
            return self._factor

    return Hidden(model.parameters(), 4.0)


class Ahead(torch.optim.Optimizer):
    """Made of another optimizer: slow weights follow."""

    def __init__(self, base: torch.optim.Optimizer) -> None:
        super().__init__([p for group in base.param_groups for p in group["params"]], {})
        self.base, self.param_groups = base, base.param_groups

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        self.base.step()
        for group in self.param_groups:
            for p in group["params"]:
                slow = self.state[p].setdefault("slow", p.detach().clone())
                slow.add_(p.detach() - slow, alpha=0.5)
                p.data.copy_(slow)


def without_hooks(model: nn.Module) -> torch.optim.Optimizer:
    """Its constructor does not call torch's, and makes part of what that makes."""
    optimizer = Ruled(model.parameters())
    for name in [name for name in vars(optimizer) if "state_dict" in name and name.endswith("_hooks")]:
        delattr(optimizer, name)
    return optimizer


WHOLE = {
    "numel": with_rule(lambda self, group, index, p: 0.1 if p.numel() > 20 else 1.0),
    "nelement": with_rule(lambda self, group, index, p: 1.0 / p.nelement()),
    "dim": with_rule(lambda self, group, index, p: 0.1 if p.dim() > 1 else 1.0),
    "shape": with_rule(lambda self, group, index, p: 1.0 / p.shape[0]),
    "later": with_rule(lambda self, group, index, p: 0.1 if self.state[p]["step"] > 4 and p.dim() > 1 else 1.0),
    "norm later": with_rule(
        lambda self, group, index, p: float(1 / (1 + p.grad.norm())) if self.state[p]["step"] > 9 else 1.0
    ),
    "shape of grad": with_rule(lambda self, group, index, p: 1.0 / p.grad.shape[0]),
    "stride": with_rule(lambda self, group, index, p: 1.0 / p.stride(0)),
    "class": with_rule(lambda self, group, index, p: 0.1 if isinstance(p, nn.Parameter) else 1.0),
    "index": with_rule(lambda self, group, index, p: 1.0 / (index + 1)),
    "count": with_rule(lambda self, group, index, p: 1.0 / len(group["params"])),
    "norm": normed,
    "norm of all": clipped(0.01),
    "high norm of all": clipped(40.0),
    "rows": with_rule(lambda self, group, index, p: float(1 / (1 + p.grad[0].abs().sum()))),
    "attribute": attribute,
    "flag": flagged,
    "id": by_id,
    "key": by_key,
    "object": by_object,
    "module": by_module,
    "registry": registered,
    "name": by_name,
    "list": by_list,
    "wrapped step": step_wrapped,
    "lambda": method_replaced,
    "not rebuilt": not_rebuilt,
    "optimizer of an optimizer": lambda model: Ahead(torch.optim.SGD(model.parameters(), lr=LR)),
    "Adafactor": factored,
}
SPLIT = {
    "plain": lambda model: Ruled(model.parameters()),
    "leaf": with_rule(lambda self, group, index, p: 0.1 if p.is_leaf else 1.0),
    "replaced step": step_replaced,
    "added attribute": attribute_added,
    "new memory": new_memory,
    "without hooks": without_hooks,
    "AdamW": lambda model: torch.optim.AdamW(model.parameters(), lr=LR),
}
KINDS: dict[str, Callable[[nn.Module], torch.optim.Optimizer]] = {**WHOLE, **SPLIT}


def in_one_process(
    kind: str, world: int, steps: int, clip: float, dtype: torch.dtype = torch.float32
) -> list[torch.Tensor]:
    model = model_of().to(dtype)
    optimizer = KINDS[kind](model)
    for step in range(steps):
        for rank in range(world):
            (loss_of(model, rank, step) / world).backward()
        if clip:
            nn.utils.clip_grad_norm_(model.parameters(), clip)
        optimizer.step()
        optimizer.zero_grad()
    return [p.detach() for p in model.parameters()]


def under_zero(
    kind: str, rank: int, steps: int, clip: float, dtype: torch.dtype = torch.float32, **options: Any
) -> list[torch.Tensor]:
    model = model_of().to(dtype)
    names = [name for name, _ in model.named_parameters()]
    optimizer = ZeroOptimizer(model, optimizer=KINDS[kind](model), clip_norm=clip, **options)
    for step in range(steps):
        loss_of(model, rank, step).backward()
        optimizer.step()
        optimizer.zero_grad()
    found = optimizer.consolidated_parameters()
    return [found[name] for name in names]
