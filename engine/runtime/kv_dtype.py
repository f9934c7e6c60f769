"""In which type K and V are kept: the model's own, or 8 bits of which a GPU reads half as many bytes."""

from enum import StrEnum
from typing import TYPE_CHECKING

from engine.runtime.errors import ModelError

if TYPE_CHECKING:
    import torch

_FP8_NAN = 0x7F  # of e4m3: the type has no infinity, and one NaN of either sign


class KVDtype(StrEnum):
    """Element type of the KV pool."""

    MODEL = "model"
    FP8_E4M3 = "fp8_e4m3"  # 4 bits of exponent, 3 of mantissa, up to 448; kept without a scale


def kv_dtype_of(name: KVDtype | str, model_dtype: "torch.dtype") -> "torch.dtype":
    """The element type for a name. Raises ModelError for a name that does not exist."""
    import torch

    if name not in set(KVDtype):
        raise ModelError(f"kv_dtype {str(name)!r} does not exist; choose {', '.join(KVDtype)}")
    return model_dtype if name == KVDtype.MODEL else torch.float8_e4m3fn


def kv_item_bytes(name: KVDtype | str, model_dtype: "torch.dtype") -> int:
    """Bytes of one number in the pool. Raises ModelError."""
    return kv_dtype_of(name, model_dtype).itemsize


def kept_as(dtype: "torch.dtype") -> tuple["torch.dtype", float]:
    """What the memory is to torch, and the value that poisons it: 8-bit floats are moved as bytes."""
    import torch

    return (torch.uint8, _FP8_NAN) if dtype.itemsize == 1 else (dtype, float("nan"))


def check_kv_dtype(name: KVDtype | str, device: "torch.device", backend: str = "auto") -> None:
    """Raise ModelError where the device, or the backend asked for by name, cannot widen 8-bit floats.

    CUDA can from sm_89 on; the compiled CPU kernels cannot.
    """
    import torch

    from paged_kernels.backends import FP8_CAPABILITY

    if name == KVDtype.FP8_E4M3 and backend == "native":
        raise ModelError("kv_dtype fp8_e4m3 is not read by backend native; use backend torch, or auto")
    if name != KVDtype.FP8_E4M3 or device.type != "cuda":
        return
    found = torch.cuda.get_device_capability(device)
    if found < FP8_CAPABILITY:
        raise ModelError(
            f"kv_dtype fp8_e4m3 needs sm_{FP8_CAPABILITY[0]}{FP8_CAPABILITY[1]} or newer, and "
            f"{torch.cuda.get_device_name(device)} is sm_{found[0]}{found[1]}; use kv_dtype model"
        )
