"""The byte-level BPE tokenizer that a GGUF file describes, built with the ``tokenizers`` package."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from zoo.examples.smollm2.gguf_file import GGUFFile, needed

if TYPE_CHECKING:
    from tokenizers import Tokenizer

_CONTROL = 3  # "token_type" of marks such as <|im_end|>, in the GGUF specification


def tokenizer_of(file: GGUFFile) -> Tokenizer:
    """Text to token ids and back, as the model was trained: ids are places in the file's list of tokens.

    A mark such as ``<|im_end|>`` inside a text becomes its one token.

    Raises:
        ValueError: another kind of tokenizer, or tokens and merges that do not fit together.
    """
    tokenizers = needed("tokenizers")
    kind, split = file.value("tokenizer.ggml.model", str), file.value("tokenizer.ggml.pre", str, "default")
    if kind != "gpt2" or split not in ("smollm", "gpt-2", "default"):
        raise ValueError(
            f"{file.path.name} has a tokenizer of kind {kind!r} with words of kind {split!r}; byte-level BPE ('gpt2') "
            f"with words of 'smollm', 'gpt-2' or 'default' is supported."
        )
    tokens = file.strings("tokenizer.ggml.tokens")
    merges = [tuple(merge.split(" ")) for merge in file.strings("tokenizer.ggml.merges")]
    types: list[Any] = file.value("tokenizer.ggml.token_type", list, [1] * len(tokens))
    if len(set(tokens)) != len(tokens) or len(types) != len(tokens) or any(len(merge) != 2 for merge in merges):
        pairs = "pairs" if all(len(merge) == 2 for merge in merges) else "not all pairs"
        raise ValueError(
            f"{file.path.name} has {len(tokens)} tokens of which {len(set(tokens))} differ, {len(types)} types of "
            f"them, and merges that are {pairs}; get the file again."
        )
    ids = {token: index for index, token in enumerate(tokens)}
    try:
        bpe = tokenizers.models.BPE(vocab=ids, merges=merges)
    except Exception as error:  # the package has no error of its own for a merge into something that is no token
        raise ValueError(f"{file.path.name} has tokens and merges that do not fit together ({error}).") from None
    tokenizer: Tokenizer = tokenizers.Tokenizer(bpe)
    prefix = file.value("tokenizer.ggml.add_space_prefix", bool, False)
    words = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=prefix, use_regex=True)
    if split == "smollm":  # each digit is a word
        words = tokenizers.pre_tokenizers.Sequence([tokenizers.pre_tokenizers.Digits(individual_digits=True), words])
    tokenizer.pre_tokenizer = words
    tokenizer.decoder = tokenizers.decoders.ByteLevel()
    marks = [token for token, type_ in zip(tokens, types, strict=True) if type_ == _CONTROL]
    tokenizer.add_special_tokens([tokenizers.AddedToken(mark, special=True, normalized=False) for mark in marks])
    return tokenizer


def end_token(file: GGUFFile) -> int | None:
    """The id after which a text is over, where the file says one."""
    key = "tokenizer.ggml.eos_token_id"
    return file.value(key, int) if file.has(key) else None
