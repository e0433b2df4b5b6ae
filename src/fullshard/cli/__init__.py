"""The command line: parse, call, print. One thin file per command."""
