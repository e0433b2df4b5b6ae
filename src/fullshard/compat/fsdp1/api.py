"""torch.distributed.fsdp.api: torch's own enums and settings."""

from torch.distributed.fsdp.api import *  # noqa: F403  # pyright: ignore[reportWildcardImportFromLibrary]
from torch.distributed.fsdp.api import __all__ as __all__
