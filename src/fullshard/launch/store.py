"""The store of a launch: ranks meet at it, and their watchdogs speak over it.

The launcher serves it, so it outlives every rank. The port is bound before the first rank starts
and never freed in between; who comes before the store is there waits in the socket's backlog.
"""

from __future__ import annotations

import socket
import threading
from typing import Any

from fullshard.errors import ConfigError

LOOPBACK = "127.0.0.1"
_BACKLOG = 4096


def check_reaches(host: str, port: int) -> None:
    """Whether the store that this process is about to serve can be reached under its address.

    Torch looks for itself there for a minute and more.

    Raises:
        ConfigError: It cannot: the address is another machine's, or nobody's.
    """
    try:
        socket.create_connection((host, port), timeout=5.0).close()
    except (OSError, UnicodeError) as error:  # of a name that no host can have
        raise ConfigError(
            f"MASTER_ADDR: expected the address of rank 0's machine, which is this one "
            f"({socket.gethostname()}), got {host}: port {port} cannot be reached there "
            f"({getattr(error, 'strerror', None) or error}). Correct MASTER_ADDR or "
            "launch.main_process_ip."
        ) from error


class LaunchStore:
    """A port, and from `serve` on torch's store behind it.

    Args:
        host: This machine's address; the loopback where all ranks are here.
        port: 0: any that is free.
        served_here: False: another machine's launcher serves it, and here is nothing to do.

    Raises:
        ConfigError: The port is taken, or the host is not this machine.
    """

    def __init__(self, host: str = LOOPBACK, port: int = 0, *, served_here: bool = True) -> None:
        self.host = host
        self.port = port
        self.store: Any = None
        self._serving: threading.Thread | None = None
        self._socket: socket.socket | None = None
        if served_here:
            self._socket = self._bind(host, port)
            self.port = self._socket.getsockname()[1]
            if host != LOOPBACK:
                check_reaches(host, self.port)

    @staticmethod
    def _bind(host: str, port: int) -> socket.socket:
        bound = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
        bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            bound.bind((host if host == LOOPBACK else "", port))
        except OSError as error:
            bound.close()
            raise ConfigError(
                f"MASTER_PORT: expected a free port, got {port} ({error.strerror}). Take another."
            ) from error
        bound.listen(_BACKLOG)
        return bound

    def serve_soon(self) -> None:
        """Answer from a thread: torch takes seconds to import, and ranks are watched meanwhile."""
        self._serving = threading.Thread(target=self.serve, name="store of the launch")
        self._serving.start()

    def serve(self) -> None:
        """Answer from now on."""
        if self._socket is None:
            return
        from torch.distributed import TCPStore  # pyright: ignore[reportPrivateImportUsage]

        self.store = TCPStore(
            self.host,
            self.port,
            is_master=True,
            wait_for_workers=False,
            master_listen_fd=self._socket.detach(),
        )

    def close(self) -> None:
        """Free the port."""
        if self._serving is not None:
            self._serving.join()
        if self._socket is not None:
            self._socket.close()
        self.store = None
