"""Where the units of a layer go: from it through activations, norms and pools to the layers that take them.

A removed unit gives the same number c everywhere: 0, or its bias, and what activations make of it. c is followed
through a graph of the module around the layers (torch.fx), operation by operation, as a vector over units with NaN
where a unit is no constant. What is not known to treat each unit alone ends the walk: then nothing is removed, and the
reason is told.
"""

from __future__ import annotations

import contextlib
import inspect
import operator
from collections.abc import Callable, Collection, Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, fx, nn

from zoo.compression.attach import class_of
from zoo.compression.pruning.modules import BatchNorm, inputs_of, is_convolution, is_linear, out_dim_of, outputs_of
from zoo.parts import has_user_hooks, without_own_hooks

_FUNCTIONS: frozenset[Any] = frozenset({
    F.relu, F.relu6, F.gelu, F.silu, F.mish, F.elu, F.selu, F.celu, F.leaky_relu, F.hardswish, F.hardsigmoid,
    F.hardtanh, F.softplus, F.softsign, F.tanh, F.sigmoid, F.logsigmoid, F.tanhshrink, F.dropout, F.dropout1d,
    F.dropout2d, F.dropout3d, F.relu_, torch.relu, torch.tanh, torch.sigmoid, torch.erf, torch.exp, torch.sin,
    torch.cos, torch.square, torch.abs, torch.neg, torch.pow, torch.clamp, torch.clone, torch.mul, torch.add,
    torch.sub, torch.div, operator.mul, operator.add, operator.sub, operator.truediv, operator.neg, operator.pow,
    operator.imul, operator.iadd, operator.isub,
})  # fmt: skip
_METHODS = frozenset({
    "relu", "tanh", "sigmoid", "erf", "exp", "sin", "cos", "square", "abs", "neg", "pow", "clamp", "clone",
    "contiguous", "detach", "mul", "add", "sub", "div",
})  # fmt: skip
_PRODUCTS = frozenset({torch.mul, operator.mul, operator.imul, "mul"})
_MODULES = (
    nn.ReLU, nn.ReLU6, nn.GELU, nn.SiLU, nn.Mish, nn.ELU, nn.SELU, nn.CELU, nn.LeakyReLU, nn.Hardswish, nn.Hardsigmoid,
    nn.Hardtanh, nn.Softplus, nn.Softsign, nn.Tanh, nn.Sigmoid, nn.LogSigmoid, nn.Tanhshrink, nn.Identity, nn.Dropout,
    nn.Dropout1d, nn.Dropout2d, nn.Dropout3d,
)  # fmt: skip
_MAX_POOLS = (nn.MaxPool1d, nn.MaxPool2d, nn.MaxPool3d, nn.AdaptiveMaxPool1d, nn.AdaptiveMaxPool2d,
              nn.AdaptiveMaxPool3d, nn.AdaptiveAvgPool1d, nn.AdaptiveAvgPool2d, nn.AdaptiveAvgPool3d)  # fmt: skip
_MEAN_POOLS = (nn.AvgPool1d, nn.AvgPool2d, nn.AvgPool3d)
_POOL_FUNCTIONS: frozenset[Any] = frozenset({F.adaptive_avg_pool1d, F.adaptive_avg_pool2d, F.adaptive_avg_pool3d,
    F.adaptive_max_pool1d, F.adaptive_max_pool2d, F.max_pool1d, F.max_pool2d, F.max_pool3d})  # fmt: skip


SIZES = ("in_features", "out_features", "in_channels", "out_channels", "num_features", "nf", "nx")


@dataclass
class Units:
    """A tensor of which one dim is the units: the last, or the second before ``spatial`` others."""

    constant: Tensor
    """(U,) float64: what a unit is everywhere, NaN where it is not the same everywhere."""
    spatial: int
    flat: bool = False
    """Each unit is a run of neighbours in the last dim, after a flatten."""


@dataclass
class Flow:
    """What was found."""

    sources: list[nn.Module] = field(default_factory=list)
    """Layers that give the units; they lose rows."""
    norms: list[nn.Module] = field(default_factory=list)
    takers: list[tuple[nn.Module, Tensor]] = field(default_factory=list)
    """Layers that take the units, and the constants that they see; they lose columns."""


class Unknown(Exception):
    """Why units cannot be followed."""


def follow(root: nn.Module, pruned: nn.Module, related: Collection[nn.Module]) -> Flow:
    """Follow the units of ``pruned`` through the forward of ``root``, which has all of them inside.

    Raises:
        Unknown: why that cannot be done.
    """
    with _evaluating(root):
        named = {id(module): module for module in (pruned, *related)}
        graph = _traced(root, named)
        with _other_sizes(named.values()):
            if _text(graph) != _text(_traced(root, named)):
                raise Unknown(f"the forward of a {class_of(root).__name__} computes with the number of units")
        return _Walk(root, pruned, set(named)).through(graph)


def _traced(root: nn.Module, named: Collection[int]) -> fx.Graph:
    parameters = inspect.signature(root.forward).parameters.values()
    given = {p.name: p.default for p in parameters if p.default is not p.empty}
    fast = torch.backends.mha.get_fastpath_enabled()
    torch.backends.mha.set_fastpath_enabled(False)
    try:
        with without_own_hooks(root.modules()):
            return _Tracer(set(named)).trace(root, concrete_args=given)
    except Exception as error:  # whatever the user's forward does with a value that stands for any
        raise Unknown(f"the forward of a {class_of(root).__name__} cannot be traced ({_short(error)})") from error
    finally:
        torch.backends.mha.set_fastpath_enabled(fast)


def _text(graph: fx.Graph) -> str:
    return "\n".join(f"{n.name} {n.op} {n.target} {n.args} {n.kwargs}" for n in graph.nodes)


@contextlib.contextmanager
def _other_sizes(modules: Iterable[nn.Module]) -> Iterator[None]:
    """Layers say other numbers of units than they have: a forward that reads them becomes another graph."""
    said = [(module, key, value) for module in modules for key in SIZES if (value := module.__dict__.get(key))]
    for module, key, value in said:
        setattr(module, key, value + 1)
    try:
        yield
    finally:
        for module, key, value in said:
            setattr(module, key, value)


class _Tracer(fx.Tracer):
    """Leaves are the layers that matter and whatever has parameters; the rest is traced into."""

    def __init__(self, named: set[int]) -> None:
        super().__init__()
        self._named = named

    def is_leaf_module(self, m: nn.Module, module_qualified_name: str) -> bool:
        """Whether a module is one operation."""
        if id(m) in self._named:
            return True
        if any(id(inner) in self._named for inner in m.modules()):
            return False
        known = class_of(m) in (*_MODULES, *_MAX_POOLS, *_MEAN_POOLS, nn.Flatten)
        return known or any(True for _ in m.parameters()) or any(True for _ in m.buffers())

    def create_args_for_root(self, root_fn: Any, is_module: bool, concrete_args: Any = None) -> tuple[Any, list[Any]]:
        """A wrapper of ``*args, **kwargs`` gets the arguments of the forward inside, and runs whole."""
        inner = inspect.unwrap(root_fn)
        nested = any(isinstance(value, (tuple, list, dict)) for value in (concrete_args or {}).values())
        if inner is root_fn or nested:
            return super().create_args_for_root(root_fn, is_module, concrete_args)
        _, values = super().create_args_for_root(inner, is_module, concrete_args)
        parameters = inspect.signature(inner).parameters.values()
        named = [p.name for p in parameters if p.kind is p.KEYWORD_ONLY]
        num = sum(p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD) for p in parameters)

        def through(*given: Any) -> Any:
            # torch.fx puts what is for keywords only right after the positional ones, and the rest at the end.
            return root_fn(*given[:num], **dict(zip(named, given[num:], strict=False)))

        return through, values

    def iter(self, obj: fx.Proxy) -> Iterator[Any]:
        """``*args`` of the traced forward are none, as arguments with defaults have these."""
        return iter(()) if _is_rest(obj) else super().iter(obj)

    def keys(self, obj: fx.Proxy) -> Any:
        """``**kwargs`` likewise."""
        return () if _is_rest(obj) else super().keys(obj)


def _is_rest(proxy: fx.Proxy) -> bool:
    return proxy.node.op == "placeholder" and str(proxy.node.target).startswith("*")


class _Walk:
    def __init__(self, root: nn.Module, pruned: nn.Module, named: set[int]) -> None:
        self._root, self._pruned, self._named = root, pruned, named
        self._num = outputs_of(pruned)
        self._spatial = len(pruned.kernel_size) if is_convolution(pruned) else 0
        self._values: dict[fx.Node, Units] = {}
        self._shapes: dict[fx.Node, Units] = {}
        self._roles: dict[int, str] = {}
        self._flow = Flow()

    def through(self, graph: fx.Graph) -> Flow:
        for node in graph.nodes:
            if node.op == "get_attr" and id(self._owner(str(node.target))) in self._named:
                raise Unknown(f"the forward of a {class_of(self._root).__name__} reads {str(node.target)!r} itself")
            flows = [n for n in node.all_input_nodes if n in self._values]
            shapes = [n for n in node.all_input_nodes if n in self._shapes]
            if shapes and not flows:
                self._of_shape(node)
            elif node.op == "call_module":
                self._module(node, self._root.get_submodule(str(node.target)), flows)
            elif flows:
                self._operation(node, flows)
        if not self._flow.sources:
            raise Unknown(f"the forward of a {class_of(self._root).__name__} does not call it")
        if not self._flow.takers:
            raise Unknown("it reaches none of its related modules")
        calls = {id(m) for m in (*self._flow.sources, *self._flow.norms, *(m for m, _ in self._flow.takers))}
        missed = [m for m in self._root.modules() if id(m) in self._named - calls]
        if missed:
            raise Unknown(f"a related {class_of(missed[0]).__name__} gets nothing from it")
        return self._flow

    def _owner(self, target: str) -> nn.Module | None:
        try:
            return self._root.get_submodule(target.rpartition(".")[0])
        except AttributeError:
            return None

    # --- modules

    def _module(self, node: fx.Node, module: nn.Module, flows: list[fx.Node]) -> None:
        if not flows:
            if module is self._pruned or (id(module) in self._named and self._gives(module)):
                self._role(module, "gives units")
                self._values[node] = Units(_given_by(module), self._spatial)
                _once(self._flow.sources, module)
            elif id(module) in self._named and not isinstance(module, BatchNorm):
                self._role(module, "takes something else")
            return
        value = self._values[flows[0]]
        if has_user_hooks(module):
            raise Unknown(f"a {class_of(module).__name__} has hooks, which may see and change the units")
        if len(node.args) != 1 or node.kwargs or len(flows) != 1:
            raise Unknown(f"a {class_of(module).__name__} takes it together with other things")
        if isinstance(module, BatchNorm):
            self._values[node] = self._norm(module, value)
        elif id(module) in self._named:
            self._role(module, "takes units")
            self._take(module, value)
        elif class_of(module) in _MODULES:
            self._values[node] = self._mapped(value, module)
        elif (class_of(module) in _MAX_POOLS and value.spatial) or (
            class_of(module) in _MEAN_POOLS and value.spatial and not (_padded(module) and module.count_include_pad)
        ):
            self._values[node] = value
        elif isinstance(module, nn.Flatten) and (module.start_dim, module.end_dim) == (1, -1):
            self._values[node] = self._flattened(value)
        else:
            raise Unknown(
                f"it goes into a {class_of(module).__name__} ({node.target}), which is not among related_modules"
                if any(True for _ in module.parameters()) else
                f"it goes through a {class_of(module).__name__}, which is not known to treat each unit alone"
            )  # fmt: skip

    def _gives(self, module: nn.Module) -> bool:
        alike = is_convolution(module) == is_convolution(self._pruned) and not isinstance(module, BatchNorm)
        return alike and outputs_of(module) == self._num

    def _role(self, module: nn.Module, role: str) -> None:
        if self._roles.setdefault(id(module), role) != role:
            raise Unknown(f"a {class_of(module).__name__} is called twice, and {role} only once")

    def _norm(self, norm: Any, value: Units) -> Units:
        if value.flat or norm.num_features != self._num:
            raise Unknown(f"a {class_of(norm).__name__} of {norm.num_features} features follows")
        constant = value.constant
        if norm.running_mean is not None:
            mean, var = norm.running_mean.double().cpu(), norm.running_var.double().cpu()
            constant = (constant - mean) / (var + norm.eps).sqrt()
        else:
            constant = constant * 0
        if norm.weight is not None:
            scaled = constant * norm.weight.detach().double().cpu()
            constant = torch.where(norm.weight.detach().cpu() == 0, 0.0, scaled) + norm.bias.detach().double().cpu()
        _once(self._flow.norms, norm)
        return Units(constant, value.spatial)

    def _take(self, module: nn.Module, value: Units) -> None:
        many = inputs_of(module)
        fits = many % self._num == 0 if value.flat else many == self._num
        if is_convolution(module):
            fits = fits and value.spatial == len(module.kernel_size) and module.groups == 1
        elif is_linear(module):
            fits = fits and value.spatial == 0
        if not fits:
            raise Unknown(
                f"a related {class_of(module).__name__} takes {many} inputs in another way than as these "
                f"{self._num} units"
            )
        self._flow.takers.append((module, value.constant))

    # --- operations

    def _operation(self, node: fx.Node, flows: list[fx.Node]) -> None:
        value = self._values[flows[0]]
        if node.op == "output":
            raise Unknown(f"it leaves the {class_of(self._root).__name__} by itself")
        target: Any = node.target
        if target is getattr and node.args[1] in ("shape", "dtype", "device", "ndim", "is_cuda"):
            self._shapes[node] = value
        elif target in ("size", "dim"):
            self._shapes[node] = value
            if len(node.args) > 1:
                self._check_dim(node.args[1], value)
        elif target in _FUNCTIONS or target in _METHODS:
            self._values[node] = self._elementwise(node, flows)
        elif target in _POOL_FUNCTIONS and value.spatial:
            self._values[node] = value
        elif (target in (torch.flatten, "flatten") and node.args[1:] in ((1,), (1, -1)) and not node.kwargs) or (
            target in ("view", "reshape", torch.reshape) and self._is_flatten(node)
        ):
            self._values[node] = self._flattened(value)
        elif target in (torch.mean, "mean"):
            self._values[node] = self._mean(node, value)
        else:
            name = target if isinstance(target, str) else getattr(target, "__name__", str(target))
            raise Unknown(f"it goes through {name!r}, which is not known to treat each unit alone")

    def _elementwise(self, node: fx.Node, flows: list[fx.Node]) -> Units:
        operands = [self._values[n] for n in flows]
        others = [n for n in node.all_input_nodes if n not in self._values]
        if others or len({(v.spatial, v.flat) for v in operands}) > 1:
            raise Unknown(f"it meets something else in {node.name!r}")
        args = fx.node.map_arg(node.args, lambda n: self._values[n].constant.clone())
        kwargs = fx.node.map_arg(node.kwargs, lambda n: self._values[n].constant.clone())
        target: Any = node.target
        call: Callable[..., Any] = getattr(torch.Tensor, target) if isinstance(target, str) else target
        constant = call(*args, **kwargs).double()
        for operand in operands:
            constant = torch.where(operand.constant.isnan(), torch.nan, constant)
        if target in _PRODUCTS:
            for operand in operands:
                constant = torch.where(operand.constant == 0, 0.0, constant)
        return Units(constant, operands[0].spatial, operands[0].flat)

    def _mapped(self, value: Units, module: nn.Module) -> Units:
        constant = module(value.constant.clone()).double()
        return Units(torch.where(value.constant.isnan(), torch.nan, constant), value.spatial, value.flat)

    def _flattened(self, value: Units) -> Units:
        if value.spatial == 0 and not value.flat:
            raise Unknown("it is flattened, and how many dims there are before the units is not known")
        return Units(value.constant, 0, flat=True)

    def _is_flatten(self, node: fx.Node) -> bool:
        given: Any = node.args[1:]
        sizes = given[0] if len(given) == 1 and isinstance(given[0], tuple) else given
        return len(sizes) == 2 and sizes[1:] == (-1,) and isinstance(sizes[0], fx.Node) and self._first_size(sizes[0])

    def _first_size(self, node: fx.Node) -> bool:
        return node.target in ("size", operator.getitem) and node.args[1:] == (0,)

    def _mean(self, node: fx.Node, value: Units) -> Units:
        said: Any = node.kwargs.get("dim", node.args[1] if len(node.args) > 1 else None)
        dims = [said] if isinstance(said, int) else list(said or ())
        rank = 2 + value.spatial
        places = {d % rank for d in dims}
        keep = bool(node.kwargs.get("keepdim", node.args[2] if len(node.args) > 2 else False))
        if value.flat or not places or not places <= set(range(2, rank)):
            raise Unknown("a mean over the units, or over dims that are not known, follows")
        return Units(value.constant, value.spatial if keep else value.spatial - len(places))

    def _of_shape(self, node: fx.Node) -> None:
        value = next(self._shapes[n] for n in node.all_input_nodes if n in self._shapes)
        if node.target is operator.getitem:
            self._check_dim(node.args[1], value)

    def _check_dim(self, dim: Any, value: Units) -> None:
        rank = 2 + value.spatial
        if not isinstance(dim, int) or (dim % rank == 1 if value.spatial else dim in (-1, 1)):
            raise Unknown("its forward asks how many units there are")


def _given_by(module: nn.Module) -> Tensor:
    """(U,) float64: what a unit is whose weights are all zero, its bias; NaN of others."""
    weight = module._parameters["weight"]
    if weight is None:
        raise AssertionError(f"a {class_of(module).__name__} without a weight is no layer")
    rows = weight.detach().movedim(out_dim_of(module), 0).flatten(1)
    bias = module._parameters.get("bias")
    constant = torch.zeros(len(rows), dtype=torch.float64) if bias is None else bias.detach().double().cpu()
    return torch.where((rows == 0).all(1).cpu(), constant, torch.nan)


def _padded(module: Any) -> bool:
    padding = module.padding
    return any(padding) if isinstance(padding, tuple) else bool(padding)


def _once(there: list[nn.Module], module: nn.Module) -> None:
    if all(other is not module for other in there):
        there.append(module)


def _short(error: BaseException) -> str:
    text = (str(error).strip().splitlines() or [""])[0]
    return f"{type(error).__name__}: {text[:120]}"


@contextlib.contextmanager
def _evaluating(root: nn.Module) -> Iterator[None]:
    modes = [(module, module.training) for module in root.modules()]
    root.eval()
    try:
        with torch.no_grad():
            yield
    finally:
        for module, mode in modes:
            module.training = mode
