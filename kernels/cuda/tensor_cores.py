"""What the tensor-core rungs share: what they need of a device and of a call."""

from __future__ import annotations

from kernels.targets import IS_SIMULATOR, compute_capability


def why_no_device(needed: tuple[int, int]) -> str | None:
    """Return why the device has not the tensor cores that a kernel needs, or None.

    Args:
        needed: The least compute capability.
    """
    if IS_SIMULATOR:
        return "numba's simulator has no tensor cores"
    if (found := compute_capability()) < needed:
        least, have = (".".join(map(str, version)) for version in (needed, found))
        return f"it needs compute capability {least}, this device has {have}"
    return None


def why_not_here(tile: tuple[int, int] | None, needed: tuple[int, int]) -> str | None:
    """Return why the device cannot run a kernel of tensor cores with a tile, or None.

    Args:
        tile: What the caller asks for.
        needed: The least compute capability.
    """
    if (missing := why_no_device(needed)) is not None:
        return missing
    return None if tile is None else f"it takes its own tiles only, got {tile}"
