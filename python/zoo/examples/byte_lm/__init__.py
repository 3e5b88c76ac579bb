"""A byte-level language model trained on the text that every Python installation carries.

* :class:`ByteGPT`: the model.
* :func:`standard_library_text`, :class:`Corpus`: the text, and its division into training and held-out slices.
* :class:`ByteWindows`: the data set of fixed-length windows.
* :class:`Bigram`: the baseline to beat.
* :func:`load`: the model of a finished run.
* :class:`ByteTask`: all of it as the component ``task: byte_lm``.
"""

from zoo.examples.byte_lm.bigram import Bigram
from zoo.examples.byte_lm.corpus import Corpus, file_text, standard_library_text
from zoo.examples.byte_lm.model import ByteGPT
from zoo.examples.byte_lm.saved import load
from zoo.examples.byte_lm.task import ByteTask
from zoo.examples.byte_lm.windows import ByteWindows

__all__ = ["Bigram", "ByteGPT", "ByteTask", "ByteWindows", "Corpus", "file_text", "load", "standard_library_text"]
