"""Is imported once the writer of a FIFO, whose path is in BLOCKED, has closed it."""

import os
from pathlib import Path

Path(os.environ["BLOCKED"]).read_bytes()
