"""`python -m truedraft` is the command `truedraft`."""

from truedraft.cli.main import main

if __name__ == "__main__":
    main()
