"""What other programs start: entry points, above the command line."""
