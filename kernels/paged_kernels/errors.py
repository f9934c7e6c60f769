"""Errors of this package. Each message names the operation, the wrong value and what is allowed."""


class KernelError(ValueError):
    """Arguments that an operation cannot serve; the kinds below say what about them is wrong."""


class ShapeError(KernelError):
    """Tensors whose shapes do not fit each other or no kernel: head_dim, group, number of rows."""


class DtypeError(KernelError):
    """A dtype, or a combination of dtypes, that the operation does not know."""


class DeviceError(KernelError):
    """Tensors that are not all on one device."""


class StrideError(KernelError):
    """Strides or addresses that the kernels cannot read in wide loads."""


class TableError(KernelError):
    """Values that point nowhere: a block id, slot or length outside of its cache or table."""


class OptionError(KernelError):
    """A number or name outside of what an option allows."""


class WorkspaceError(KernelError):
    """A frozen workspace that is smaller than a call needs."""


class BackendUnavailableError(KernelError):
    """A backend that was asked for by name and cannot run here; nothing falls back silently."""
