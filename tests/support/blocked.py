"""Imports only once the FIFO that BLOCKED names has a writer that closed it."""

import os
from pathlib import Path

Path(os.environ["BLOCKED"]).read_bytes()
