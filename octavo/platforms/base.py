"""What a platform is: facts of the machine, or of the device, that runs the model. Knows no models and no kernels."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol


class Platform(Protocol):
    """Asked at start-up. The worker and ``octavo plan`` get one handed in; tests hand in their own."""

    @property
    def name(self) -> str:
        """The key of ``platforms.registry.PLATFORMS``."""
        ...

    def device_name(self) -> str:
        """What the vendor calls the device, for people."""
        ...

    def devices(self) -> Sequence[str]:
        """Names of the devices that can run a model, e.g. "cpu"; never empty."""
        ...

    def num_threads(self) -> int:
        """How many threads kernels on the host should use; at least 1."""
        ...

    def available_memory(self) -> int:
        """Bytes, of the memory that holds weights and KV blocks, that this process could still take."""
        ...

    def resident_memory(self, pid: int | None = None) -> int:
        """Bytes of that memory which a process has, by default this one; 0 where that is unknown."""
        ...

    def address_space_room(self) -> int | None:
        """Bytes that this process may still map; None without a limit."""
        ...

    def release_free_memory(self) -> None:
        """Hand memory that this process has freed back to the system."""
        ...
