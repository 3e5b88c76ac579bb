"""``zoo ckpt``: look at training checkpoints, verify, compare, convert and remove them."""

from __future__ import annotations

import contextlib
import json
import sys
from collections.abc import Callable, Iterator
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from zoo.cli.failure import FAILURE, one_sentence

if TYPE_CHECKING:
    from rich.table import Table

    from zoo.checkpointing import Checkpoint
    from zoo.checkpointing.comparing import Difference

app = typer.Typer(no_args_is_help=True, help="Look at checkpoints, verify, compare, convert and remove them.")

Directory = Annotated[str, typer.Argument(metavar="DIR", help="The directory that holds the tags.")]
Place = Annotated[str, typer.Argument(metavar="DIR[/TAG]", help="A checkpoint; without a tag the latest.")]
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON.")]
_DTYPES = {"fp64": "float64", "fp32": "float32", "fp16": "float16", "bf16": "bfloat16"}


@app.command("ls")
def ls(directory: Directory, as_json: AsJson = False) -> None:
    """List the checkpoints of DIR, the newest last: * is the latest. Exit code 1 if one is damaged or may not be read.

    Bytes are not read: `zoo ckpt verify` does that.
    """
    with one_sentence(shared=False):
        from rich.table import Table

        from zoo.checkpointing.listing import DAMAGED, UNREADABLE, listing

        found = listing(directory)
        if as_json:
            _print_json([vars(one) for one in found])
        else:
            table = Table("", "tag", "number", "saved", "size", "ranks", "tensors", "state", box=None)
            for one in found:
                size = _human(one.num_bytes) if one.num_bytes is not None else ""
                numbers = (one.number, _when(one.saved_s), size, one.num_ranks, one.num_tensors)
                shown = ("" if number is None else str(number) for number in numbers)
                table.add_row("*" if one.is_latest else "", one.tag, *shown, one.state)
            if found:
                _print(table)
            else:
                typer.echo(f"there are no checkpoints in {directory}")
            for one in found:
                if one.why:
                    typer.echo(f"{one.tag}: {_plain(one.why)}")
    if any(one.state in (DAMAGED, UNREADABLE) for one in found):
        raise typer.Exit(FAILURE)


@app.command()
def show(
    place: Place,
    as_json: AsJson = False,
    name: Annotated[str | None, typer.Option(help="Only tensors whose name contains this.")] = None,
) -> None:
    """Print what a checkpoint holds: tensors with their roles, numbers, and what the job has kept beside them."""
    with one_sentence(shared=False), _open(place, verify=False) as found:
        from rich.table import Table

        described = _described(found, name or "")
        if as_json:
            _print_json(described)
            return
        for key in ("tag", "path", "version", "number", "saved", "ranks", "files", "bytes"):
            typer.echo(f"{key:<8} {_plain(str(described[key]))}")
        table = Table("tensor", "shape", "role", "dtype", "bytes", "pieces", box=None)
        for tensor, entry in described["tensors"].items():
            shape = "×".join(map(str, entry["shape"])) or "scalar"
            for role, one in entry["roles"].items():
                table.add_row(
                    _plain(tensor), shape, _plain(role), one["dtype"], f"{one['bytes']:,}", str(one["pieces"])
                )
        _print(table)
        for title in ("scalars", "meta"):
            if described[title]:
                typer.echo(f"{title} {json.dumps(described[title], indent=1)}")


@app.command()
def verify(
    place: Annotated[str, typer.Argument(metavar="DIR[/TAG]", help="A checkpoint; without a tag all of them.")],
) -> None:
    """Read every byte and compare it with its checksum; exit code 1 where one is not what was written, or where
    `latest` names nothing that is there."""
    with one_sentence(shared=False):
        from zoo.checkpointing import CheckpointError, latest_tag, load
        from zoo.checkpointing.listing import UNFINISHED, listing
        from zoo.comm import Communicator

        root, tag = _split(place)
        tags = [one.tag for one in listing(root) if one.state != UNFINISHED] if tag is None else [tag]
        if not tags:
            raise ValueError(f"{str(root)!r} holds no checkpoints")
        bad = 0
        for each in tags:
            try:
                with load(root, each, Communicator.alone()) as found:
                    total = sum(entry.size for entry in found.index.files)
                    with _progress(each, total) as told:
                        for _, size in found.verify():
                            told(size)
                typer.echo(f"{each}: {len(found.index.files)} files, {_human(total)}, every byte as it was written")
            except CheckpointError as error:
                bad += 1
                typer.echo(f"zoo: {each}: {_plain(str(error))}", err=True)
        if tag is None:
            try:
                latest = latest_tag(root)
                wrong = f"names {latest!r}, which is not there" if latest not in (None, *tags) else ""
            except CheckpointError as error:
                wrong = _plain(str(error))
            if wrong:
                bad += 1
                typer.echo(f"zoo: latest: {wrong}; give a tag to load another one, or write one into it", err=True)
    if bad:
        raise typer.Exit(FAILURE)


@app.command()
def diff(
    a: Annotated[str, typer.Argument(metavar="A", help="DIR or DIR/TAG.")],
    b: Annotated[str, typer.Argument(metavar="B", help="DIR or DIR/TAG.")],
    role: Annotated[str | None, typer.Option(help="Only tensors in this role, such as parameter.")] = None,
    atol: Annotated[float, typer.Option(min=0, help="Elements that differ by no more are equal.")] = 0.0,
    rtol: Annotated[float, typer.Option(min=0, help="The same, as a part of the element in B.")] = 0.0,
    as_json: AsJson = False,
) -> None:
    """Compare two checkpoints, whatever ranks wrote them; exit code 1 where they differ.

    Tensors in all roles, numbers, what the job has kept beside them and, at the same number of ranks, what belongs to
    each rank. rel: the largest |a - b| / max(|a|, |b|).
    """
    with one_sentence(shared=False), _open(a) as left, _open(b) as right:
        from zoo.checkpointing.comparing import compare

        states = [state for state in left.index.states if role in (None, state.role)]
        if role is not None and not any(state.role == role for one in (left, right) for state in one.index.states):
            raise ValueError(f"neither checkpoint has a tensor in the role {role!r}")
        with _progress("elements", sum(state.numel for state in states), of_bytes=False) as told:
            found = list(compare(left, right, role=role, atol=atol, rtol=rtol, told=told))
        if as_json:
            _print_json([vars(one) for one in found])
        elif found:
            _print_differences(found)
        else:
            typer.echo("no differences" if role is None else f"no differences in the role {role}")
    if found:
        raise typer.Exit(FAILURE)


def _print_differences(found: list[Difference]) -> None:
    from rich.table import Table

    table = Table("name", "role", "differs in", "elements", "abs", "rel", "A and B", box=None)
    for one in found:
        counted = one.what == "values"
        numbers = (f"{one.num_elements:,}", f"{one.max_abs:.3g}", f"{one.max_relative:.3g}") if counted else ("",) * 3
        table.add_row(_plain(one.name), _plain(one.role), one.what, *numbers, _plain(one.detail))
    _print(table)


@app.command()
def export(
    place: Place,
    out: Annotated[
        Path, typer.Argument(metavar="OUT", help="A .safetensors, .bin, .pt or .pth file, or a folder for shards.")
    ],
    format_: Annotated[
        str | None, typer.Option("--format", help="safetensors or bin.", show_default="by OUT's name, safetensors")
    ] = None,
    role: Annotated[str, typer.Option(help="parameter (buffers come with it), exp_avg, …")] = "parameter",
    dtype: Annotated[
        str | None, typer.Option(help="fp32, bf16, fp16: of what has floating point.", show_default="as it was saved")
    ] = None,
    max_shard_size: Annotated[str, typer.Option(help="Of each file in a folder.")] = "5GB",
    exclude_frozen_parameters: Annotated[
        bool, typer.Option("--exclude-frozen-parameters", help="Leave out what was not trained.")
    ] = False,
) -> None:
    """Write whole tensors for whoever has no zoo, as Hugging Face's libraries and torch.load read them."""
    with one_sentence(shared=False):
        if format_ not in (None, "safetensors", "bin"):
            raise ValueError(f"--format {format_}; it is safetensors or bin.")
        with _open(place) as found:
            from zoo.checkpointing.zero_to_fp32 import TORCH_SUFFIXES, dtype_named, place_of, tensors_of, write_model

            wanted = dtype_named(_DTYPES.get(dtype, dtype)) if dtype is not None else None
            if wanted is not None and not wanted.is_floating_point:
                raise ValueError(f"--dtype {dtype}; it is fp32, bf16, fp16 or another one of floating point.")
            is_torch = format_ == "bin" if format_ is not None else out.name.endswith(TORCH_SUFFIXES)
            safe = None if format_ is None and is_torch else not is_torch
            safe, shard_bytes = place_of(out, safe, max_shard_size)
            tensors = tensors_of(
                found, role=role, dtype=wanted, exclude_frozen_parameters=exclude_frozen_parameters
            )  # fmt: skip
            total = sum({id(tensor): tensor.nbytes for tensor in tensors.values()}.values())
            with _progress(found.tag, total) as told:
                written = write_model(tensors, out, safe=safe, max_shard_bytes=shard_bytes, told=told)
            for path in written:
                typer.echo(path)


@app.command("import")
def import_(
    source: Annotated[Path, typer.Argument(metavar="SRC", help="A file or folder of another system.")],
    out: Annotated[str, typer.Argument(metavar="DST", help="A directory of checkpoints.")],
    format_: Annotated[
        str | None,
        typer.Option("--format", help="deepspeed, dcp, safetensors, gguf or torch.", show_default="by what is in SRC"),
    ] = None,
    tag: Annotated[
        str | None, typer.Option(help="Of DeepSpeed's: which checkpoint in SRC.", show_default="its latest")
    ] = None,
    name: Annotated[str | None, typer.Option(help="Its tag in DST.", show_default="its own")] = None,
    weights_only: Annotated[bool, typer.Option("--weights-only", help="No states of the optimizer.")] = False,
    groups: Annotated[
        Path | None,
        typer.Option(
            help="Of DeepSpeed's stage 0: a JSON file [[names of the first group's parameters], …], in the optimizer's "
            "order."
        ),
    ] = None,
    key: Annotated[
        str | None, typer.Option(help="Of a torch.save file: where in it the state_dict is, such as model.weights.")
    ] = None,
) -> None:
    """Write a checkpoint of another system as one of zoo's, piece by piece, whatever its size.

    DeepSpeed's go on where they stopped: engine.load_checkpoint(DST). Others have weights, and states of the optimizer
    where the file has them: engine.load_checkpoint(DST, load_module_only=True).
    """
    with one_sentence(shared=False):
        from zoo.checkpointing.foreign import import_checkpoint, open_foreign
        from zoo.checkpointing.foreign.importing import num_bytes

        with open_foreign(
            source, format_, tag, groups=_groups(groups), optimizer_states=not weights_only, key=key
        ) as found:
            with _progress(found.tag, num_bytes(found)) as told:
                path = import_checkpoint(found, out, name, told=told)
            left_out = [f"{file}: {_plain(str(unknown))}" for file, unknown in found.unknown[:5]]
            left_out += [_plain(one) for one in found.meta.get("left_out", ())[:5]]
            if left_out:
                typer.echo(f"zoo: left out, as it is no tensor and no plain value: {'; '.join(left_out)}", err=True)
        typer.echo(path)


def _groups(path: Path | None) -> list[list[str]] | None:
    if path is None:
        return None
    try:
        found = json.loads(path.read_text())
    except ValueError as error:
        raise ValueError(f"--groups {str(path)!r} is no JSON: {error}") from None
    if not isinstance(found, list) or not all(
        isinstance(group, list) and all(isinstance(name, str) for name in group) for group in found
    ):
        raise ValueError(f"--groups {str(path)!r}: it is JSON as [[names of parameters], …], a list for each group")
    return found


@app.command()
def reshard(
    place: Place,
    out: Annotated[str, typer.Argument(metavar="OUT", help="Another directory.")],
    ranks: Annotated[int, typer.Option(min=1, help="Whose number of files it gets.")],
) -> None:
    """Write a checkpoint anew as another number of ranks would have, in the present version of the format.

    To continue at another number of ranks nobody needs that: any number reads any checkpoint.
    """
    with one_sentence(shared=False), _open(place) as found:
        from zoo.checkpointing.resharding import num_bytes
        from zoo.checkpointing.resharding import reshard as write

        with _progress(found.tag, num_bytes(found)) as told:
            path = write(found, out, ranks, told=told)
        if ranks != found.world_size and any(found.rank_state(rank) for rank in range(found.world_size)):
            typer.echo(
                f"zoo: left out: what belongs to each of the {found.world_size} ranks, such as random numbers, which "
                f"{ranks} would not take", err=True,
            )  # fmt: skip
        typer.echo(path)


@app.command()
def prune(
    directory: Directory,
    keep: Annotated[int, typer.Option(min=1, help="How many of the newest stay.")],
    older_than_s: Annotated[float, typer.Option(min=0, help="Of the others only those go that are so old.")] = 0.0,
    best: Annotated[
        str | None,
        typer.Option(
            metavar="min|max:WHERE", help="The best stays too, such as min:client.loss, a number in its meta."
        ),
    ] = None,
    rest_age_s: Annotated[
        float, typer.Option(min=0, help="What a killed save has left goes after so long.", show_default="a day")
    ] = 86400.0,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Print what would go, and remove nothing.")] = False,
) -> None:
    """Remove all but the newest whole checkpoints of DIR; the one that `latest` names always stays. Prints what is
    gone."""
    with one_sentence(shared=False):
        from zoo.checkpointing import prune as remove
        from zoo.checkpointing.format.disk import place_of

        disk, root = place_of(directory)
        if not disk.is_directory(root):
            raise ValueError(f"there is no directory {directory!r}")
        for tag in remove(
            directory, keep, older_than_s=older_than_s, best=best, rest_age_s=rest_age_s, dry_run=dry_run
        ):
            typer.echo(tag)


# -- places, progress and print ---------------------------------------------------------------------------------------


def _split(place: str) -> tuple[str, str | None]:
    """The directory, and the tag where there is one."""
    from zoo.checkpointing.format.disk import place_of

    disk, path = place_of(place)
    above = str(place).rstrip("/").rpartition("/")[0] if "://" in str(place) else str(path.parent)
    if disk.is_directory(path):
        return (above, path.name) if "manifest.json" in disk.names(path) else (place, None)
    if not disk.is_directory(path.parent):
        raise ValueError(f"{str(place)!r} does not exist; give a directory of checkpoints, or one of its tags")
    return above, path.name


def _open(place: str, *, verify: bool = True) -> Checkpoint:
    from zoo.checkpointing import load
    from zoo.comm import Communicator

    root, tag = _split(place)
    return load(root, tag, Communicator.alone(), verify=verify)


def _described(found: Checkpoint, part: str) -> dict[str, Any]:
    """What ``zoo ckpt show`` says, as JSON has it."""
    import numpy as np

    from zoo.checkpointing.format.exact import dtype_named, encode
    from zoo.checkpointing.format.manifest import number_of

    pieces = np.bincount(found.index.columns["state"], minlength=len(found.index.states)).tolist()
    tensors: dict[str, Any] = {}
    for state, count in zip(found.index.states, pieces, strict=True):
        if part in state.name:
            entry = tensors.setdefault(state.name, {"shape": list(state.shape), "roles": {}})
            num_bytes = state.numel * dtype_named(state.dtype).itemsize
            entry["roles"][state.role] = {"dtype": state.dtype, "bytes": num_bytes, "pieces": count}
    return {
        "tag": found.tag, "path": str(found.path), "version": found.version,
        "number": number_of(found.disk, found.path),
        "saved": _when(found.disk.modified_s(found.path / "manifest.json")),
        "ranks": found.world_size, "files": len(found.index.files),
        "bytes": sum(entry.size for entry in found.index.files), "scalars": encode(dict(found.scalars), "scalars"),
        "meta": encode(dict(found.meta), "meta"), "tensors": tensors,
    }  # fmt: skip


@contextlib.contextmanager
def _progress(what: str, total: int, *, of_bytes: bool = True) -> Iterator[Callable[[int], None]]:
    """A bar on stderr, where that is a terminal; hears of what is done."""
    from rich.console import Console
    from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn, TransferSpeedColumn

    columns: list[Any] = [TextColumn("{task.description}", markup=False), BarColumn()]
    columns += [DownloadColumn(), TransferSpeedColumn()] if of_bytes else [TextColumn("{task.percentage:>3.0f}%")]
    console = Console(file=sys.stderr)
    with Progress(
        *columns, TimeRemainingColumn(), console=console, transient=True, disable=not console.is_terminal
    ) as bar:
        task = bar.add_task(what, total=total)
        yield lambda amount: bar.advance(task, amount)


def _print(table: Table) -> None:
    from rich.console import Console

    console = Console(markup=False, highlight=False)
    if not console.is_terminal:  # into a file or another program: nothing is cut off
        console = Console(markup=False, highlight=False, width=10_000)
    for column in table.columns:
        column.overflow = "fold"
    console.print(table)


def _print_json(value: Any) -> None:
    from zoo.checkpointing.format.exact import encode

    typer.echo(json.dumps(encode(value, "it"), indent=1))


def _plain(text: str) -> str:
    """Without what a terminal would take for a command: names come from files."""
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text)


def _when(saved_s: float | None) -> str:
    return datetime.fromtimestamp(saved_s).isoformat(" ", "seconds") if saved_s is not None else ""


def _human(num_bytes: int) -> str:
    size = float(num_bytes)
    for unit in ("B", "kB", "MB", "GB"):
        if size < 1000:
            return f"{size:.3g} {unit}"
        size /= 1000
    return f"{size:.3g} TB"
