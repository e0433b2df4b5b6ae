"""Lets test_gpu.py import the checks that its ranks run as well."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))
