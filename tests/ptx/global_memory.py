"""Global memory: torch tensors at addresses that lie far apart, so that no access strays from one into another.

A tensor is registered with its exact bytes. What its strides leave out, the bytes behind its end and all other
addresses are outside, and so is every access that touches them. Addresses keep the tensor's own alignment.
A load or store of n bytes needs an address that is a multiple of n (PTX ISA, "Addresses as Operands").
"""

import ctypes
from collections.abc import Mapping

import numpy as np
import torch
from ptx.program import AccessError, HazardError

APART = 40  # bits of an address inside one storage
ALIGN = 256


def spans_of(tensor: torch.Tensor) -> np.ndarray:
    """Byte ranges [n, 2] of a tensor's elements, relative to its first."""
    size = tensor.element_size()
    if tensor.numel() == 0:
        return np.zeros((0, 2), np.int64)
    axes = sorted(
        (stride, count) for stride, count in zip(tensor.stride(), tensor.shape, strict=True) if count > 1
    )
    run, starts = size, np.zeros(1, np.int64)
    for stride, count in axes:
        if len(starts) == 1 and stride * size <= run:
            run = (count - 1) * stride * size + run
        elif stride:
            starts = (np.arange(count)[:, None] * (stride * size) + starts).ravel()
    return np.stack([starts, starts + run], axis=1)


def merged(spans: np.ndarray) -> np.ndarray:
    """The same bytes in sorted ranges that do not touch."""
    kept: list[list[int]] = []
    for start, stop in spans[np.argsort(spans[:, 0])].tolist():
        if kept and start <= kept[-1][1]:
            kept[-1][1] = max(kept[-1][1], stop)
        else:
            kept.append([start, stop])
    return np.array(kept, np.int64).reshape(-1, 2)


class GlobalMemory:
    """The tensors of one launch, in one array of bytes. `write_back` puts what was stored into the tensors."""

    def __init__(self, tensors: Mapping[str, torch.Tensor]) -> None:
        storages: dict[int, list[tuple[str, torch.Tensor]]] = {}
        for name, tensor in tensors.items():
            storages.setdefault(tensor.untyped_storage().data_ptr(), []).append((name, tensor))
        self._bases: dict[int, int] = {}
        self._names: dict[int, str] = {}
        places, ends, offsets, self._origins = [], [], [], []
        used = 0
        for number, (start, held) in enumerate(storages.items(), 1):
            base = (number << APART) + start % ALIGN
            self._bases[start], self._names[number] = base, "/".join(name for name, _ in held)
            spans = np.concatenate([spans_of(tensor) + (tensor.data_ptr() - start) for _, tensor in held])
            for begin, end in merged(spans).tolist():
                used = -(-used // ALIGN) * ALIGN + (base + begin) % ALIGN
                places.append(base + begin)
                ends.append(base + end)
                offsets.append(used - base - begin)
                self._origins.append((start + begin, used, end - begin))
                used += end - begin
        self._starts, self._ends = np.array(places, np.int64), np.array(ends, np.int64)
        self._offsets = np.array(offsets, np.int64)
        self._bytes = np.zeros(-(-(used + 16) // ALIGN) * ALIGN, np.uint8)
        self._writer = np.zeros(
            0, np.int32
        )  # per byte, 1 + the program that stored it; empty: nothing stored
        for origin, place, length in self._origins:
            self._bytes[place : place + length] = _view(origin, length)

    def address(self, tensor: torch.Tensor) -> int:
        """The address of a registered tensor's first element."""
        start = tensor.untyped_storage().data_ptr()
        return self._bases[start] + tensor.data_ptr() - start

    def place(self, address: np.ndarray, width: int, active: np.ndarray | None) -> np.ndarray:
        """Positions in the array of bytes; 0 for lanes that are not active. Raises `AccessError`."""
        where = address.view(np.int64)
        index = np.maximum(np.searchsorted(self._starts, where, side="right") - 1, 0)
        if not len(self._starts):
            raise AccessError("no tensor is registered")
        good = (where >= self._starts[index]) & (where + width <= self._ends[index])
        aligned = where % width == 0 if width else np.ones_like(good)
        if active is not None:
            good, aligned = good | ~active, aligned | ~active
        if not aligned.all():
            raise AccessError(self._text("is no multiple of its width", where, aligned, width))
        if not good.all():
            raise AccessError(self._text("is outside every tensor", where, good, width))
        found = where + self._offsets[index]
        return found if active is None else np.where(active, found, 0)

    def load(
        self,
        address: np.ndarray,
        element: str,
        count: int,
        active: np.ndarray | None,
        program: np.ndarray,
    ) -> list[np.ndarray]:
        """`count` neighbouring elements of each lane, [programs, lanes] each."""
        size = np.dtype(element).itemsize
        place = self.place(address, size * count, active)
        self._check_readers(place, size * count, active, program)
        first, held = place // size, self._bytes.view(element)
        return [held[first + index] for index in range(count)]

    def store(
        self,
        address: np.ndarray,
        values: list[np.ndarray],
        active: np.ndarray | None,
        program: np.ndarray,
    ) -> None:
        """Store neighbouring elements of each lane; `program` [programs, 1] are the numbers of the programs.

        Raises `HazardError` if two lanes store different values, or two programs anything, to one address.
        """
        width = values[0].itemsize * len(values)
        shape = np.broadcast_shapes(address.shape, *(value.shape for value in values), program.shape)
        if active is not None:
            shape = np.broadcast_shapes(shape, active.shape)
            keep = np.broadcast_to(active, shape)
        else:
            keep = np.ones(shape, bool)
        place = np.broadcast_to(self.place(address, width, active), shape)[keep]
        if not len(self._writer):
            self._writer = np.zeros(len(self._bytes), np.int32)
        number = np.broadcast_to(program + 1, shape)[keep]
        touched = place[:, None] + np.arange(width)
        before = self._writer[touched]
        if np.any((before != 0) & (before != number[:, None])):
            raise HazardError("stores to an address to which another program of this launch has stored")
        self._writer[touched] = number[:, None]
        if np.any(self._writer[touched] != number[:, None]):
            raise HazardError("two programs store to one address")
        held = self._bytes.view(values[0].dtype)
        first = place // values[0].itemsize
        for index, value in enumerate(values):
            wanted = np.broadcast_to(value, shape)[keep]
            held[first + index] = wanted
            if np.any(held[first + index] != wanted):
                raise HazardError("two lanes store different values to one address")

    def write_back(self) -> None:
        """Put the bytes into the tensors, if anything was stored."""
        if len(self._writer):
            for origin, place, length in self._origins:
                _view(origin, length)[:] = self._bytes[place : place + length]

    def _check_readers(
        self, place: np.ndarray, width: int, active: np.ndarray | None, program: np.ndarray
    ) -> None:
        if not len(self._writer):
            return
        before = self._writer[place[..., None] + np.arange(width)]
        strange = (before != 0) & (before != program[..., None] + 1)
        if active is not None:
            strange &= active[..., None]
        if strange.any():
            raise HazardError("loads what another program of this launch stores")

    def _text(self, what: str, where: np.ndarray, good: np.ndarray, width: int) -> str:
        bad = np.argwhere(~np.broadcast_to(good, np.broadcast_shapes(good.shape, where.shape)))[0]
        wrong = int(np.broadcast_to(where, good.shape)[tuple(bad)])
        number = (wrong + (1 << APART - 1)) >> APART  # the nearest storage
        base = next((base for base in self._bases.values() if base >> APART == number), 0)
        name = self._names.get(number, "no tensor")
        return (
            f"an address of {width} bytes {what}: {name} + {wrong - base} (program {bad[0]}, lane {bad[-1]})"
        )


def _view(address: int, length: int) -> np.ndarray:
    return np.frombuffer((ctypes.c_uint8 * length).from_address(address), np.uint8)
