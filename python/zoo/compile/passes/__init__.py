"""Passes over graphs, one a file, and what each promises."""

from zoo.compile.contract import PassContract, register_compile_pass
from zoo.compile.passes.keep import keep
from zoo.compile.passes.place import place

register_compile_pass("keep", keep, PassContract(adds=frozenset({"kept"})))
register_compile_pass("place", place, PassContract(requires=frozenset({"kept"}), adds=frozenset({"events"})))

DEFAULT = ("keep", "place")
