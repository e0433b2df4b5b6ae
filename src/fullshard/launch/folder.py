"""The private folder through which a launcher and its ranks talk; gone when the launch ends.

failure_<k>.json    why rank k failed, written by the rank itself
stacks_<k>.txt      what rank k was doing when the launcher asked (SIGUSR2)
events_<k>          the last events of rank k's engine, mapped: they outlive it
log_<k>             link to logs/rank_<k>.log
hang.json           why all ranks were ended, written by the one whose watchdog judged
ending              exists once a rank has failed: the others need not explain their end
"""

from __future__ import annotations

import dataclasses
from pathlib import Path

from fullshard.config.environment import LaunchEnvironment, Launcher


@dataclasses.dataclass(frozen=True)
class LaunchFolder:
    """Names of the files above."""

    path: Path

    @classmethod
    def of(cls, launch: LaunchEnvironment | None) -> LaunchFolder | None:
        """The folder of a rank that our launcher started; None for any other process."""
        if launch is None or launch.launcher is not Launcher.FULLSHARD or not launch.launch_dir:
            return None
        return cls(launch.launch_dir)

    @property
    def hang(self) -> Path:
        """The verdict of the ranks' watchdogs; before any failure of a single rank."""
        return self.path / "hang.json"

    @property
    def ending(self) -> Path:
        """Exists once the launcher ends ranks because another one failed."""
        return self.path / "ending"

    def failure(self, rank: int) -> Path:
        """Why the rank failed."""
        return self.path / f"failure_{rank}.json"

    def stacks(self, rank: int) -> Path:
        """The rank's stacks, where the launcher asked for them."""
        return self.path / f"stacks_{rank}.txt"

    def events(self, rank: int) -> Path:
        """The last events of the rank's engine."""
        return self.path / f"events_{rank}"

    def log(self, rank: int) -> Path:
        """The rank's log."""
        return self.path / f"log_{rank}"
