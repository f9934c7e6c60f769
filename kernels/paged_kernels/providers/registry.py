"""All providers by name."""

from paged_kernels.providers.flash_attn import FlashAttention
from paged_kernels.providers.flashinfer import FlashInfer
from paged_kernels.providers.flex import FlexAttention
from paged_kernels.providers.ours import Cascade, ContiguousTwin, Paged
from paged_kernels.providers.protocol import Provider
from paged_kernels.providers.sdpa import ContiguousSdpa, GatherSdpa
from paged_kernels.providers.user import load_function


def find_providers(function: str | None = None) -> dict[str, Provider]:
    """Every provider, ours first, whether or not it can run here; `function` adds the user's `module:function`.

    Raises `OptionError` where that function cannot be found.
    """
    found: list[Provider] = [
        Paged(),
        ContiguousTwin(),
        Cascade(),
        Cascade("cascade-always", always=True),
        ContiguousSdpa(),
        GatherSdpa(),
        FlexAttention(),
        FlashInfer(),
        FlashAttention(),
    ]
    if function:
        found.append(load_function(function))
    return {provider.name: provider for provider in found}
