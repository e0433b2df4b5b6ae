"""`python -m fullshard` is `fullshard`."""

from fullshard.cli.app import main

if __name__ == "__main__":
    main()
