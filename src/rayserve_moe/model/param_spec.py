"""One parameter array: its shape, dtype and logical axes, and where its values lie in the tensors of a checkpoint."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

LARGEST_OF = {"int8": 127, "float8_e4m3fn": 448}
"""Dtypes that parameters are quantised to while they are read, with the largest number that is used of each."""


@dataclass(frozen=True)
class FileForm:
    """How the tensors of a checkpoint hold a parameter.

    Several parameters may be cut out of one tensor by columns: held column c is column `c // repeat_width // repeats *
    period + start + c % repeat_width` of the file. The columns that a period has beyond `repeat_width` are those of
    other parameters.
    """

    transposed: bool = False
    """Files hold [out, in], and we hold [in, out]."""
    has_all_experts: bool = False
    """One tensor holds all experts, on its first dimension."""
    is_row: bool = False
    """A vector is held as [1, size]."""
    repeats: int = 1
    """Number of times that every `repeat_width` columns are held in a row: KV heads, if devices outnumber them."""
    repeat_width: int = 1
    """Number of columns of the file that are held together."""
    period: int = 0
    """Distance in the file between columns that are held together; 0 stands for `repeat_width`."""
    start: int = 0
    """Number of columns of other parameters ahead of the first one."""
    num_columns: int = 0
    """Number of columns that the file has; 0: whole periods."""
    offset: float = 0.0
    """Added to the values of the file: 1 for norms whose files hold scales minus one."""


TRANSPOSED = FileForm(transposed=True)


@dataclass(frozen=True)
class ParamSpec:
    """One parameter array. A file holds each piece with shape `file_shape`."""

    shape: tuple[int, ...]
    """[layers, expert slots, *piece] as we hold it, padding included."""
    dtype: str
    """A parameter of a dtype of 8 bits is quantised while it is read."""
    axes: tuple[str | None, ...]
    """One logical axis per dimension (see `parallel.sharding`)."""
    role: str
    """Key of the family's CHECKPOINT_RULES under which the tensors are found."""
    layers: tuple[int, ...] = ()
    """Layer ids stacked on dimension 0; empty: not stacked."""
    num_experts: int = 0
    """If positive, dimension 1 stacks expert slots, each with one of that many experts; loading decides which one."""
    file: FileForm = FileForm()
    initial: str = "normal"
    """`normal`, `ones`, `zeros` or `log_decay`, for synthetic checkpoints."""
    layout: str = ""
    """How a device's share lies in memory (`kernels.cpu_native.layout.LAYOUTS`)."""
    padding: tuple[tuple[str, int], ...] = ()
    """Axes, and the number of their last entries that are zeros and in no file: an axis then divides over the devices,
    and into what kernels take at once."""
    column_dim: int = -1
    """Dimension of a piece's columns as we hold it, the last or the first one."""
    is_scale: bool = False
    """Marks the float32 scales of the columns of a quantised parameter, held as [1, columns] and found with it: they
    have the same role and no tensor of their own."""
    scale_block: int = 0
    """If positive, each square of so many rows and columns has a scale: [blocks of rows, columns]."""

    @property
    def is_quantized(self) -> bool:
        return self.dtype in LARGEST_OF

    @property
    def num_stacked_dims(self) -> int:
        return int(bool(self.layers)) + int(bool(self.num_experts))

    @property
    def file_stack(self) -> tuple[int, ...]:
        """Return the numbers of layers, then of experts, with a tensor of their own in files."""
        return tuple(size for size in (len(self.layers), 0 if self.file.has_all_experts else self.num_experts) if size)

    @property
    def piece_shape(self) -> tuple[int, ...]:
        """Shape of one layer, and one expert, as we hold it."""
        return self.shape[self.num_stacked_dims :]

    @property
    def file_shape(self) -> tuple[int, ...]:
        """Shape of one tensor of the checkpoint as files hold it."""
        shape = [*self.filled_shape]
        shape[self.column_dim] = self.num_file_columns
        leading = self.num_experts if self.file.has_all_experts else 1
        return (*[leading] * self.num_leading_dims, *(shape[::-1] if self.file.transposed else shape))

    @property
    def num_leading_dims(self) -> int:
        """Dimensions of a tensor of the file before those of a piece: that of the experts, or of the row."""
        return int(self.file.has_all_experts or self.file.is_row)

    @property
    def num_file_columns(self) -> int:
        """Columns of a tensor of the file, those of other parameters included."""
        num_groups = self.filled_shape[self.column_dim] // (self.file.repeat_width * self.file.repeats)
        return self.file.num_columns or num_groups * (self.file.period or self.file.repeat_width)

    @property
    def filled_shape(self) -> tuple[int, ...]:
        """Return `piece_shape` without padding."""
        axes, padding = self.axes[self.num_stacked_dims :], dict[str | None, int](self.padding)
        return tuple(size - padding.get(axis, 0) for size, axis in zip(self.piece_shape, axes, strict=True))

    def as_in_files(self) -> ParamSpec:
        """Return the same transposed parameter, as files hold it: [out, in], its columns on the first."""
        assert self.file.transposed, f"{self.role} is held as files hold it"
        shape, axes = ((*each[:-2], each[-1], each[-2]) for each in (self.shape, self.axes))
        return replace(self, shape=shape, axes=axes, file=replace(self.file, transposed=False), column_dim=0)

    def columns_in_file(self, first: int, end: int) -> np.ndarray:
        """Return the columns of the file that fill the held columns `[first, end)`."""
        group, offset = np.divmod(np.arange(first, end), self.file.repeat_width)
        return group // self.file.repeats * (self.file.period or self.file.repeat_width) + self.file.start + offset

    def padded(self, axis: str, multiple: int) -> ParamSpec:
        """Return the same with `axis` padded to a multiple of `multiple`."""
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
    """Return the scales of a norm; with an `offset` they are float32, since files hold numbers near zero."""
    if not offset:
        return ParamSpec(shape, dtype, axes, role, layers, initial="ones")
    return ParamSpec(shape, "float32", axes, role, layers, file=FileForm(offset=offset), initial="zeros")
