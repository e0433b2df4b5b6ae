"""The memory of a process: pages that a container cannot reclaim; shared pages count in part."""

import mmap
import os
import subprocess
import sys

from fullshard.observe.metrics import process_bytes

SIZE = 64 << 20
TOUCH = f"""
import mmap, sys
mapped = mmap.mmap(int(sys.argv[1]), {SIZE})
mapped[::4096] = bytes({SIZE} // 4096)
print(flush=True)
sys.stdin.read()
"""


def test_pages_of_files_do_not_count_and_shared_ones_in_parts(tmp_path):
    def taken():
        return round((process_bytes() - before) / SIZE, 1)

    (tmp_path / "file").write_bytes(bytes(SIZE))
    with (tmp_path / "file").open("rb") as file:
        read = mmap.mmap(file.fileno(), SIZE, access=mmap.ACCESS_READ)
        before = process_bytes()
        assert sum(read[::4096]) == 0
        assert taken() == 0
    descriptor = os.memfd_create("shared")
    os.ftruncate(descriptor, SIZE)
    mapped = mmap.mmap(descriptor, SIZE)
    mapped[::4096] = bytes(SIZE // 4096)
    assert taken() == 1
    command, pipe = [sys.executable, "-c", TOUCH, str(descriptor)], subprocess.PIPE
    with subprocess.Popen(command, pass_fds=[descriptor], stdin=pipe, stdout=pipe) as other:
        other.stdout.readline()
        assert taken() == 0.5
        own = bytearray(SIZE)
        own[::4096] = bytes(SIZE // 4096)
        assert taken() == 1.5
        other.stdin.close()
    assert taken() == 2
