"""The patches of a convolution's input: what its weight is multiplied with.

They are a strided view of the padded input, copied some examples at a time into one buffer that is used again and stays
in cache.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from math import prod

import torch
import torch.nn.functional as F
from torch import Tensor

from dphero.numerics.products import product

_CPU_BUFFER = 1 << 18
"""Elements of patches, or of gradients, that each thread of a CPU works on at once: they stay in its cache."""
GPU_BUFFER = 1 << 26
"""On a GPU: enough to fill it, not much beside the activations."""


@dataclass(frozen=True)
class ConvolutionArguments:
    """What a convolution is, besides its input."""

    weight_shape: torch.Size
    stride: tuple[int, ...]
    padding: tuple[int, ...]
    dilation: tuple[int, ...]
    groups: int


def convolution_arguments(
    weight: Tensor,
    stride: int | Sequence[int],
    padding: int | Sequence[int],
    dilation: int | Sequence[int],
    groups: int,
) -> ConvolutionArguments:
    """Spell out integer arguments for every spatial axis."""
    axes = weight.dim() - 2

    def spell(value: int | Sequence[int]) -> tuple[int, ...]:
        return (value,) * axes if isinstance(value, int) else tuple(value) * (axes if len(value) == 1 else 1)

    return ConvolutionArguments(weight.shape, spell(stride), spell(padding), spell(dilation), groups)


def one_above_another(x: Tensor, delta: Tensor, arguments: ConvolutionArguments, fold: int) -> tuple[Tensor, Tensor]:
    """Return input and output gradient in which each run of ``fold`` images is a single, tall one.

    Between two images there are as many empty lines as the padding has, and where a patch would see two images the
    output gradient is zero: so products of patches and output gradients add up to the same.
    """
    (high, *wide), (lines, *across) = x.shape[2:], delta.shape[2:]
    (pad, *_), (stride, *_), (dilation, *_) = arguments.padding, arguments.stride, arguments.dilation
    block = max(lines, -(-(high + pad) // stride))  # lines of the output from one image to the next
    tall = x.new_zeros(len(x) // fold, x.shape[1], fold * block * stride, *wide)
    reach = (arguments.weight_shape[2] - 1) * dilation + 1
    outputs = (tall.shape[2] + 2 * pad - reach) // stride + 1
    spread = delta.new_zeros(len(tall), delta.shape[1], max(outputs, fold * block), *across)
    for place, images, size, step in ((tall, x, high, block * stride), (spread, delta, lines, block)):
        apart = place[:, :, : fold * step].unflatten(2, (fold, step))
        apart[:, :, :, :size].copy_(images.view(len(tall), fold, *images.shape[1:]).movedim(1, 2))
    return tall, spread[:, :, :outputs]


class Patches:
    """The patches of an input, of shape ``(n, channels, …)``.

    Args:
        x: The input.
        arguments: The convolution's.
        out: The sizes of its output.
        offsets: In how many slabs, one for each kernel offset along the first spatial axis; 1 unless with stride 1.
    """

    def __init__(self, x: Tensor, arguments: ConvolutionArguments, out: Sequence[int], offsets: int) -> None:
        self.x, self.arguments, self.out, self.offsets = x, arguments, out, offsets
        self.kernel = arguments.weight_shape[2:]

    def _padded_sizes(self) -> list[int]:
        return [size + 2 * pad for size, pad in zip(self.x.shape[2:], self.arguments.padding, strict=True)]

    def some(self, most: int | None = None) -> Iterator[tuple[int, int, list[Tensor]]]:
        """Yield ``(first, last, patches)``: for some examples (at most so many), the patches of each offset.

        Patches have shape ``(examples * groups, columns, positions)``, contiguous positions, and lie in one buffer
        that is used again.
        """
        arguments, x = self.arguments, self.x
        out, kernel, slabs = self.out, self.kernel, self.offsets > 1
        sizes = self._padded_sizes()
        n, columns = len(x), (x.shape[1], *((*kernel[1:], sizes[0], *out[1:]) if slabs else (*kernel, *out)))
        chunk = max(1, min(n, most or n, _buffer(x) // max(prod(columns), prod(self.arguments.weight_shape), 1)))
        padded, inside = x, x
        if any(arguments.padding):  # some examples at a time too: a padded copy of all would be larger than the input
            padded = inside = x.new_zeros(chunk, x.shape[1], *sizes)
            for axis, pad in enumerate(arguments.padding, start=2):
                inside = inside.narrow(axis, pad, x.shape[axis])
        axes = range(1 if slabs else 0, len(kernel))
        view = padded
        for axis in axes:  # windows go last: (examples, channels, positions …, kernel …)
            reach = (kernel[axis] - 1) * arguments.dilation[axis] + 1
            view = view.unfold(2 + axis, reach, arguments.stride[axis])[..., :: arguments.dilation[axis]]
        view = view.movedim(list(range(-len(axes), 0)), list(range(2, 2 + len(axes)))) if axes else view
        buffer = x.new_empty(chunk, *columns)
        across = prod(out[1:])
        for first in range(0, n, chunk):
            last = min(n, first + chunk)
            source = view[first:last]
            if padded is not x:
                inside[: last - first].copy_(x[first:last])
                source = view[: last - first]
            part = buffer[: last - first].copy_(source)
            examples = (last - first) * arguments.groups
            if not slabs:
                yield first, last, [part.view(examples, -1, prod(out))]
                continue
            flat = part.view(examples, -1, sizes[0] * across)
            starts = [offset * arguments.dilation[0] * across for offset in range(kernel[0])]
            yield first, last, [flat[:, :, start : start + out[0] * across] for start in starts]

    def beside_each_other(self) -> Iterator[tuple[int, int, Tensor]]:
        """Yield ``(first, last, patches)``: for some examples, the patches ``(columns, examples · positions)`` of all.

        Only without groups: in one matrix, one product adds up over examples too.
        """
        x, arguments = self.x, self.arguments
        shape = (x.shape[1], *self.kernel)
        chunk = max(1, _buffer(x) // max(prod(shape) * prod(self.out), 1))
        around = [pad for pad in reversed(arguments.padding) for _ in range(2)]
        for first in range(0, len(x), chunk):
            part = x[first : first + chunk]
            view = F.pad(part, around) if any(around) else part
            for axis, size in enumerate(self.kernel):  # windows go last: (examples, channels, positions …, kernel …)
                dilation = arguments.dilation[axis]
                reach = (size - 1) * dilation + 1
                view = view.unfold(2 + axis, reach, arguments.stride[axis])[..., ::dilation]
            axes = len(self.kernel)
            turned = view.permute(1, *range(2 + axes, 2 + 2 * axes), 0, *range(2, 2 + axes))
            yield first, first + len(part), turned.reshape(prod(shape), -1)

    def grams(self) -> Iterator[tuple[int, int, Tensor]]:
        """Yield ``(first, last, grams)``: for some examples, the products of all patches with each other.

        Patches that start at p and q meet position by position: their product is that of the input's positions p + d
        and q + d, summed over the kernel's offsets d. So the input's own products are enough, in all places that a
        kernel shifts them to, unless the kernel's stride leaves out most of them.
        """
        x, arguments, out = self.x, self.arguments, self.out
        sizes = self._padded_sizes()
        if prod(sizes) ** 2 >= prod(out) ** 2 * prod(self.kernel):
            for first, last, patches in self.some():
                products = [product(columns.transpose(1, 2), columns) for columns in patches]
                yield first, last, products[0] if len(products) == 1 else torch.stack(products).sum(0)
            return
        chunk = max(1, _buffer(x) // prod(sizes) ** 2)
        around = [pad for pad in reversed(arguments.padding) for _ in range(2)]
        for first in range(0, len(x), chunk):
            part = x[first : first + chunk]
            flat = F.pad(part, around).flatten(2) if any(around) else part.flatten(2)
            whole = product(flat.transpose(1, 2), flat).view(len(part), *sizes, *sizes)
            grams = whole.new_zeros(len(part), *out, *out)
            for offset in itertools.product(*(range(size) for size in self.kernel)):
                shifted = whole
                for axis, (start, size) in enumerate(zip(offset, out, strict=True)):
                    stride, begin = arguments.stride[axis], start * arguments.dilation[axis]
                    places = slice(begin, begin + stride * (size - 1) + 1, stride)
                    shifted = shifted[(slice(None),) * (1 + axis) + (places,)]
                    shifted = shifted[(slice(None),) * (1 + len(out) + axis) + (places,)]
                grams += shifted
            yield first, first + len(part), grams.view(len(part), prod(out), prod(out))


def _buffer(x: Tensor) -> int:
    """Return how many elements to work on at once where x is."""
    return _CPU_BUFFER * torch.get_num_threads() if x.device.type == "cpu" else GPU_BUFFER
