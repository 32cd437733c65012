"""Specification of a parameter array: shape, dtype, logical axes, and location in the tensors of a checkpoint."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np

LARGEST_OF = {"int8": 127, "float8_e4m3fn": 448}
"""Quantised dtypes of parameters, with the largest magnitude used of each."""


@dataclass(frozen=True)
class FileForm:
    """Form of a parameter in the tensors of a checkpoint.

    Several parameters may be column ranges of a tensor: held column c is column `c // repeat_width // repeats * period
    + start + c % repeat_width` of the file. Columns of a period beyond `repeat_width` belong to other parameters.
    """

    transposed: bool = False
    """True if files hold [out, in] and we hold [in, out]."""
    has_all_experts: bool = False
    """True if a single tensor holds all experts, on its first dimension."""
    is_row: bool = False
    """True if files hold a vector as [1, size]."""
    repeats: int = 1
    """Copies of every `repeat_width` columns per row: KV heads, if devices outnumber them."""
    repeat_width: int = 1
    """Number of adjacent columns in the file that stay together."""
    period: int = 0
    """Distance in the file between such groups of columns; 0 stands for `repeat_width`."""
    start: int = 0
    """Number of columns of other parameters before the first group."""
    num_columns: int = 0
    """Number of columns in the file; 0 derives it from whole periods."""
    offset: float = 0.0
    """Added to the values of the file: 1 for norms stored as scales minus one."""
    factor: float = 1.0
    """Multiplies the values of the file."""


TRANSPOSED = FileForm(transposed=True)


@dataclass(frozen=True)
class ParamSpec:
    """Specification of a parameter array. A file holds each piece with shape `file_shape`."""

    shape: tuple[int, ...]
    """[layers, expert slots, *piece] as we hold it, padding included."""
    dtype: str
    """Stored dtype; a parameter with an 8-bit dtype is quantised while it is read."""
    axes: tuple[str | None, ...]
    """Logical axis of each dimension (see `parallel.sharding`)."""
    role: str
    """Key of the family's CHECKPOINT_RULES for the tensor names."""
    layers: tuple[int, ...] = ()
    """Layer ids stacked on dimension 0; empty: not stacked."""
    num_experts: int = 0
    """If positive, dimension 1 stacks expert slots, and loading assigns an expert to each."""
    file: FileForm = FileForm()
    initial: str = "normal"
    """`normal`, `ones`, `zeros` or `log_decay`, for synthetic checkpoints."""
    layout: str = ""
    """Memory layout of a device's share (`kernels.cpu_native.layout.LAYOUTS`)."""
    padding: tuple[tuple[str, int], ...] = ()
    """Axes with the number of their last entries that are zero and absent from files. Padding makes an axis divisible
    over devices and into kernel blocks."""
    column_dim: int = -1
    """Dimension of a piece's columns as we hold it, the last or the first."""
    is_scale: bool = False
    """True for float32 scales of a quantised parameter, held as [1, columns]. They have the parameter's role, no tensor
    of their own, and are computed with it."""
    scale_block: int = 0
    """If positive, a scale per square block of this many rows and columns: [blocks of rows, columns]."""

    @property
    def is_quantized(self) -> bool:
        return self.dtype in LARGEST_OF

    @property
    def num_stacked_dims(self) -> int:
        return int(bool(self.layers)) + int(bool(self.num_experts))

    @property
    def file_stack(self) -> tuple[int, ...]:
        """Return the numbers of layers and experts with separate tensors in files."""
        return tuple(size for size in (len(self.layers), 0 if self.file.has_all_experts else self.num_experts) if size)

    @cached_property
    def piece_shape(self) -> tuple[int, ...]:
        """Return the held shape per layer and expert."""
        return self.shape[self.num_stacked_dims :]

    @cached_property
    def file_shape(self) -> tuple[int, ...]:
        """Return the shape of a tensor in the checkpoint."""
        shape = [*self.filled_shape]
        shape[self.column_dim] = self.num_file_columns
        leading = self.num_experts if self.file.has_all_experts else 1
        return (*[leading] * self.num_leading_dims, *(shape[::-1] if self.file.transposed else shape))

    @property
    def num_leading_dims(self) -> int:
        """Return the number of file dimensions before the dimensions of a piece, for experts or the row."""
        return int(self.file.has_all_experts or self.file.is_row)

    @property
    def num_file_columns(self) -> int:
        """Return the number of columns of a tensor in the file, columns of other parameters included."""
        num_groups = self.filled_shape[self.column_dim] // (self.file.repeat_width * self.file.repeats)
        return self.file.num_columns or num_groups * (self.file.period or self.file.repeat_width)

    @cached_property
    def filled_shape(self) -> tuple[int, ...]:
        """Return `piece_shape` without padding."""
        axes, padding = self.axes[self.num_stacked_dims :], dict[str | None, int](self.padding)
        return tuple(size - padding.get(axis, 0) for size, axis in zip(self.piece_shape, axes, strict=True))

    def as_in_files(self) -> ParamSpec:
        """Return the parameter in the orientation of files: [out, in], with columns on the first dimension."""
        assert self.file.transposed, f"{self.role} already has the orientation of files"
        shape, axes = ((*each[:-2], each[-1], each[-2]) for each in (self.shape, self.axes))
        return replace(self, shape=shape, axes=axes, file=replace(self.file, transposed=False), column_dim=0)

    def columns_in_file(self, first: int, end: int) -> np.ndarray:
        """Return the file columns of the held columns `[first, end)`."""
        group, offset = np.divmod(np.arange(first, end), self.file.repeat_width)
        return group // self.file.repeats * (self.file.period or self.file.repeat_width) + self.file.start + offset

    def padded(self, axis: str, multiple: int) -> ParamSpec:
        """Return the parameter with `axis` padded to a multiple of `multiple`."""
        if axis not in self.axes:
            return self
        place = self.axes.index(axis)
        more = -self.shape[place] % multiple
        shape = (*self.shape[:place], self.shape[place] + more, *self.shape[place + 1 :])
        padding = dict(self.padding)
        padding[axis] = padding.get(axis, 0) + more
        return replace(self, shape=shape, padding=tuple(padding.items())) if more else self


def norm_spec(
    offset: float,
    shape: tuple[int, ...],
    axes: tuple[str | None, ...],
    role: str,
    *,
    dtype: str,
    layers: tuple[int, ...] = (),
) -> ParamSpec:
    """Return the scales of a norm; with an `offset` they are float32, because files hold numbers near zero."""
    if not offset:
        return ParamSpec(shape, dtype, axes, role, layers, initial="ones")
    return ParamSpec(shape, "float32", axes, role, layers, file=FileForm(offset=offset), initial="zeros")
