"""``deepspeed.module_inject.auto_tp`` and ``tp_shard``: a model cut by hand, and what a rank gets of a number.

``deepspeed.initialize`` with the section ``tensor_parallel`` cuts a model without them.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from torch import nn

from zoo.config import ConfigError
from zoo.deepspeed.adapters.communication import comm as dist
from zoo.deepspeed.adapters.tensor.layers import LinearLayer, adopt, comm_of
from zoo.tensor.injection import plan_of_injection_policy
from zoo.tensor.patterns import PartitionConfig, plan_of_partition_config
from zoo.tensor.plans import Plan
from zoo.tensor.shares import deal
from zoo.tensor.splitting import LINEAR, split
from zoo.tensor.ways import family_of

_ROWS = ("out_proj", "o_proj", "down_proj", "wo", "fc2", "dense_4h_to_h", "c_proj")
"""Last names of row-parallel layers in models of transformers that no family of zoo has."""


class AutoTP:
    """Cuts a model over the ranks of a group.

    Args:
        module: the model. all_reduce_linears: names of row-parallel layers, see
            :func:`zoo.tensor.plan_of_injection_policy`; used without ``partition_config``.
        prefix, state_dict, linear_layer_setting, orig_layer_impl, keep_module_on_host: of DeepSpeed's way to load
            weights while they are cut; a ``state_dict`` is refused.
        partition_config: specs of layers.
        tp_grain_size: features are dealt in multiples of this.
        vocab_parallel_lm_head: refused, see ``zoo.tensor.in_parts``. model_config, training_mode: say nothing more.
    """

    def __init__(
        self, module: nn.Module, all_reduce_linears: Sequence[str], prefix: str, state_dict: Any,
        linear_layer_setting: Any, orig_layer_impl: Any, keep_module_on_host: bool = False,
        partition_config: PartitionConfig | None = None, vocab_parallel_lm_head: bool = False, model_config: Any = None,
        tp_grain_size: int = 1, training_mode: bool = False,
    ) -> None:  # fmt: skip
        if state_dict is not None:
            raise ConfigError("AutoTP(state_dict=...): weights are loaded by zoo.tensor.load, after the model is cut.")
        if vocab_parallel_lm_head:
            raise ConfigError(
                "AutoTP(vocab_parallel_lm_head=True): the section tensor_parallel has that key; zoo.tensor.in_parts "
                "does it to a model that is cut."
            )
        self.tp_grain_size = tp_grain_size
        self.module, self.all_reduce_linears, self.partition_config = module, all_reduce_linears, partition_config
        self.prefix, self.state_dict, self.orig_layer_impl = prefix, state_dict, orig_layer_impl
        self.linear_layer_setting, self.keep_module_on_host = linear_layer_setting, keep_module_on_host
        self.mp_size: int | None = None
        self.mp_group: Any = None
        self.linear_policies: Mapping[Any, Any] | None = None

    def set_tensor_parallel_config(self, mp_size: int, mp_group: Any) -> None:
        """The ranks that get parts; None: this one keeps all.

        Raises:
            ConfigError: the group has another number of ranks.
        """
        if mp_group is not None and dist.get_world_size(mp_group) != mp_size:
            raise ConfigError(
                f"set_tensor_parallel_config(mp_size={mp_size}) with a group of {dist.get_world_size(mp_group)} ranks; "
                "give the group of those that get parts."
            )
        self.mp_size, self.mp_group = mp_size, mp_group

    def update_linear_policies(self) -> None:
        """Which classes are cut: linear layers and embeddings, as plans know them."""
        self.linear_policies = {nn.Linear: LinearLayer}

    def plan(self) -> Plan:
        """How the model is cut."""
        comm = comm_of(self.mp_group)
        if self.partition_config is not None:
            return plan_of_partition_config(self.module, self.partition_config, 1 if comm is None else comm.size)
        return plan_of_injection_policy(self.module, list(self.all_reduce_linears))

    def _replace_module(self, r_module: nn.Module, prev_name: str = "", prev_class_name: str = "") -> nn.Module:
        """Cut the model, in place; ``r_module`` is the one that this object was made for."""
        if r_module is not self.module:
            raise ConfigError("AutoTP cuts the whole model that it was made for; give that one.")
        plan, comm = self.plan(), comm_of(self.mp_group)
        if comm is not None and comm.size > 1:
            split(r_module, plan, comm, grain=self.tp_grain_size)
        for path, module in r_module.named_modules():
            rule = plan.rule_of(path)
            linear = isinstance(module, nn.Linear) and type(module).__mro__[-3:][0].__name__ in LINEAR
            if rule is not None and linear and (rule.rows or rule.columns):
                adopt(module, self.mp_group, path, row=bool(rule.columns), scatter=rule.scatter, gather=rule.gather)
        return r_module

    @staticmethod
    def tp_parser(model: nn.Module) -> list[tuple[type[nn.Module], tuple[str, ...]]]:
        """[(class of the repeated modules, names of its row-parallel layers)]: what the model's family says, or names
        that usually are.

        Raises:
            AssertionError: none is found.
        """
        family = family_of(model)
        found: dict[type[nn.Module], dict[str, None]] = {}  # of one class some may have experts, and others not
        for _, blocks in _lists(model):
            for path, block in blocks:
                rows = [name for name, layer in block.named_modules() if _is_row(f"{path}.{name}", layer, family)]
                if rows:
                    found.setdefault(type(block), {}).update(dict.fromkeys(rows))
        if not found:
            raise AssertionError(
                f"{type(model).__name__}: no row-parallel layer is found; give partition_config, or a plan."
            )
        return [(kind, tuple(rows)) for kind, rows in found.items()]

    @staticmethod
    def supported(model: Any) -> bool:
        """Whether :meth:`tp_parser` finds something."""
        try:
            return bool(AutoTP.tp_parser(model))
        except AssertionError:
            return False

    @staticmethod
    def get_model_num_kv_heads(config: Any) -> int | None:
        """Heads of keys and values that a configuration says, under any of its names; None without."""
        names = ("multi_query_group_num", "num_kv_heads", "num_key_value_heads", "num_attention_heads", "n_heads",
                 "attention_heads")  # fmt: skip
        return next((value for name in names if (value := getattr(config, name, None)) is not None), None)


def _lists(model: nn.Module) -> Iterable[tuple[str, list[tuple[str, nn.Module]]]]:
    for path, module in model.named_modules():
        if isinstance(module, nn.ModuleList):
            yield path, [(f"{path}.{name}", child) for name, child in module.named_children()]


def _is_row(path: str, layer: nn.Module, family: Plan | None) -> bool:
    if not isinstance(layer, nn.Linear):
        return False
    if family is not None:
        rule = family.rule_of(path)
        return rule is not None and bool(rule.columns)
    return path.rpartition(".")[2] in _ROWS


# -- deepspeed.module_inject.tp_shard ---------------------------------------------------------------------------------

_said: dict[str, int | None] = {"num_kv_heads": None, "num_attention_heads": None, "n_embd": None, "tp_grain_size": 1}
_WORDS = ("lm_head", "embed_out")
_PERCEPTRONS = ("mlp", "gate_proj", "up_proj", "down_proj", "w1", "w2", "w3")


def set_num_kv_heads(num: int | None) -> None:
    """Heads in whose multiples :func:`get_shard_size` deals what belongs to attention; None: in none."""
    _said["num_kv_heads"] = num


def set_num_attention_heads(num: int | None) -> None:
    """What :func:`get_num_attention_heads` says."""
    _said["num_attention_heads"] = num


def set_n_embd(num: int | None) -> None:
    """What :func:`get_n_embd` says."""
    _said["n_embd"] = num


def set_tp_grain_size(num: int) -> None:
    """In whose multiples :func:`get_shard_size` deals all else."""
    _said["tp_grain_size"] = num


def get_num_kv_heads() -> int | None:
    """What was said, None at first."""
    return _said["num_kv_heads"]


def get_num_attention_heads() -> int | None:
    """What was said, None at first."""
    return _said["num_attention_heads"]


def get_n_embd() -> int | None:
    """What was said, None at first."""
    return _said["n_embd"]


def get_shard_size(
    total_size: int, mp_size: int, name: str | None = None, rank: int | None = None, mp_group: Any = None,
    num_kv_heads: int | None = None,
) -> int:  # fmt: skip
    """What a rank gets of so many features: as many as the others, or one grain more where they do not divide.

    Args:
        name: of the layer; heads are kept whole unless it is of a perceptron, or the head.
        rank: among the ranks that share layers; by default this process's in ``mp_group``, or in the job.
    """
    if rank is None:
        if mp_group is None and dist.get_world_size() != mp_size:
            raise ValueError(
                f"get_shard_size(mp_size={mp_size}) in a job of {dist.get_world_size()} ranks: give rank= or mp_group=."
            )
        rank = dist.get_rank(mp_group)
    heads = num_kv_heads if num_kv_heads is not None else _said["num_kv_heads"]
    others = str(name) in _WORDS or any(word in str(name) for word in _PERCEPTRONS)
    if heads is not None and total_size % heads == 0 and not others:
        each, more = divmod(heads, mp_size)
        return total_size // heads * (each + (rank < more))
    grain = _said["tp_grain_size"] or 1
    rest = total_size % grain  # the last rank's
    if total_size - rest < mp_size * grain:
        each, more = divmod(total_size, mp_size)
        return each + (rank < more)
    start, stop = deal(total_size - rest, mp_size, rank, grain)
    return stop - start + (rest if rank == mp_size - 1 else 0)


def get_shard_size_list(
    total_size: int, mp_size: int, name: str | None = None, num_kv_heads: int | None = None
) -> list[int]:  # fmt: skip
    """:func:`get_shard_size` of every rank."""
    return [get_shard_size(total_size, mp_size, name, rank, num_kv_heads=num_kv_heads) for rank in range(mp_size)]
