"""Errors of this package. Each message names the operation, the wrong value and what is allowed."""


class KernelError(ValueError):
    """Arguments that an operation cannot serve. The subclasses say what is wrong with them."""


class ShapeError(KernelError):
    """Shapes that do not fit each other, or that no kernel serves: head_dim, group, number of rows."""


class DtypeError(KernelError):
    """A dtype, or a combination of dtypes, that the operation does not support."""


class DeviceError(KernelError):
    """Tensors that are not all on one device."""


class StrideError(KernelError):
    """Strides or addresses that the kernels cannot read in wide loads."""


class TableError(KernelError):
    """A block id, slot or length outside its cache or table."""


class OptionError(KernelError):
    """A number or name that an option does not allow."""


class WorkspaceError(KernelError):
    """A frozen workspace that is smaller than a call needs."""


class BackendUnavailableError(KernelError):
    """A backend that was chosen by name cannot run here. There is no silent fallback."""
