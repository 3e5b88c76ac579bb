"""Ways in and out: gradients of gradients, autocast, and blocks that are compiled."""

from __future__ import annotations

import pytest
import torch
from tests.processes import run_ranks
from tests.tensor.gradients import whole_gradients
from tests.tensor.models import Decoder, Shape, plan_of
from torch.distributed.device_mesh import init_device_mesh

from zoo import sim
from zoo.comm import Communicator
from zoo.layout import boxes_of, split_of
from zoo.tensor import gradient_norm, split, sum_gradients


@pytest.mark.parametrize("sequence", [False, True])
def test_gradients_of_gradients_are_those_of_the_whole_model(sequence: bool) -> None:
    """A penalty on gradients of the inputs of a layer: each of the ways has a gradient, which has one."""
    shape = Shape(heads=3, kv=1, layers=2)
    x = torch.randn(2, 5, 6, dtype=torch.float64, generator=torch.Generator().manual_seed(0))

    def run(model: Decoder) -> torch.Tensor:
        given = x.clone().requires_grad_()
        hidden = given
        for block in model.blocks:
            hidden = block(hidden)
        out = model.head(hidden)
        (grad,) = torch.autograd.grad(out.square().sum(), given, create_graph=True)
        grad.square().sum().backward()
        assert given.grad is not None
        return given.grad

    whole = Decoder(shape)
    with torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH):
        expected = run(whole)
        named = {name: p.grad for name, p in whole.named_parameters()}

        def fn(rank: int) -> None:
            model, comm = Decoder(shape), Communicator()
            split(model, plan_of(shape), comm, sequence=sequence)
            torch.testing.assert_close(run(model), expected, rtol=1e-9, atol=1e-11)
            found = whole_gradients(model, comm)
            for name, grad in named.items():
                if grad is not None:
                    torch.testing.assert_close(found[name], grad, rtol=1e-9, atol=1e-10, msg=name)

        sim.run(2, fn, seed=0)


def test_under_autocast_a_row_parallel_layer_has_the_dtype_of_a_linear_one() -> None:
    shape = Shape()

    def dtypes(model: Decoder) -> list[torch.dtype]:
        found: list[torch.dtype] = []
        for name, module in model.named_modules():
            if name.endswith(("out", "down", "up")):
                module.register_forward_hook(lambda m, a, y: found.append(y.dtype))
        with torch.autocast("cpu", torch.bfloat16):
            model.float()(torch.zeros(1, 3, dtype=torch.long))
        return found

    expected = dtypes(Decoder(shape))
    assert set(expected) == {torch.bfloat16}

    def fn(rank: int) -> None:
        model = Decoder(shape)
        split(model, plan_of(shape), Communicator())
        assert dtypes(model) == expected

    sim.run(2, fn, seed=0)


def compiled(rank: int, sequence: bool) -> None:
    shape = Shape(heads=3, kv=1)
    ids = torch.randint(shape.vocab, (2, 5), generator=torch.Generator().manual_seed(0))
    whole = Decoder(shape)
    whole(ids).square().sum().backward()
    model, comm = Decoder(shape), Communicator()
    split(model, plan_of(shape), comm, sequence=sequence)
    for block in model.blocks:
        block.compile(backend="eager")
    for _ in range(2):
        model.zero_grad()
        model(ids).square().sum().backward()
        found = whole_gradients(model, comm)
        for name, parameter in whole.named_parameters():
            torch.testing.assert_close(found[name], parameter.grad, rtol=1e-10, atol=1e-10, msg=name)


@pytest.mark.slow
@pytest.mark.parametrize("sequence", [False, True])
def test_compiled_blocks_compute_the_same(sequence: bool) -> None:
    """A graph breaks where ranks send. Of processes: the compiler's caches are not for ranks that are threads."""
    assert len(run_ranks(2, compiled, sequence)) == 2


@pytest.mark.dear
@pytest.mark.parametrize("sequence", [False, True])
def test_a_plain_torch_optimizer_gets_sums_of_gradients(sequence: bool) -> None:
    """Where heads are uneven, ranks have parts of the gradients of keys and values."""
    shape = Shape(heads=3, kv=1, norm=True)
    batches = torch.randint(shape.vocab, (3, 2, 5), generator=torch.Generator().manual_seed(0))

    def trained(model: Decoder, summed: bool) -> Decoder:
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        for ids in batches:
            optimizer.zero_grad()
            model(ids).square().mean().backward()
            if summed:
                sum_gradients(model)
            optimizer.step()
        return model

    expected = trained(Decoder(shape), False)
    logits = expected(batches[0])
    sum_gradients(expected)  # of a whole model: nothing to do

    def fn(rank: int) -> None:
        model, other = Decoder(shape), Decoder(shape)
        for one in (model, other):
            split(one, plan_of(shape), Communicator(), sequence=sequence)
        trained(model, True)
        trained(other, False)
        torch.testing.assert_close(model(batches[0]), logits, rtol=1e-9, atol=1e-10)
        assert not torch.allclose(other(batches[0]), logits, rtol=1e-9, atol=1e-10)

    sim.run(2, fn, seed=0)


@pytest.mark.matrix
@pytest.mark.parametrize(("degree", "sequence"), [(1, False), (2, False), (3, True)])
def test_the_norm_of_gradients_is_that_of_the_whole_model(degree: int, sequence: bool) -> None:
    """torch's own function sees this rank's parts, and would clip each rank by another number."""
    shape = Shape(heads=6, kv=3, norm=True)
    whole, ids = Decoder(shape), torch.randint(shape.vocab, (2, 5), generator=torch.Generator().manual_seed(0))
    whole(ids).sin().sum().backward()
    norm = torch.nn.utils.clip_grad_norm_(whole.parameters(), 0.5)
    expected = {name: parameter.grad for name, parameter in whole.named_parameters()}

    def fn(rank: int) -> None:
        model, comm = Decoder(shape), Communicator()
        split(model, plan_of(shape), comm, sequence=sequence)
        model(ids).sin().sum().backward()
        sum_gradients(model)
        found = gradient_norm(model)
        torch.testing.assert_close(found, norm, rtol=1e-12, atol=1e-12)
        torch.nn.utils.clip_grads_with_norm_(model.parameters(), 0.5, found)
        for name, parameter in model.named_parameters():
            assert parameter.grad is not None
            said, mine = split_of(parameter), expected[name]
            assert mine is not None
            for laid in boxes_of(said.box) if said.box is not None else ():
                torch.testing.assert_close(
                    parameter.grad[laid.here.ranges], mine[laid.box.ranges], rtol=1e-9, atol=1e-9
                )
            if said.box is None:
                torch.testing.assert_close(parameter.grad, mine, rtol=1e-9, atol=1e-9)

    sim.run(degree, fn, seed=0)


def test_gradients_of_a_model_that_is_split_along_an_axis_of_another_name() -> None:
    shape = Shape(heads=3, kv=1, norm=True)
    whole, ids = Decoder(shape), torch.randint(shape.vocab, (2, 5), generator=torch.Generator().manual_seed(0))
    whole(ids).sin().sum().backward()
    expected = whole.blocks[0].attention.k.weight.grad

    def fn(rank: int) -> None:
        model = Decoder(shape)
        split(model, plan_of(shape), init_device_mesh("cpu", (2,), mesh_dim_names=("tp",)), axis="tp")
        model(ids).sin().sum().backward()
        with pytest.raises(ValueError, match="is split along 'tp', and axis='tensor' is asked for"):
            sum_gradients(model, axis="tensor")
        sum_gradients(model)
        torch.testing.assert_close(model.blocks[0].attention.k.weight.grad, expected, rtol=1e-11, atol=1e-12)
        torch.testing.assert_close(gradient_norm(model), gradient_norm(whole), rtol=1e-11, atol=1e-12)

    sim.run(2, fn, seed=0)
