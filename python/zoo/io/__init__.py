"""Tensors' bytes on disk: the Python face of the Rust crate ``zoo-io``.

`Handle` reads and writes tensors asynchronously, past the page cache, at the speed of the device; `BufferPool` makes
tensors in aligned, where possible page-locked, memory, under one cap with those of other processes if they share a
`Ledger`; `Striped` spreads one sequence of bytes over several devices;
`Mock` is a device that misbehaves on order.

What is named here is imported when it is first asked for; ``__init__.pyi`` says from where.
"""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
