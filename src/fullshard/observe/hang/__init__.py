"""Finding a rank that hangs: the watchdog collects positions, the judge names the rank."""
