"""The command `truedraft`. Modules here load torch inside command bodies only, so that `--help` answers at once."""
