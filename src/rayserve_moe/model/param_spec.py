"""One parameter array: its shape, dtype and logical axes, and where its values lie in the tensors of a checkpoint."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

LARGEST_OF = {"int8": 127, "float8_e4m3fn": 448}
"""Dtypes that parameters are quantised to while they are read, with the largest number that is used of each."""


@dataclass(frozen=True)
class ParamSpec:
    """One parameter array.

    `axes` names one logical axis per dimension (see `parallel.sharding`). `role` is the key of the family's
    CHECKPOINT_RULES under which the tensors are found. `layers` lists the layer ids stacked on dimension 0 (empty:
    not stacked); `num_experts` > 0 stacks expert slots on dimension 1, each with one of that many experts: which one is
    decided when weights are loaded. A file holds each piece with shape `file_shape`, transposed where `transposed`
    (files hold [out, in], we hold [in, out]). `experts_in_file`: one tensor of the file holds all experts, on its first
    dimension. `file_row`: the file holds a vector as [1, size].

    Columns are those of `column_dim` of a piece as we hold it, the last or the first one. Several parameters may be cut
    out of one tensor by columns: held column c is column `c // repeat_width // repeats * period + start + c %
    repeat_width` of the file, where period 0 stands for `repeat_width`. So every `repeat_width` columns of the file are
    held `repeats` times in a row: KV heads, where there are fewer of them than devices. The first `start` columns are
    those of other parameters, and so is what a period has beyond `repeat_width`. `file_columns` is how many columns the
    file has, where whole periods do not say it.

    `padding` names axes whose last entries, so many of each, are zeros that no file holds: so that an axis divides over
    the devices, and into what kernels take at once.
    A parameter of a dtype of 8 bits is quantised while it is read, and `is_scale` marks the float32 scales of
    the columns of one, held as [1, columns] and found with it: they have the same role and no tensor of their own. With
    a `scale_block` each square of so many rows and columns has a scale: [blocks of rows, columns].
    `initial` is `normal` or `ones`, for synthetic checkpoints. `layout` says how a device's share lies in memory
    (`kernels.cpu_native.layout.LAYOUTS`).
    """

    shape: tuple[int, ...]
    dtype: str
    axes: tuple[str | None, ...]
    role: str
    layers: tuple[int, ...] = ()
    num_experts: int = 0
    transposed: bool = False
    initial: str = "normal"
    layout: str = ""
    repeats: int = 1
    repeat_width: int = 1
    padding: tuple[tuple[str, int], ...] = ()
    period: int = 0
    start: int = 0
    file_columns: int = 0
    experts_in_file: bool = False
    file_row: bool = False
    column_dim: int = -1
    is_scale: bool = False
    scale_block: int = 0

    @property
    def is_quantized(self) -> bool:
        return self.dtype in LARGEST_OF

    @property
    def num_stacked_dims(self) -> int:
        return int(bool(self.layers)) + int(bool(self.num_experts))

    @property
    def file_stack(self) -> tuple[int, ...]:
        """How many layers, and then experts, have a tensor of their own in files."""
        return tuple(size for size in (len(self.layers), 0 if self.experts_in_file else self.num_experts) if size)

    @property
    def piece_shape(self) -> tuple[int, ...]:
        """Shape of one layer, and one expert, as we hold it."""
        return self.shape[self.num_stacked_dims :]

    @property
    def file_shape(self) -> tuple[int, ...]:
        """Shape of one tensor of the checkpoint as files hold it."""
        shape = [*self.filled_shape]
        shape[self.column_dim] = self.num_file_columns
        leading = self.num_experts if self.experts_in_file else 1
        return (*[leading] * self.num_leading_dims, *(shape[::-1] if self.transposed else shape))

    @property
    def num_leading_dims(self) -> int:
        """Dimensions of a tensor of the file before those of a piece: that of the experts, or of the row."""
        return int(self.experts_in_file or self.file_row)

    @property
    def num_file_columns(self) -> int:
        """Columns of a tensor of the file, those of other parameters included."""
        num_groups = self.filled_shape[self.column_dim] // (self.repeat_width * self.repeats)
        return self.file_columns or num_groups * (self.period or self.repeat_width)

    @property
    def filled_shape(self) -> tuple[int, ...]:
        """`piece_shape` without padding."""
        axes, padding = self.axes[self.num_stacked_dims :], dict[str | None, int](self.padding)
        return tuple(size - padding.get(axis, 0) for size, axis in zip(self.piece_shape, axes, strict=True))

    def as_in_files(self) -> ParamSpec:
        """The same transposed parameter, held as files hold it: [out, in], its columns on the first of the two."""
        assert self.transposed, f"{self.role} is held as files hold it"
        shape, axes = ((*each[:-2], each[-1], each[-2]) for each in (self.shape, self.axes))
        return replace(self, shape=shape, axes=axes, transposed=False, column_dim=0)

    def columns_in_file(self, first: int, end: int) -> np.ndarray:
        """Which columns of the file fill the held columns `[first, end)`."""
        group, offset = np.divmod(np.arange(first, end), self.repeat_width)
        return group // self.repeats * (self.period or self.repeat_width) + self.start + offset

    def padded(self, axis: str, multiple: int) -> ParamSpec:
        """The same with `axis` made a multiple of `multiple`."""
        if axis not in self.axes:
            return self
        place = self.axes.index(axis)
        more = -self.shape[place] % multiple
        shape = (*self.shape[:place], self.shape[place] + more, *self.shape[place + 1 :])
        padding = dict(self.padding)
        padding[axis] = padding.get(axis, 0) + more
        return replace(self, shape=shape, padding=tuple(padding.items())) if more else self
