"""``zoo tensor``: how a model is cut over the ranks of the axis ``tensor``."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from zoo.cli.failure import one_sentence

app = typer.Typer(no_args_is_help=True, help="Look at plans of tensor parallelism.")


@app.callback()
def _group() -> None:
    """Keeps `plan` a command of its own name."""


@app.command()
def plan(
    model: Annotated[Path, typer.Argument(help="A folder of a model of transformers, or its config.json.")],
    tp: Annotated[int, typer.Option(min=1, help="Ranks.")] = 2,
    tokens: Annotated[int, typer.Option(min=1, help="Tokens of a forward, of all sequences.")] = 2048,
    grain: Annotated[int, typer.Option(min=1, help="Features are dealt in multiples of this.")] = 1,
    inference: Annotated[bool, typer.Option("--inference", help="Without gradients.")] = False,
    prove: Annotated[bool, typer.Option(help="Compare a small model of the class, whole and split.")] = True,
) -> None:
    """Print the plan of a model, the bytes of each rank, and what is sent."""
    with one_sentence(shared=False):
        from zoo.tensor import plan_of, summary
        from zoo.tensor import prove as proof

        if not (model / "config.json" if model.is_dir() else model).is_file():
            raise ValueError(f"{model} is no folder with a config.json, and no such file.")
        made = empty_model(model)
        found = plan_of(made)
        print(found)
        if prove:
            shown = proof(made, made.config, found, tp, training=not inference, grain=grain)
            gradients = "" if shown.gradients is None else f", gradients by {shown.gradients:.1e}"
            print(f"proved at degree {tp}: outputs differ by {shown.outputs:.1e}{gradients}")
        result = summary(made, found, tp, training=not inference, grain=grain)
        mib = ", ".join(f"{size / 2**20:.1f}" for size in result.rank_bytes)
        print(f"parameters: {result.whole_bytes / 2**20:.1f} MiB; by rank {mib} MiB")
        forward, backward = result.sent_bytes(tokens, next(made.parameters()).itemsize)
        print(f"a forward of {tokens} tokens: {_sums(result.sums_forward, result.gathered)}, {forward / 2**20:.1f} MiB")
        if not inference:
            print(f"its backward: {_sums(result.sums_backward, 0)}, {backward / 2**20:.1f} MiB")
            print(f"a step: gradients of {result.partial_bytes / 2**20:.1f} MiB that ranks have summands of")


def _sums(sums: dict[int, int], gathered: int) -> str:
    told = [f"{number} sums of tokens x {features}" for features, number in sorted(sums.items())]
    return " and ".join([*told, *([f"tokens x {gathered} gathered"] if gathered else [])]) or "nothing"


def empty_model(path: Path, **options: Any) -> Any:
    """The model without values; its class is one of transformers, never one that comes with the files.

    Args:
        path: a folder, or its config.json. options: of the configuration, in the place of its own.

    Raises:
        ValueError: it is no configuration, or of no model.
    """
    import torch
    import transformers

    try:
        config = transformers.AutoConfig.from_pretrained(
            path, trust_remote_code=False, local_files_only=True, **options
        )
    except (OSError, ValueError) as error:  # what transformers says of a file that is no JSON, or of no model it knows
        raise ValueError(str(error)) from None
    except Exception as error:  # values that its class cannot be made of, in the words of many packages
        said = " ".join(str(error).split())
        raise ValueError(f"{path} is no configuration of a model: {type(error).__name__}: {said}") from error
    kinds = [getattr(transformers, f"AutoModel{name}") for name in ("ForCausalLM", "ForSeq2SeqLM", "ForMaskedLM", "")]
    for kind in kinds:
        if type(config) in kind._model_mapping:
            with torch.device("meta"):
                return kind.from_config(config, trust_remote_code=False)
    raise ValueError(f"{path} is a {config.model_type}, of which transformers has no model.")
