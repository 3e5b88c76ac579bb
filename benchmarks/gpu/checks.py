"""Every operation against its reference, bit for bit. A new operation is one more entry of :data:`CHECKS`.

A check makes its tensors on the CPU, runs the reference on them there, and the operation on copies on the device, also
at odd addresses. Both are functions of the same tensors and return what is to be equal, changed arguments included.
The references run on the CPU because torch's own operations on a GPU need not round as on the CPU.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from benchmarks.gpu import decoding, layers, packed
from benchmarks.gpu.cases import DTYPES, Case, differing, flat, moved, ordered_sum_squares, values

from zoo.kernels import loading, norm, onebit, quantise, update
from zoo.kernels.onebit import reference as onebit_reference
from zoo.kernels.quantise import reference as quantise_reference
from zoo.kernels.update import reference as update_reference

Tensor = torch.Tensor
FP32, BF16, FP16 = DTYPES


class Mismatch(AssertionError):
    """The operation and its reference differ, or the operation did not run natively."""


@dataclass(frozen=True, kw_only=True)
class Check:
    """An operation: the names of its operators, and its cases; ``large`` adds tensors of more than 2^20 elements."""

    name: str
    operators: tuple[str, ...]
    cases: Callable[[bool], Iterator[Case]]


def run(check: Check, device: str, *, large: bool = True) -> int:
    """Run all cases on the device at offsets 0 and 1; returns how many comparisons there were.

    Raises:
        Mismatch: with the case and how many elements differ.
    """
    probe = torch.empty(1, device=device)
    for name in check.operators:
        if not loading.runs(name, probe):
            why = loading.why_not_cuda() or loading.why_not() or "it has no kernel for this device"
            raise Mismatch(f"zoo::{name} does not run natively on {device}: {why}")
    count = 0
    for case in check.cases(large):
        expected = flat(case.reference(*moved(case.args, "cpu")))
        for offset in (0, 1):
            found = flat(case.operation(*moved(case.args, device, offset)))
            if len(found) != len(expected):
                raise Mismatch(f"{check.name}, {case.what}: {len(found)} results for {len(expected)}")
            for i, (a, b) in enumerate(zip(found, expected, strict=True)):
                wrong = differing(a.cpu(), b)
                if wrong:
                    raise Mismatch(
                        f"{check.name}, {case.what}, offset {offset}: {wrong} of {b.numel()} elements of "
                        f"result {i} differ"
                    )
            count += 1
    return count


def sizes(large: bool) -> list[int]:
    """Empty, one, odd, around the limits of parts and blocks; then more than 2^20."""
    return [0, 1, 3, 7, 4097, 16385, *([65536, 65541, 2**20 + 3] if large else [])]


def many(large: bool) -> list[int]:
    """More tensors than one launch takes."""
    return [3] * (2000 if large else 70)


def lists(numels: Sequence[int], seed: int, dtype: torch.dtype, **more: bool) -> list[Tensor]:
    return [values(n, seed + 10 * i, **more).to(dtype) for i, n in enumerate(numels)]


# The update --------------------------------------------------------------------------------------------------------

SCALARS = update.Scalars(
    grad_scale=0.3, coupled=0.02, decay=0.997, rate=0.05, beta1=0.9, beta1_rest=0.1, beta2=0.99, beta2_rest=0.01,
    correction2=1.3, eps=1e-8, gain=1.7,
)  # fmt: skip
# Parameter, gradient, state, with masters.
FORMATS = ((FP32, FP32, FP32, False), (BF16, BF16, FP32, True), (FP16, FP32, BF16, False))


def update_args(numels: Sequence[int], states: int, formats: Any, *, special: bool) -> tuple[Any, ...]:
    dtype, grad, state, with_master = formats
    masters = lists(numels, 0, FP32, special=special)
    return (
        [m.to(dtype) for m in masters], lists(numels, 1, grad, special=special),
        [lists(numels, 2 + k, state, positive=k > 0) for k in range(states)], masters if with_master else [],
    )  # fmt: skip


def update_cases(large: bool) -> Iterator[Case]:
    for rule, all_flags in update.ALLOWED.items():
        for flags in all_flags if rule is not update.Rule.LAMB else ():

            def operation(
                params: Any, grads: Any, states: Any, masters: Any, rule: Any = rule, flags: Any = flags
            ) -> Any:
                update.update_(rule, flags, params, grads, states, masters, scalars=SCALARS)
                return params, states, masters

            def reference(
                params: Any, grads: Any, states: Any, masters: Any, rule: Any = rule, flags: Any = flags
            ) -> Any:
                for i, (p, g) in enumerate(zip(params, grads, strict=True)):
                    master = masters[i] if masters else None
                    update_reference.update_row(rule, flags, p, g, [s[i] for s in states], master, SCALARS)
                return params, states, masters

            for formats in FORMATS:
                adam = rule is update.Rule.ADAM and not flags
                for special, numels in (
                    (False, sizes(large and adam)),
                    (True, [4097]),
                    (False, many(large)[: 9999 * adam]),
                ):
                    args = update_args(numels, update.num_states(rule, flags), formats, special=special)
                    what = f"{rule.name} {int(flags)}, {formats}, {len(numels)} tensors, special={special}"
                    yield Case(what=what, args=args, operation=operation, reference=reference)


def lamb_cases(large: bool) -> Iterator[Case]:
    for flags in update.ALLOWED[update.Rule.LAMB]:

        def operation(params: Any, grads: Any, states: Any, masters: Any, ratios: Any, flags: Any = flags) -> Any:
            norms = update.lamb_direction_(flags, params, grads, *states, masters, scalars=SCALARS)
            update.lamb_apply_(flags, params, *states, masters, ratios=ratios, scalars=SCALARS)
            return norms, params, states, masters

        def reference(params: Any, grads: Any, states: Any, masters: Any, ratios: Any, flags: Any = flags) -> Any:
            norms = []
            for i, (p, g, m, v) in enumerate(zip(params, grads, *states, strict=True)):
                master = masters[i] if masters else None
                update_reference.lamb_direction_row(flags, p, g, m, v, master, SCALARS)
                wide = (p if master is None else master).float()
                d = update_reference.moment_direction(update.Rule.LAMB, flags, wide, m, v, SCALARS)
                norms.append(torch.stack([ordered_sum_squares(wide), ordered_sum_squares(d)]))
                update_reference.lamb_apply_row(flags, p, m, v, master, ratios[i], SCALARS)
            return torch.stack(norms), params, states, masters

        for formats in FORMATS[:2]:
            for special, numels in ((False, sizes(large and not flags)), (True, [4097]), (False, many(False))):
                args = (*update_args(numels, 2, formats, special=special), torch.linspace(0.5, 2, len(numels)))
                what = f"flags {int(flags)}, {formats}, {len(numels)} tensors, special={special}"
                yield Case(what=what, args=args, operation=operation, reference=reference)


def scalars_cases(large: bool) -> Iterator[Case]:
    """The scalars of a step, made on the device, and updates with them: one that counts and one that is skipped."""
    rules = (
        update.adam(lr=0.05, beta1=0.9, beta2=0.999, eps=1e-8, weight_decay=0.1), update.sgd(lr=0.05, momentum=0.9),
        update.lion(lr=0.05, beta1=0.9, beta2=0.99), update.adagrad(lr=0.05, lr_decay=0.1, eps=1e-8),
        update.lamb(lr=0.05, beta1=0.9, beta2=0.999, eps=1e-8, weight_decay=0.1, eps_inside_sqrt=True),
    )  # fmt: skip
    for settings in rules:

        def operation(params: Any, grads: Any, states: Any, steps: Any, numbers: Any, s: Any = settings) -> Any:
            lr, grad_scale, loss_scale, found_inf = numbers
            made = update.update_scalars_(
                s, steps, lr=lr, device_grad_scale=grad_scale, loss_scale=loss_scale, found_inf=found_inf
            )
            if s.rule is not update.Rule.LAMB:
                update.update_(s.rule, s.flags, params, grads, states, scalars=made)
                return made, steps, params, states
            norms = update.lamb_direction_(s.flags, params, grads, *states, scalars=made)
            update.lamb_apply_(
                s.flags, params, *states, ratios=torch.ones(len(params), device=steps.device), scalars=made
            )
            return made, steps, params, states, (norms == 0).double()

        def reference(params: Any, grads: Any, states: Any, steps: Any, numbers: Any, s: Any = settings) -> Any:
            with loading.use_mode("reference"):
                return operation(params, grads, states, steps, numbers, s)

        for taken in (0, 1, 999, 2**20):
            for skips in (0.0, 1.0):
                params, grads, states, _ = update_args(
                    [5, 4097], update.num_states(settings.rule, settings.flags), FORMATS[0], special=False
                )
                numbers = [torch.tensor([x]) for x in (0.01, 0.3, 1024.0, skips)]
                numbers[0] = numbers[0].double()
                steps = torch.full((300,), float(taken))
                what = f"{settings.rule.name}, step {taken}, skips={skips}"
                args = (params, grads, states, steps, numbers)
                yield Case(what=what, args=args, operation=operation, reference=reference)


def norm_cases(large: bool) -> Iterator[Case]:
    for dtype in DTYPES:
        for factor in (1.0, 0.3, 2.0**-16, 1e30):

            def operation(tensors: Any, factor: float) -> Any:
                first = norm.scale_sum_squares_(tensors, factor)
                return first, norm.sum_squares(tensors), tensors

            def reference(tensors: Any, factor: float) -> Any:
                for t in tensors:
                    t.copy_(t.float() * factor if factor != 1.0 else t)
                sums = torch.stack([ordered_sum_squares(t) for t in tensors])
                return sums, sums, tensors

            for special, numels in ((False, sizes(large and factor == 0.3)), (True, [4097]), (False, many(False))):
                args = (lists(numels, 5, dtype, special=special), factor)
                what = f"{dtype}, {len(numels)} tensors, factor {factor}, special={special}"
                yield Case(what=what, args=args, operation=operation, reference=reference)


# Compression -------------------------------------------------------------------------------------------------------


def quantise_cases(large: bool, *, name: str = "quantise") -> Iterator[Case]:
    run_, of = getattr(quantise, name), getattr(quantise_reference, name)
    for dtype in DTYPES:
        for bits in (8, 4):
            for group in (16, 48, 256, 2048, 8192, 2**20):
                for n in (*sizes(large and group in (256, 2**20)), -4097):

                    def operation(x: Any, bits: int, group: int) -> Any:
                        return run_(x, bits=bits, group_size=group)

                    def reference(x: Any, bits: int, group: int) -> Any:
                        return of(x, bits, group, 1, 1)

                    args = (values(abs(n), n + 9999, special=n < 0).to(dtype), bits, group)
                    what = f"{dtype}, {bits} bits, groups of {group}, {abs(n)} elements, special={n < 0}"
                    yield Case(what=what, args=args, operation=operation, reference=reference)
    for nodes, local in ((2, 3), (4, 1), (1, 4)):
        x = values(nodes * local * 5 * 48, 3)
        yield Case(
            what=f"swizzle ({nodes}, {local})", args=(x, nodes, local),
            operation=lambda x, n, m: run_(x, bits=4, group_size=48, swizzle=(n, m)),
            reference=lambda x, n, m: of(x, 4, 48, n, m),
        )  # fmt: skip


def dequantise_cases(large: bool, *, name: str = "quantise") -> Iterator[Case]:
    of, back = getattr(quantise_reference, name), f"de{name}_"
    run_back, back_of = getattr(quantise, back), getattr(quantise_reference, back)
    for dtype in DTYPES:
        for bits, group, ranks, factor in ((8, 256, 1, 1.0), (8, 48, 3, 0.3), (4, 256, 1, 1.0), (4, 16, 4, 0.25)):
            for n in (*sizes(large), -4097):
                made = [of(values(abs(n), r, special=n < 0), bits, group, 1, 1) for r in range(ranks)]
                how = {"bits": bits, "group_size": group, "ranks": ranks, "factor": factor}

                def operation(out: Any, *parts: Any, how: Any = how) -> Any:
                    run_back(out, *parts, **how)
                    return out

                def reference(out: Any, *parts: Any, how: Any = how) -> Any:
                    back_of(out, *parts, **how)
                    return out

                what = f"{dtype}, {bits} bits, groups of {group}, {ranks} ranks, {abs(n)} elements, special={n < 0}"
                args = (torch.zeros(abs(n), dtype=dtype), *(torch.cat(parts) for parts in zip(*made, strict=True)))
                yield Case(what=what, args=args, operation=operation, reference=reference)


def onebit_cases(large: bool) -> Iterator[Case]:
    """Two steps, of which the second takes what is owed in one pass, and a server's mean; both ways back."""
    for dtype in DTYPES:
        for group in (64, 2048, 8192):
            for n in (*sizes(large), -4097):
                for add in (False, True):

                    def operation(x: Any, error: Any, out: Any, group: int = group, add: bool = add) -> Any:
                        fed_back = x.dtype is FP32
                        sent = onebit.compress_(x, error if fed_back else None, group)
                        c, mean = torch.empty_like(error), torch.empty_like(error)
                        again = onebit.compress_(x, error, group, out=c, sent=sent)
                        wires = onebit_wires(sent, again)
                        served = onebit.compress_mean_(mean, wires, error, group, sent=again)
                        onebit.owed_(error, x.float(), *sent, group)
                        onebit.decompress_(out, *sent, group, add=add)
                        return sent, again, served, c, mean, x, error, out

                    def reference(x: Any, error: Any, out: Any, group: int = group, add: bool = add) -> Any:
                        fed_back = x.dtype is FP32
                        sent = onebit_reference.compress_(x, None, error if fed_back else None, None, None, group)
                        c, mean = torch.empty_like(error), torch.empty_like(error)
                        again = onebit_reference.compress_(c, x, error, *sent, group)
                        wires = onebit_wires(sent, again)
                        served = onebit_reference.compress_mean_(mean, wires, error, *again, group)
                        onebit_reference.owed_(error, x.float(), *sent, group)
                        onebit_reference.decompress_(out, *sent, group, add)
                        return sent, again, served, c, mean, x, error, out

                    x = values(abs(n), 1, special=n < 0).to(dtype)
                    args = (x, values(abs(n), 2), values(abs(n), 3).to(dtype))
                    what = f"{dtype}, groups of {group}, {abs(n)} elements, add={add}, special={n < 0}"
                    yield Case(what=what, args=args, operation=operation, reference=reference)


def onebit_wires(*sent: tuple[Any, Any]) -> Any:
    """A row for each rank: scales, bits, and zeros up to whole words."""
    rows = [torch.cat([scales.view(torch.uint8), bits]) for bits, scales in sent]
    return torch.stack([torch.nn.functional.pad(row, (0, -len(row) % 4)) for row in rows])


CHECKS = (
    Check(name="update", operators=("update_",), cases=update_cases),
    Check(name="LAMB", operators=("lamb_direction_", "lamb_apply_"), cases=lamb_cases),
    Check(name="scalars of a step", operators=("update_scalars_",), cases=scalars_cases),
    Check(name="norm", operators=("sum_squares", "scale_sum_squares_"), cases=norm_cases),
    Check(name="quantise", operators=("quantise",), cases=quantise_cases),
    Check(name="dequantise", operators=("dequantise_",), cases=dequantise_cases),
    Check(
        name="quantise, asymmetric", operators=("quantise_asymmetric",),
        cases=partial(quantise_cases, name="quantise_asymmetric"),
    ),
    Check(
        name="dequantise, asymmetric", operators=("dequantise_asymmetric_",),
        cases=partial(dequantise_cases, name="quantise_asymmetric"),
    ),
    Check(
        name="1-bit",
        operators=("onebit_compress_", "onebit_compress_mean_", "onebit_owed_", "onebit_decompress_"),
        cases=onebit_cases,
    ),
    Check(
        name="layer norm", operators=("layer_norm", "add_layer_norm", "layer_norm_backward"),
        cases=layers.layer_norm_cases,
    ),
    Check(name="bias and GELU", operators=("bias_gelu", "bias_gelu_backward"), cases=layers.bias_gelu_cases),
    Check(name="activation", operators=("activate_", "activate_backward_"), cases=layers.activation_cases),
    Check(name="softmax", operators=("softmax", "softmax_backward"), cases=layers.softmax_cases),
    Check(
        name="bias, dropout and residual",
        operators=("bias_dropout_residual", "bias_dropout_residual_backward", "dropout"), cases=layers.dropout_cases,
    ),
    Check(name="choice of experts", operators=("top_k_gate", "top_k_gate_backward"), cases=layers.gate_cases),
    Check(name="places within experts", operators=("positions_in_expert",), cases=layers.places_cases),
    Check(
        name="permute and unpermute", operators=("permute", "unpermute", "unpermute_backward"),
        cases=layers.permute_cases,
    ),
    Check(
        name="packed linear", operators=("packed_linear", "packed_linear_backward"), cases=packed.linear_cases,
    ),
    Check(name="packed linear, x in 8 bits", operators=("packed_linear",), cases=packed.int8_cases),
    Check(name="thin linear", operators=("thin_linear",), cases=decoding.thin_cases),
    Check(name="attention over a cache", operators=("cached_attention",), cases=decoding.attention_cases),
    Check(name="uniform numbers", operators=("uniform",), cases=decoding.uniform_cases),
    Check(name="RMS norm", operators=("rms_norm", "add_rms_norm"), cases=decoding.rms_norm_cases),
    Check(name="rotary positions and the cache", operators=("rotary_cache_",), cases=decoding.rotary_cases),
    Check(
        name="decoder layer", operators=(
            "decoder_before_cache", "decoder_after_cache", "decoder_attention", "decoder_feed_forward"
        ), cases=decoding.layer_cases,
    ),
)  # fmt: skip
