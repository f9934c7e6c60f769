"""Run the source of a Gluon kernel for Hopper on the CPU: torch for its language, barriers and copies as on sm_90.

The kernel's file is loaded again with this module in place of `triton.experimental.gluon`. Layouts are ignored: a
tensor is a torch tensor. What is kept is the protocol between warp groups. Each partition is a thread, one runs at a
time, and at every barrier a seeded choice says who goes on. A copy arrives as late as a reader waits for it, and its
buffer holds NaN until then. A product reads its operands when it is issued and again when it is waited for. Errors are:
a difference between the two, a product on a buffer that was not waited for and fenced, a wait that nothing can end, an
access outside a tensor. This executes the source and not the compiled code: nothing here speaks of layouts,
descriptors, registers or speed.
"""

import inspect
import itertools
import math
import random
import threading
import types
from collections.abc import Callable
from pathlib import Path
from unittest.mock import patch

import torch
import triton.experimental.gluon.language.nvidia.hopper  # noqa: F401 - before its modules are replaced

import paged_kernels.triton.decode  # noqa: F401 - the same


class ReplayError(Exception):
    """The kernel broke the protocol: a race, a missing fence, a deadlock, or an access outside a tensor."""


class Pointer:
    """A place, or places, in a tensor's storage."""

    def __init__(self, memory, place):
        self.memory, self.place = memory, place
        self.dtype = types.SimpleNamespace(element_ty=memory.dtype)

    def __add__(self, offset):
        return Pointer(self.memory, self.place + offset)

    def read(self, mask=None, other=0):
        """The numbers at the places; `other` where the mask is False."""
        places = torch.as_tensor(self.place, dtype=torch.int64)
        inside = torch.ones_like(places, dtype=torch.bool) if mask is None else mask.expand(places.shape)
        self.check(places[inside])
        return torch.where(
            inside, self.memory[torch.where(inside, places, 0)], torch.tensor(other, dtype=self.memory.dtype)
        )

    def check(self, places):
        """Refuse places outside the storage."""
        if len(places) and not 0 <= int(places.min()) <= int(places.max()) < len(self.memory):
            raise ReplayError(
                f"access to {int(places.min())} to {int(places.max())} of {len(self.memory)} numbers"
            )


class Shared:
    """A buffer in shared memory. `landed` is when its last copy arrived, by the clock of the replay."""

    def __init__(self, data, landed=None):
        self.data, self.landed = data, [0] * len(data) if landed is None else landed
        self.dtype = data.dtype

    def index(self, stage):
        return _View(self, int(stage), self.data[int(stage)])


class _View:
    def __init__(self, whole, stage, data):
        self.whole, self.stage, self.data, self.dtype = whole, stage, data, data.dtype

    def permute(self, order):
        return _View(self.whole, self.stage, self.data.permute(order))

    def store(self, value):
        self.data.copy_(value)
        self.whole.landed[self.stage] = next(_replay().clock)


class _Barriers:
    def __init__(self, number):
        self.each = [types.SimpleNamespace(count=0, pending=0, phase=0, copies=[]) for _ in range(number)]

    def index(self, number):
        return self.each[int(number)]


class _Replay:
    """The partitions of one program, of which one runs at a time."""

    def __init__(self, seed, turns):
        self.turns = turns  # the partition of each product of weights, as they are issued
        self.choose, self.clock = random.Random(seed), itertools.count(1)
        self.lock, self.waiting, self.running = threading.Condition(), {}, None
        self.copies, self.fenced, self.error = {}, {}, None

    def run(self, partitions):
        names = range(len(partitions))
        self.waiting = dict.fromkeys(names, lambda: True)
        threads = [threading.Thread(target=self._run, args=(name, *partitions[name])) for name in names]
        for thread in threads:
            thread.start()
        with self.lock:
            self._next()
        for thread in threads:
            thread.join()
        if self.error:
            raise self.error

    def _run(self, name, function, arguments):
        _local.replay, _local.name = self, name
        try:
            self._until_chosen(name)
            function(*arguments)
        except BaseException as error:
            self.error = self.error or error
        with self.lock:
            self._next()

    def wait(self, ready):
        """Go on when `ready` holds and this partition is chosen."""
        name = _local.name
        with self.lock:
            self.waiting[name] = ready
            self._next()
        self._until_chosen(name)

    def _until_chosen(self, name):
        with self.lock:
            self.lock.wait_for(lambda: self.running == name or self.error)
            self.waiting.pop(name, None)
            if self.error:
                raise self.error

    def _next(self):
        able = [name for name, ready in sorted(self.waiting.items()) if ready()]
        if self.waiting and not able and not self.error:
            self.error = ReplayError(f"partitions {sorted(self.waiting)} wait for ever")
        self.running = self.choose.choice(able) if able else None
        self.lock.notify_all()


_local = threading.local()


def _replay():
    return _local.replay


class _MBarrier:
    MBarrierLayout = staticmethod(lambda: None)

    @staticmethod
    def init(barrier, count):
        barrier.count = barrier.pending = count

    @staticmethod
    def arrive(barrier, *, count=1):
        barrier.pending -= int(count)
        if barrier.pending < 0:
            raise ReplayError("more arrivals at a barrier than it expects")
        if barrier.pending == 0:
            barrier.phase, barrier.pending = barrier.phase ^ 1, barrier.count

    @staticmethod
    def wait(barrier, parity):
        """Wait until the phase of this parity is over. Copies that the barrier waits for arrive now, not earlier."""

        def ready():
            return barrier.phase != int(parity) or bool(barrier.copies)

        while barrier.phase == int(parity) or not barrier.count:
            _replay().wait(ready)
            for land in barrier.copies:
                land()
            if barrier.copies:
                barrier.copies.clear()
                _MBarrier.arrive(barrier, count=THREADS)
        _replay().wait(lambda: True)


THREADS = 128


class _AsyncCopy:
    @staticmethod
    def async_copy_global_to_shared(target, pointer, mask=None):
        rows = pointer.read(mask)
        target.data.fill_(float("nan"))
        target.whole.landed[target.stage] = math.inf

        def land():
            target.data.copy_(rows)
            target.whole.landed[target.stage] = next(_replay().clock)

        _replay().copies.setdefault(_local.name, []).append(land)

    @staticmethod
    def mbarrier_arrive(barrier, increment_count):
        assert increment_count is False
        barrier.copies += _replay().copies.pop(_local.name, [])


def fence_async_shared():
    """What this thread has seen becomes visible to the matrix units."""
    _replay().fenced[_local.name] = next(_replay().clock)


def warpgroup_mma(a, b, acc, *, use_acc=True, is_async=False):
    """A product that is computed when it is waited for."""
    assert is_async
    for operand in (a, b):
        if isinstance(operand, _View) and operand.whole.landed[operand.stage] > _replay().fenced.get(
            _local.name, 0
        ):
            raise ReplayError("a product reads a buffer without a wait for its copy, or a fence behind it")
    if not isinstance(a, _View):
        _replay().turns.append(_local.name)
    before = [_value(operand).clone() for operand in (a, b)]

    def product():
        now = [_value(operand) for operand in (a, b)]
        if any(not torch.equal(_bits(one), _bits(other)) for one, other in zip(before, now, strict=True)):
            raise ReplayError("a buffer changed, or held nothing yet, while a product read it")
        return now[0].float() @ now[1].float() + (acc if use_acc else 0)

    return product


def warpgroup_mma_wait(number, deps):
    """The results; the other partitions may run before."""
    assert number == 0
    _replay().wait(lambda: True)
    found = [product() for product in deps]
    return found[0] if len(found) == 1 else tuple(found)


def _bits(tensor):
    return tensor.contiguous().view(torch.int16)  # NaN is equal to itself


def _value(operand):
    return operand.data if isinstance(operand, _View) else operand


class _Language:
    """`triton.experimental.gluon.language` on torch."""

    int1, int32, int64, float32 = torch.bool, torch.int32, torch.int64, torch.float32
    bfloat16, float16 = torch.bfloat16, torch.float16
    constexpr = staticmethod(lambda value: value)
    static_range = range
    exp2, log2, where = torch.exp2, torch.log2, torch.where

    def __init__(self):
        self.program, self.turns = (0, 1), []

    def __getattr__(self, name):
        if name.endswith("Layout"):
            return _Layout
        raise ReplayError(f"the replay does not know gl.{name}")

    arange = staticmethod(lambda start, stop, layout: torch.arange(start, stop, dtype=torch.int32))
    full = staticmethod(lambda shape, value, dtype, layout: torch.full(shape, value, dtype=dtype))
    zeros = staticmethod(lambda shape, dtype, layout: torch.zeros(shape, dtype=dtype))
    convert_layout = staticmethod(lambda tensor, layout: tensor)
    sum = staticmethod(lambda tensor, axis: tensor.sum(axis, dtype=tensor.dtype))
    max = staticmethod(lambda tensor, axis: tensor.amax(axis))
    maximum = staticmethod(lambda a, b: torch.maximum(torch.as_tensor(a), torch.as_tensor(b)))
    minimum = staticmethod(lambda a, b: torch.minimum(torch.as_tensor(a), torch.as_tensor(b)))
    load = staticmethod(lambda pointer, mask=None, other=0: pointer.read(mask, other))

    @staticmethod
    def associative_scan(tensor, axis, function):
        return tensor.cumsum(axis, dtype=tensor.dtype)

    @staticmethod
    def store(pointer, value, mask):
        mask = mask.expand(pointer.place.shape)
        places = pointer.place[mask]
        pointer.check(places)
        pointer.memory[places] = value.expand(mask.shape)[mask].to(pointer.memory.dtype)

    @staticmethod
    def allocate_shared_memory(dtype, shape, layout):
        if dtype == torch.int64:
            return _Barriers(shape[0])
        return Shared(torch.full(shape, float("nan"), dtype=dtype))

    @staticmethod
    def warp_specialize(partitions, warps, registers):
        _replay().run(partitions)

    def program_id(self, axis):
        return torch.tensor(self.program[0], dtype=torch.int32)

    def num_programs(self, axis):
        return torch.tensor(self.program[1], dtype=torch.int32)


class _Layout:
    def __init__(self, *arguments):
        pass

    get_default_for = staticmethod(lambda shape, dtype: None)


class _Kernel:
    """A function that was decorated: called by another kernel, or launched on a grid with tensors of the CPU."""

    def __init__(self, function, language, seed):
        self.function, self.language, self.seed = function, language, seed

    def __call__(self, *arguments):
        return self.function(*arguments)

    def __getitem__(self, grid) -> Callable[..., None]:
        def launch(*arguments, **options):
            names = inspect.signature(self.function).parameters
            constants = {name: value for name, value in options.items() if name in names}
            for program in range(grid[0]):
                _local.replay, _local.name = (
                    _Replay(f"{self.seed} {program}", self.language.turns),
                    "prologue",
                )
                self.language.program = (program, grid[0])
                self.function(*map(_argument, arguments), **constants)

        return launch


def _argument(value):
    if not isinstance(value, torch.Tensor):
        return value
    memory = torch.empty(0, dtype=value.dtype).set_(value.untyped_storage())
    return Pointer(memory, value.storage_offset())


def loaded(file: str, *, seed: int = 0, rewrite: Callable[[str], str] = str) -> types.ModuleType:
    """The module of a kernel's file, whose kernels run here. `rewrite` changes its source, to plant a mistake."""
    language = _Language()

    def jit(function=None, **options):
        return jit if function is None else _Kernel(function, language, seed)

    gluon, hopper = types.ModuleType("gluon"), types.ModuleType("hopper")
    gluon.jit, gluon.language = jit, language
    hopper.async_copy, hopper.mbarrier = _AsyncCopy, _MBarrier
    for function in (fence_async_shared, warpgroup_mma, warpgroup_mma_wait):
        setattr(hopper, function.__name__, function)
    name = "triton.experimental.gluon"
    experimental = types.ModuleType("triton.experimental")
    experimental.gluon = gluon
    fakes = {"triton.experimental": experimental, name: gluon, f"{name}.language.nvidia.hopper": hopper}
    module = types.ModuleType(Path(file).stem + "_replayed")
    source = rewrite(Path(file).read_text(encoding="utf-8"))
    with patch.dict("sys.modules", fakes):
        exec(compile(source, file, "exec"), module.__dict__)
    return module
