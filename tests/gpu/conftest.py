"""Lets test_gpu.py import the checks, which its ranks also run."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))
